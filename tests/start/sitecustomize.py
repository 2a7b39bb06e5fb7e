"""Every Python that a test starts runs this first: it saves a second of each start and end.

Python looks for garbage 800 times while torch and torchvision are imported, and finds next to none.
When it ends it looks twice more, the second time where nothing but modules is left.
"""

import atexit
import gc
import os
import sys

gc.set_threshold(1_000_000)
# Only without a GPU, where torch does not need triton: at the end triton would list every object
# that freeze() keeps. And not in a test of how a Python ends.
if os.environ.get("CUDA_VISIBLE_DEVICES") == "" and "PLAIN_END" not in os.environ:
    sys.modules["triton"] = None
    atexit.register(gc.freeze)  # runs second: what is left now is not looked at any more
    atexit.register(gc.collect)
