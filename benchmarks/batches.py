"""Milliseconds of a bare loop's step at several batch sizes, and how busy the device is.

$ python -m benchmarks.batches
"""

import argparse
import contextlib
from statistics import median

from benchmarks.harness import (
    GPU,
    Contestant,
    add_model_flags,
    alternate,
    clean_up_on_sigterm,
    make_parser,
    report,
    spread,
)
from benchmarks.step import DTYPES, bare_loop


def parse_args():
    parser = make_parser("batches", __doc__, rounds=20)
    add_model_flags(parser)
    add = parser.add_argument
    add("--batch-sizes", type=int, nargs="+", default=[8, 32, 64, 128], help="images of a step")
    add("--compiled", type=int, nargs="*", default=[], help="sizes to measure with torch.compile")
    add("--precision", choices=DTYPES, default="bf16" if GPU else "fp32", help="of the model")
    add("--steps", type=int, default=3, help="of a round")
    return parser.parse_args()


def main():
    """Measures bare loops alone: forward, backward and optimizer, with the scripts' settings."""
    args = parse_args()
    clean_up_on_sigterm()
    cases = [(size, False) for size in args.batch_sizes] + [(size, True) for size in args.compiled]
    times = {case: [] for case in cases}
    with contextlib.ExitStack() as stack:
        contestants = {}
        for size, compiled in cases:
            flags = argparse.Namespace(**vars(args) | {"batch_size": size, "compile": compiled})
            contestants[size, compiled] = stack.enter_context(Contestant(bare_loop, flags))
        for contestant in contestants.values():
            contestant.ask(args.steps)  # to warm up
        for round_number in range(args.rounds):
            for case, contestant in alternate(contestants.items(), round_number):
                times[case].append(1000 * contestant.ask(args.steps) / args.steps)
        device = {case: contestant.ask("device") for case, contestant in contestants.items()}

    runs = []
    for (size, compiled), values in times.items():
        run = {
            "images": size,
            "model": "compiled" if compiled else "as it is",
            "ms": spread(values),
            "images_per_second": 1000 * size / median(values),
            "device_ms": device[size, compiled],
            "busy": device[size, compiled] and device[size, compiled] / median(values),
        }
        runs.append(run)
    columns = {
        "images": "images",
        "model": "model",
        "ms": "ms",
        "images/s": "images_per_second",
        "device ms": "device_ms",
        "busy": "busy",
    }
    report("batches", args, runs, columns)


if __name__ == "__main__":
    main()
