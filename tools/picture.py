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
CHOSEN = "#start=torchrun&with=amp,resume,f1"  # what the README's command chooses
SIZE = (480, 840)  # a phone's layout, whose letters a phone can show: the choices
SCALE = 2


def picture(browser, language):
    """A PNG of the page, in 256 colours, which make the file small."""
    width, height = SIZE
    browser.look(width, 2 * height, language=language, scale=SCALE)  # what floats is below it
    browser.open(f"{DOCS.as_uri()}/index.html{CHOSEN}")
    image = Image.open(io.BytesIO(browser.photograph())).convert("RGB")
    image = image.crop((0, 0, width * SCALE, height * SCALE))
    file = io.BytesIO()
    image.quantize(256, dither=Image.Dither.NONE).save(file, "PNG", optimize=True)
    return file.getvalue()


if __name__ == "__main__":
    with Browser() as browser:
        for name, language in PICTURES.items():
            (DOCS / name).write_bytes(picture(browser, language))
