"""From the bytes of an image file to pixels: nvImageCodec, TorchCodec or PIL, what there is."""

import contextlib
import functools
import io
import os

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError


@contextlib.contextmanager
def _silent():
    """Without what native code writes to stderr: nvImageCodec misses libraries for GPUs."""
    old, silent = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 2)
    try:
        yield
    finally:
        os.dup2(old, 2)
        os.close(old)
        os.close(silent)


DECODERS = ["PIL"]
with contextlib.suppress(ImportError, OSError, RuntimeError):  # missing, or built for another torch
    from torchcodec.decoders import decode_image

    DECODERS.insert(0, "TorchCodec")
with contextlib.suppress(ImportError, OSError), _silent():
    import nvidia.nvimgcodec as nvimgcodec

    DECODERS.insert(0, "nvImageCodec")


def decode(data, choose=None):
    """The image in a file's bytes as uint8 RGB [3, height, width], turned as its EXIF tag says.

    choose(height, width): gives (top, left, height, width) of the part that is wanted; without it
    that is the whole image. Of a JPEG nvImageCodec decodes that part alone, which takes less time;
    other files are decoded whole. All decoders give the same pixels. Transparency is dropped, and
    of 16 bits the upper 8 are kept. Raises an error of one of many types for what cannot be read,
    and for animations.
    """
    size, box = _size_of_jpeg(data), None
    if size:
        box = choose(*size) if choose else (0, 0, *size)
        image = _decode_part(data, *box)
        if image is not None:
            return image
    image = _decode_whole(data)
    if choose:
        top, left, height, width = box or choose(*image.shape[1:])
        image = image[:, top : top + height, left : left + width]
    return image


def _size_of_jpeg(data):
    """(height, width) of a JPEG that nvImageCodec can decode; None for other files."""
    if "nvImageCodec" not in DECODERS:
        return None
    if data[:3] != b"\xff\xd8\xff" or data[-2:] != b"\xff\xd9":  # its end may be missing
        return None
    try:
        stream = nvimgcodec.CodeStream(data)
        size = stream.height, stream.width
        if stream.num_channels not in (1, 3) or stream.precision not in (0, 8):
            return None
    except RuntimeError:
        return None
    if _has_exif(data):
        try:
            with Image.open(io.BytesIO(data)) as file:
                turned = file.getexif().get(0x0112)
        except Exception:  # of many types, where the tag is damaged
            return None
        if turned in (5, 6, 7, 8):  # by a quarter
            size = size[::-1]
    return size


def _has_exif(data):
    """Whether a JPEG has EXIF tags, in a segment before its pixels, or is not understood."""
    place, marker = 2, b"\xff"
    while marker.startswith(b"\xff") and marker != b"\xff\xda":  # the pixels
        marker = data[place : place + 2]
        if marker == b"\xff\xe1" and data[place + 4 : place + 9] == b"Exif\0":
            return True
        place += 2 + int.from_bytes(data[place + 2 : place + 4], "big")
    return marker != b"\xff\xda"


def _decode_part(data, top, left, height, width):
    """A part of a JPEG; None if that fails: another decoder may read it, or says why it cannot."""
    region = nvimgcodec.Region(top, left, top + height, left + width)
    stream = nvimgcodec.CodeStream(data).get_sub_code_stream(region=region)
    image = _decoder(os.getpid()).decode(stream)
    if image is None or image.shape != (height, width, 3):
        return None
    return torch.from_numpy(np.asarray(image)).permute(2, 0, 1)


@functools.lru_cache(maxsize=1)
def _decoder(pid):
    """One for each process: its threads do not live on in a fork."""
    cpu = nvimgcodec.Backend(nvimgcodec.BackendKind.CPU_ONLY)
    device = nvimgcodec.NVIMGCODEC_DEVICE_CPU_ONLY
    return nvimgcodec.Decoder(device_id=device, backends=[cpu], max_num_cpu_threads=1)


def _decode_whole(data):
    if "TorchCodec" in DECODERS:
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
