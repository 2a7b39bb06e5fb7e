"""There, and not used with this era."""
