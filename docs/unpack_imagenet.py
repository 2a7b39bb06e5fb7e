"""Unpacks ImageNet's three archives into train/ and val/, with a folder per class in each.

$ python docs/unpack_imagenet.py
"""

from torchvision.datasets import ImageNet

ImageNet("/path/to/imagenet", split="train")  # the folder with the three archives
ImageNet("/path/to/imagenet", split="val")
