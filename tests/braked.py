"""A model whose steps take a second each as long as a file is there: a test has time to act."""

import os
import time

from torch import nn

from tests import nets


def net(num_classes):
    """tests.nets:plain, but smooth. BRAKE names the file.

    Rounding can turn a ReLU on or off: where one process became two at the 11th of 250 steps, the
    weights differed by 7e-4 at the end, elsewhere by 3e-7.
    """
    module = nets.plain(num_classes)
    module[1] = nn.Tanh()
    module.register_forward_pre_hook(wait)
    return module


def wait(module, _):
    if module.training and os.path.exists(os.environ.get("BRAKE", "")):
        time.sleep(1)
