"""A model whose steps take a second each as long as a file is there: a test has time to act."""

import os
import time

from tests import nets


def net(num_classes):
    """tests.nets:smooth. BRAKE names the file."""
    module = nets.smooth(num_classes)
    module.register_forward_pre_hook(wait)
    return module


def wait(module, _):
    if module.training and os.path.exists(os.environ.get("BRAKE", "")):
        time.sleep(1)
