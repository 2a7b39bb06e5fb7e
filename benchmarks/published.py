"""Speeds of many GPUs that others have published, to hold predict.py against.

Each is predicted from the speed that the same source gives for its smallest setting, and from the
network that it names: the computing time is chosen so that the smallest setting comes out right.
"""

from dataclasses import replace

import predict

NVIDIA = "https://github.com/NVIDIA/DeepLearningExamples/blob"
RESNET = f"{NVIDIA}/3bbe228d/PyTorch/Classification/ConvNets/resnet50v1.5/README.md"
BERT = f"{NVIDIA}/23a6382c/PyTorch/LanguageModeling/BERT/README.md"
HOROVOD = "https://github.com/horovod/horovod/blob/master/docs/benchmarks.rst"
TENSORFLOW = "https://github.com/tensorflow/docs/blob/62da04c0/site/en/r1/guide/performance/"
TENSORFLOW += "benchmarks.md"
GOYAL = "https://arxiv.org/abs/1706.02677"
TITAN = (
    "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md"
)
FOUNDRY = (
    "https://github.com/mosaicml/llm-foundry/blob/061f2c7c/scripts/train/benchmarking/README.md"
)
# Gbit/s in one direction, from NVIDIA's data sheets: half of what they call total bandwidth.
P100, V100, A100, H100 = 640, 1200, 2400, 3600
LARGE = dict(weights=336e6, precision="fp16")  # BERT large; Apex sends what fp16 computed
LLAMA = dict(weights=8.03e9, strategy="fsdp", units=32, gather="bf16", precision="fp32")
MPT = dict(strategy="fsdp", gather="bf16", precision="bf16", gpus_per_node=8, within_gbit=A100)
MPT |= dict(between_gbit=1600)

