"""Every Python that a test starts runs this first: it makes imports faster.

While torch and torchvision are imported, Python looks for garbage 800 times and finds next to none,
in a sixth of the time. Now it looks after a million new objects.
"""

import gc

gc.set_threshold(1_000_000)
