"""From the bytes of an image file to pixels: nvImageCodec, where it is installed, or PIL."""

import contextlib
import functools
import glob
import importlib.util
import io
import os
import tempfile
import warnings

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError


def _import_nvimgcodec():
    """nvImageCodec with libjpeg-turbo alone; None where it is missing.

    Its other decoders look for libraries of GPUs, or read damaged files that PIL refuses. It takes
    all that lie in a folder: so here is one, for the time of the import, with a link to that one.
    """
    with contextlib.suppress(ImportError, OSError), tempfile.TemporaryDirectory() as folder:
        spec = importlib.util.find_spec("nvidia.nvimgcodec")
        if not spec:
            return None
        for path in glob.glob(f"{spec.submodule_search_locations[0]}/extensions/libjpeg_turbo*"):
            os.symlink(path, f"{folder}/{os.path.basename(path)}")
        os.environ["NVIMGCODEC_EXTENSIONS_PATH"] = folder
        try:
            import nvidia.nvimgcodec as nvimgcodec
        finally:
            del os.environ["NVIMGCODEC_EXTENSIONS_PATH"]
        return nvimgcodec
    return None


nvimgcodec = _import_nvimgcodec()
DECODER = "nvImageCodec" if nvimgcodec else "PIL"  # for JPEGs; PIL reads the others


def decode(data, choose=None):
    """The image in a file's bytes as uint8 RGB [3, height, width], turned as its Exif tag says.

    choose(height, width): gives (top, left, height, width) of the part that is wanted; without it
    that is the whole image. Of a JPEG nvImageCodec decodes that part alone, which takes less time;
    other files are decoded whole. Both decoders give the same pixels. Transparency is dropped, of a
    PNG's 16 bits the upper 8 are kept, and of an animation the first frame. Raises an error of one
    of many types for what cannot be read.
    """
    choose = choose and functools.cache(choose)  # asked again, it would draw another part
    image = _decode_jpeg(data, choose) if nvimgcodec else None
    if image is None:
        image = _decode_whole(data)
        if choose:
            top, left, height, width = choose(*image.shape[1:])
            image = image[:, top : top + height, left : left + width]
    return image


def _decode_jpeg(data, choose):
    """decode() by nvImageCodec; None where PIL may do better, or say what is wrong."""
    if data[:3] != b"\xff\xd8\xff" or data[-2:] != b"\xff\xd9":  # its end may be missing
        return None
    if b"Exif" in data or b"http://ns.adobe.com/xap" in data:  # it may have to be turned
        return None
    try:
        stream = nvimgcodec.CodeStream(data)
    except Exception:  # of many types, where the file is damaged
        return None
    if stream.num_channels not in (1, 3) or stream.precision not in (0, 8):
        return None
    size = stream.height, stream.width
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
        if file.format == "PNG" and image.mode == "I;16":  # PIL would cut at 255
            image = Image.fromarray((np.array(image) >> 8).astype(np.uint8))
        elif image.mode.startswith(("I", "F")):
            raise ValueError(f"what is white in its {image.mode} pixels is not known: convert it")
        elif image.mode == "P" and "transparency" in image.info:
            image = image.convert("RGBA")  # PIL warns of a direct way to RGB
        return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
