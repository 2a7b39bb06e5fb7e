"""Photographs docs/index.html for the READMEs: docs/compose.png, docs/compose.zh-CN.png.

$ python tools/picture.py

It needs Chromium: apt-get install chromium fonts-noto-cjk
"""

import io
import sys
from pathlib import Path

from PIL import Image

sys.path.append(str(Path(__file__).resolve().parent.parent))
from tools.browser import Browser

DOCS = Path(__file__).resolve().parent.parent / "docs"
PICTURES = {"compose.png": "en-US", "compose.zh-CN.png": "zh-CN"}
CHOSEN = "#start=torchrun&with=amp,best,resume"
SIZE = (1320, 740)


def picture(browser, language):
    """A PNG of the page, in 256 colours, which make the file small."""
    browser.look(*SIZE, language=language, scale=1.25)
    browser.open(f"{DOCS.as_uri()}/index.html{CHOSEN}")
    image = Image.open(io.BytesIO(browser.photograph())).convert("RGB")
    file = io.BytesIO()
    image.quantize(256, dither=Image.Dither.NONE).save(file, "PNG", optimize=True)
    return file.getvalue()


if __name__ == "__main__":
    with Browser() as browser:
        for name, language in PICTURES.items():
            (DOCS / name).write_bytes(picture(browser, language))
