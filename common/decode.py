"""From the bytes of an image file to pixels: nvImageCodec, where it is installed, or PIL."""

import contextlib
import functools
import glob
import importlib.util
import io
import math
import os
import re
import tempfile
import warnings

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError

nvimgcodec = None
with contextlib.suppress(ImportError, OSError), tempfile.TemporaryDirectory() as folder:
    # With libjpeg-turbo alone: its other decoders look for libraries of GPUs, or read damaged files
    # that PIL refuses. It loads what lies in a folder, so here is one, while it is imported.
    spec = importlib.util.find_spec("nvidia.nvimgcodec")
    root = spec.submodule_search_locations[0] if spec else ""
    for path in glob.glob(f"{root}/extensions/libjpeg_turbo*"):
        os.symlink(path, f"{folder}/{os.path.basename(path)}")
        os.environ["NVIMGCODEC_EXTENSIONS_PATH"] = folder
        os.environ["PYNVIMGCODEC_VERBOSITY"] = "0"  # PIL's errors say more
        try:
            import nvidia.nvimgcodec as nvimgcodec
        finally:
            del os.environ["NVIMGCODEC_EXTENSIONS_PATH"], os.environ["PYNVIMGCODEC_VERBOSITY"]
MARKER = re.compile(rb"\xff[^\0]")  # in a JPEG's pixels an ff is followed by 0
DECODER = "nvImageCodec" if nvimgcodec else "PIL"  # for JPEGs; PIL reads the others


def decode(data, choose=None):
    """The image in a file's bytes as uint8 RGB [3, height, width], turned as its Exif tag says.

    choose(height, width): gives (top, left, height, width) of the part that is wanted; without it
    that is the whole image. Of a JPEG nvImageCodec decodes that part alone, which takes less time;
    other files are decoded whole. Both decoders give the same pixels; damage outside of the part
    may remain unseen. Transparency is dropped, of a PNG's 16 bits the upper 8 are kept, and of an
    animation the first frame. Raises an error of one of many types for what cannot be read.
    """
    choose = choose or (lambda height, width: (0, 0, height, width))
    choose = functools.cache(choose)  # asked again, it would draw another part
    image = _decode_jpeg(data, choose) if nvimgcodec else None
    if image is None:
        image = _decode_whole(data)
        top, left, height, width = choose(*image.shape[1:])
        image = image[:, top : top + height, left : left + width]
    return image


def _decode_jpeg(data, choose):
    """decode() by nvImageCodec; None where PIL may do better, or say what is wrong."""
    if data[:2] != b"\xff\xd8" or data[-2:] != b"\xff\xd9":  # its end may be missing
        return None
    place = 2  # of a segment: ff, its kind, its length in two bytes, what it holds
    while (kind := data[place : place + 2]) != b"\xff\xda":  # the pixels
        if kind[:1] != b"\xff" or kind[1:] in (b"\xe1", b"\xff", b""):
            return None  # Exif or XMP, by which it may have to be turned; or there is no segment
        place += 2 + int.from_bytes(data[place + 2 : place + 4], "big")
    if MARKER.search(data, place + 2, len(data) - 2):
        return None  # a progressive JPEG, or damage, which a part might not show: PIL reads it all
    try:
        stream = nvimgcodec.CodeStream(data)
        size = stream.height, stream.width
        if stream.num_channels not in (1, 3) or stream.precision not in (0, 8):
            return None
        if stream.height * stream.width > (Image.MAX_IMAGE_PIXELS or math.inf):
            return None  # PIL warns of it, or refuses it
    except Exception:  # of many types, where the file is damaged
        return None
    top, left, height, width = choose(*size)
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
    try:
        file = Image.open(io.BytesIO(data))
    except UnidentifiedImageError:
        raise ValueError("its format is not known") from None
    with file:
        file.load()  # an error in the pixels is one; in what says how to turn them it is none
        image = file
        with contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = ImageOps.exif_transpose(file)
        if file.format == "PNG" and image.mode in ("I;16", "I"):  # PIL would cut at 255
            image = Image.fromarray((np.array(image) >> 8).astype(np.uint8))
        elif image.mode.startswith(("I", "F")):
            raise ValueError(f"what is white in its {image.mode} pixels is not known: convert it")
        elif image.mode == "P" and "transparency" in image.info:
            image = image.convert("RGBA")  # PIL warns of a direct way to RGB
        return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