# A DGX-1 has 4 adapters of 100 Gbit/s, a DGX-2H 8.
# name, source; nodes, GPUs a node and images/s (or tokens, sequences) of the smallest setting, then
# of the others; what predict.py is told; what a bad prediction is due to, as far as is known.
PUBLISHED = [
    dict(
        name="ResNet-50, DGX-1, fp16",
        source=RESNET,
        base=(1, 1, 893.09),
        others=[(1, 8, 6888.75)],
        values=dict(weights=25557032, images=256, within_gbit=V100, precision="fp16"),
        why="the source reads JPEGs, and does not name the batch: 256 was taken",
    ),
    dict(
        name="ResNet-50, DGX-1, fp32",
        source=RESNET,
        base=(1, 1, 380.44),
        others=[(1, 8, 2945.37)],
        values=dict(weights=25557032, images=128, within_gbit=V100),
        why="the source reads JPEGs, and does not name the batch: 128 was taken",
    ),
    dict(
        name="ResNet-50, DGX-2, fp16",
        source=RESNET,
        base=(1, 1, 894.41),
        others=[(1, 16, 13443.82)],
        values=dict(weights=25557032, images=256, within_gbit=V100, precision="fp16"),
        why="the source reads JPEGs, and does not name the batch: 256 was taken",
    ),
    dict(
        name="Inception V3, 128 nodes, Horovod",
        source=f"{HOROVOD} {TENSORFLOW}",
        base=(1, 1, 142),
        others=[(128, 4, 0.90 * 512 * 142)],
        values=dict(weights=23.8e6, images=64, between_gbit=25, within_gbit=100),
        why="one GPU's speed is TensorFlow's own, on another machine",
    ),
    dict(
        name="VGG-16, 128 nodes, Horovod",
        source=f"{HOROVOD} {TENSORFLOW}",
        base=(1, 1, 154),
        others=[(128, 4, 0.68 * 512 * 154)],
        values=dict(weights=138357544, images=64, between_gbit=25, within_gbit=100),
        why="the network is taken at its full 25 Gbit/s, which one connection may not reach",
    ),
    dict(
        name="ResNet-50, 32 nodes, Goyal et al.",
        source=GOYAL,
        base=(1, 8, 90 * 1281167 / (29 * 3600)),
        others=[(32, 8, 0.90 * 32 * 90 * 1281167 / (29 * 3600))],
        values=dict(weights=25557032, images=32, between_gbit=50, within_gbit=P100),
        why="29 hours on 8 GPUs and 90 % from 8 to 256 are rounded in the source",
    ),
    dict(
        name="BERT large, DGX-1, 128 tokens",
        source=BERT,
        base=(1, 8, 874.24),
        others=[(4, 8, 3089.76), (16, 8, 12144.64)],
        values=LARGE | dict(images=16, accumulate=32, between_gbit=400, within_gbit=V100),
        why="nothing that is sent explains a loss of 12 % from 1 node to 4; 32 passes a step were "
        "taken",
    ),
    dict(
        name="BERT large, DGX-2H, 128 tokens",
        source=BERT,
        base=(1, 16, 3379.2),
        others=[(4, 16, 12709.88), (16, 16, 51937.28)],
        values=LARGE | dict(images=64, accumulate=4, between_gbit=800, within_gbit=V100),
        why="4 passes a step are those of 16 nodes; 4 nodes take 16",
    ),
    dict(
        name="BERT large, DGX-2H, 1 pass",
        source=BERT,
        base=(1, 16, 3379.2),
        others=[(64, 16, 188088.32)],
        values=LARGE | dict(images=64, accumulate=1, between_gbit=800, within_gbit=V100),
        why="the one node takes 64 passes a step, and thereby hides LAMB's own time",
    ),
    dict(
        name="Llama 3.1 8B, FSDP, H100",
        source=TITAN,
        base=(1, 8, 8 * 5762),
        others=[(16, 8, 128 * 5605)],
        values=LLAMA | dict(images=2 * 8192, between_gbit=3200, within_gbit=H100),
        why="",
    ),
    dict(
        name="Llama 3.1 8B, FSDP, compiled, H100",
        source=TITAN,
        base=(1, 8, 8 * 6667),
        others=[(16, 8, 128 * 6514)],
        values=LLAMA | dict(images=2 * 8192, between_gbit=3200, within_gbit=H100),
        why="",
    ),
    dict(
        name="MPT-7B, FSDP, A100 40 GB",
        source=FOUNDRY,
        base=(4, 8, 32 * 3725),
        others=[(8, 8, 64 * 3665), (16, 8, 128 * 3623)],
        values=MPT | dict(weights=6658859008, images=18 * 2048, units=32),
        why="a loss of 1 % for each doubling also where little is sent: uneven steps",
    ),
    dict(
        name="MPT-3B, FSDP, A100 40 GB",
        source=FOUNDRY,
        base=(4, 8, 32 * 9914),
        others=[(8, 8, 64 * 9736), (16, 8, 128 * 9538)],
        values=MPT | dict(weights=2651837440, images=6 * 2048, units=32),
        why="a loss of 2 % for each doubling also where little is sent: uneven steps",
    ),
    dict(
        name="MPT-125M, FSDP, A100 40 GB",
        source=FOUNDRY,
        base=(2, 8, 16 * 130535),
        others=[(4, 8, 32 * 127122), (8, 8, 64 * 125234), (16, 8, 128 * 123936)],
        values=MPT | dict(weights=125311488, images=26 * 2048, units=12),
        why="a loss of 2 % for each doubling also where little is sent: uneven steps",
    ),
]


def rows():
    """[{name, source, nodes, gpus, published, predicted, error, why}], speeds per second."""
    found = []
    for one in PUBLISHED:
        nodes, gpus, speed = one["base"]
        smallest = calibrated(known(one["values"], nodes, gpus), speed)
        for nodes, gpus, published in one["others"]:
            predicted = predict.speed(replace(smallest, nodes=nodes, gpus=gpus))
            row = {"name": one["name"], "source": one["source"], "nodes": nodes, "gpus": gpus}
            row |= {"published": published, "predicted": predicted}
            found.append(row | {"error": predicted / published - 1, "why": one["why"]})
    return found


def known(values, nodes, gpus):
    """The Setting of these values; what they lack is as predict.py takes it."""
    known = dict(predict.ASSUMED) | {"step_ms": 1000.0, "between_gbit": 1e9} | values
    return predict.setting(known, nodes, gpus)


def calibrated(setting, speed):
    """The setting with the computing time with which it has this speed: found by halving."""
    low, high = 0.0, setting.world * setting.images * setting.accumulate / speed
    for _ in range(60):
        middle = (low + high) / 2
        changed = replace(setting, forward=middle / 3, backward=2 * middle / 3)
        if predict.speed(changed) > speed:
            low = middle
        else:
            high = middle
    return changed
