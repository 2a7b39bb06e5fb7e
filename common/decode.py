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
    with open(os.devnull, "w") as silent, open(os.dup(2), "w") as stderr:
        os.dup2(silent.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr.fileno(), 2)


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
    other files are decoded whole. All decoders give the same pixels. Transparency is dropped, of a
    PNG's 16 bits the upper 8 are kept, and of an animation the first frame. Raises an error of one
    of many types for what cannot be read.
    """
    choose = choose and functools.cache(choose)  # asked again, it would draw another part
    image = _decode_jpeg(data, choose) if "nvImageCodec" in DECODERS else None
    if image is None:
        image = _decode_whole(data)
        if choose:
            top, left, height, width = choose(*image.shape[1:])
            image = image[:, top : top + height, left : left + width]
    return image


def _decode_jpeg(data, choose):
    """decode() by nvImageCodec; None where other decoders may do better, or say what is wrong."""
    if data[:3] != b"\xff\xd8\xff" or data[-2:] != b"\xff\xd9":  # its end may be missing
        return None
    try:
        stream = nvimgcodec.CodeStream(data)
        size = stream.height, stream.width
        place = 2  # of a segment: its marker, its length in two bytes, what it holds
        while data[place : place + 2] != b"\xff\xda":  # the pixels
            end = place + 2 + int.from_bytes(data[place + 2 : place + 4], "big")
            if data[place] != 0xFF or end == place + 2:
                return None
            if data[place + 1] == 0xE1 and data[place + 4 : place + 9] == b"Exif\0":
                exif = Image.Exif()
                exif.load(data[place + 4 : end])
                if exif.get(0x0112) in (5, 6, 7, 8):  # turned by a quarter
                    size = stream.width, stream.height
            place = end
    except Exception:  # of many types, where the file is damaged
        return None
    if stream.num_channels not in (1, 3) or stream.precision not in (0, 8):
        return None
    top, left, height, width = choose(*size) if choose else (0, 0, *size)
    region = nvimgcodec.Region(top, left, top + height, left + width)
    image = _decoder(os.getpid()).decode(stream.get_sub_code_stream(region=region))
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
        with contextlib.suppress(RuntimeError, ValueError):  # PIL is slower, but knows more formats
            image = decode_image(data, mode="RGB", output_dtype="auto")
            image = image if image.ndim == 3 else image[0]
            return image if image.dtype == torch.uint8 else (image.int() >> 8).to(torch.uint8)
    try:
        file = Image.open(io.BytesIO(data))
    except UnidentifiedImageError:
        raise ValueError("its format is not known") from None
    with file:
        image = ImageOps.exif_transpose(file)
        if file.format == "PNG" and image.mode == "I;16":  # PIL would cut at 255
            image = Image.fromarray((np.array(image) >> 8).astype(np.uint8))
        elif image.mode.startswith(("I", "F")):
            raise ValueError(f"what is white in its {image.mode} pixels is not known: convert it")
        return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
