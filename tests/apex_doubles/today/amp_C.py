"""Apex's CUDA extensions: only their name, nothing here calls them."""
