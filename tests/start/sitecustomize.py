"""Every Python that a test starts runs this first: it saves a second of each start and end.

Python looks for garbage 800 times while torch and torchvision are imported, and finds next to none.
At its end it does so twice more, the second time where nothing but modules is left.
"""

import atexit
import gc
import os
import sys

gc.set_threshold(1_000_000)
if os.environ.get("CUDA_VISIBLE_DEVICES") == "":  # most tests
    sys.modules["triton"] = None  # needs a GPU, and torch can do without
    atexit.register(gc.freeze)
    atexit.register(gc.collect)  # runs first
