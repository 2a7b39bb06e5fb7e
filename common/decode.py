"""From the bytes of an image file to pixels: by TorchCodec or, where that is missing, by PIL."""

import io

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError

try:
    from torchcodec.decoders import decode_image

    DECODER = "torchcodec"
except (ImportError, OSError, RuntimeError):  # not installed, or built for another torch
    DECODER = "PIL"


def decode(data):
    """The image in a file's bytes as uint8 RGB [3, height, width], turned as its EXIF tag says.

    Both decoders give the same pixels. Transparency is dropped, and of 16 bits the upper 8 are
    kept. Raises an error of one of many types for what cannot be read, and for animations.
    """
    if DECODER == "torchcodec":
        try:
            image = decode_image(data, mode="RGB", output_dtype="auto")
        except (RuntimeError, ValueError):  # PIL is slower, but knows more formats
            image = _decode_with_pil(data)
    else:
        image = _decode_with_pil(data)
    if image.ndim != 3:
        raise ValueError("it has several frames")
    return image if image.dtype == torch.uint8 else (image.int() >> 8).to(torch.uint8)


def _decode_with_pil(data):
    try:
        file = Image.open(io.BytesIO(data))
    except UnidentifiedImageError:
        raise ValueError("its format is not known") from None
    with file:
        # Of a PNG or MPO with several frames TorchCodec takes the first.
        if file.format not in ("PNG", "MPO") and getattr(file, "n_frames", 1) > 1:
            raise ValueError("it has several frames")
        if file.mode.startswith("I;16"):
            tags = getattr(file, "tag_v2", {})  # of a TIFF: 12 bits, or 0 for white
            if tags.get(258, (16,))[0] != 16 or tags.get(262, 1) != 1:
                raise ValueError("its pixels are not 16 bits from black to white: convert it")
            grey = np.array(ImageOps.exif_transpose(file)).astype(np.uint16)
            return torch.from_numpy((grey >> 8).astype(np.uint8)).expand(3, -1, -1)
        if file.mode in ("I", "F"):  # what is white there is not known: PIL would cut at 255
            raise ValueError("its pixels have 32 bits: convert it to 8 or 16")
        image = ImageOps.exif_transpose(file).convert("RGB")
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)
