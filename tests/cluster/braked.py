"""A model whose steps take a second each as long as a file is there: a test has time to act."""

import os
import time

from tests import nets

# 29 steps an epoch. The model has no BatchNorm: it trains the same with any number of processes.
FLAGS = "--arch tests.cluster.braked:net --image-size 24 --batch-size 48 -p 1 -j 1".split()
FLAGS += "--epochs 9 --max-steps 250".split()
STEP = r"^epoch \d+ \[\d+/"  # a line of its output


def net(num_classes):
    """tests.nets:smooth. BRAKE names the file."""
    module = nets.smooth(num_classes)
    module.register_forward_pre_hook(wait)
    return module


def wait(module, _):
    if module.training and os.path.exists(os.environ.get("BRAKE", "")):
        time.sleep(1)
