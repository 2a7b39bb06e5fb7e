"""The doctor is a folder now: python doctor train.py. This name of older instructions works too."""

import os
import runpy

if __name__ == "__main__":
    runpy.run_path(
        os.path.join(os.path.dirname(os.path.abspath(__file__)), "doctor"), run_name="__main__"
    )
