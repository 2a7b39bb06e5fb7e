"""Loaders of other projects, for benchmarks.loader: each gives normalised floats on the device.

They take part where their packages are installed: timm, nvidia-dali-cuda130, and spdl, which also
needs FFmpeg's libraries. The scripts need none of these.
"""

import contextlib
import importlib.util
import itertools
import random

import torch
from torchvision import datasets

from common.images import RandomCrop
from common.prefetcher import MEAN, STD, Prefetcher


def timm_batches(root, args, device):
    """timm's own loader; like all of these, an endless iterator of epochs, iterables of batches."""
    from timm.data import ImageDataset, create_loader

    loader = create_loader(
        ImageDataset(root),
        (3, args.image_size, args.image_size),
        args.batch_size,
        is_training=True,
        color_jitter=0.0,
        mean=MEAN,
        std=STD,
        num_workers=args.workers,
        device=device,
    )
    return itertools.repeat(loader)


def dali_batches(root, args, device):
    """DALI's pipeline of its ImageNet example, with a CPU's operators where there is no GPU."""
    from nvidia.dali import fn, pipeline_def, types
    from nvidia.dali.plugin.pytorch import DALIClassificationIterator, LastBatchPolicy

    gpu = device.type == "cuda"

    @pipeline_def
    def pipeline():
        files, targets = fn.readers.file(file_root=root, random_shuffle=True, name="files")
        images = fn.decoders.image_random_crop(files, device="mixed" if gpu else "cpu")
        size = args.image_size
        images = fn.resize(images, resize_x=size, resize_y=size, interp_type=types.INTERP_LINEAR)
        images = fn.crop_mirror_normalize(
            images,
            mirror=fn.random.coin_flip(),
            mean=[255 * mean for mean in MEAN],
            std=[255 * std for std in STD],
        )
        return images, targets

    made = pipeline(
        batch_size=args.batch_size,
        num_threads=args.workers,
        device_id=torch.cuda.current_device() if gpu else None,
    )
    drop = LastBatchPolicy.DROP
    iterator = DALIClassificationIterator(
        made, reader_name="files", auto_reset=True, last_batch_policy=drop
    )
    return (((batch[0]["data"], batch[0]["label"]) for batch in iterator) for _ in iter(int, 1))


def spdl_batches(root, args, device):
    """SPDL's pipeline: FFmpeg decodes, crops and resizes in threads of one process."""
    import spdl.io
    from spdl.pipeline import PipelineBuilder

    samples = datasets.ImageFolder(root).samples
    crop = RandomCrop(args.image_size)
    prefetcher = Prefetcher([], device)

    def decode(sample):
        packets = spdl.io.demux_image(sample[0])
        top, left, height, width = crop.choose_part(packets.height, packets.width)
        steps = [
            f"crop={width}:{height}:{left}:{top}",
            f"scale={crop.size}:{crop.size}:flags=bilinear",
            *["hflip"] * (random.random() < crop.flip),
            "format=rgb24",
        ]
        return spdl.io.decode_packets(packets, filter_desc=",".join(steps)), sample[1]

    def batch(items):
        images = spdl.io.to_torch(spdl.io.convert_frames([frames for frames, _ in items]))
        images = prefetcher.load(images.permute(0, 3, 1, 2))
        return images, torch.tensor([target for _, target in items])

    def epoch():
        builder = PipelineBuilder().add_source(random.sample(samples, len(samples)))
        builder.pipe(decode, concurrency=args.workers, output_order="completion")
        builder.aggregate(args.batch_size, drop_last=True).pipe(batch).add_sink(3)
        pipeline = builder.build(num_threads=args.workers)
        with pipeline.auto_stop():
            yield from pipeline.get_iterator()

    return (epoch() for _ in iter(int, 1))


def installed():
    """{title: function} of those whose packages are here."""
    found = {}
    for title, module, function in (
        ("timm", "timm", timm_batches),
        ("DALI", "nvidia.dali", dali_batches),
        ("SPDL", "spdl.io", spdl_batches),
    ):
        with contextlib.suppress(ModuleNotFoundError):  # of the package around a module
            if importlib.util.find_spec(module):
                found[f"{title}: normalised floats on the device"] = function
    return found
