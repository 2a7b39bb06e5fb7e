"""docs/index.html in a real Chromium: what it shows is what compose.py prints, on every screen."""

import io
import json
import os
import random
import re
import time
from urllib.parse import unquote

import pytest
import yaml
from conftest import ROOT
from PIL import Image
from torch.distributed.run import get_args_parser

import compose
from tests.docs.copies import commands_of, patched
from tests.docs.test_docs import anchors
from tools import page as source
from tools import picture
from tools.browser import EXECUTABLE, Browser

FILE = ROOT / "docs/index.html"
KNOWN = compose.choices()
STARTS, DATA, FEATURES = (
    [choice["name"] for choice in KNOWN[axis] if not choice.get("hidden")]
    for axis in ("starts", "data", "features")
)
BUGS = sorted(path.stem for path in ROOT.glob("bugs/*.diff"))
SHOWN = "document.querySelector('#code code').textContent"
needs_chromium = pytest.mark.skipif(
    not EXECUTABLE and "CI" not in os.environ, reason="needs: apt-get install chromium"
)


@pytest.fixture(scope="module")
def browser():
    with Browser() as started:
        yield started


@pytest.fixture
def page(browser):
    """The browser with the page in it; its console must have nothing to complain of."""
    browser.look(1440, 900)
    browser.open(FILE.as_uri())
    browser.evaluate("localStorage.clear()")
    yield browser
    assert browser.errors == []


def opened(page, start, data="digits", features=(), **more):
    """Opens the page with a choice in its link."""
    asked = {"start": start, "data": data, "with": ",".join(features)} | more
    page.open(f"{FILE.as_uri()}#" + "&".join(f"{key}={value}" for key, value in asked.items()))


def click(page, selector):
    page.evaluate(f"document.querySelector({json.dumps(selector)}).click()")


@needs_chromium
def test_its_scripts_are_those_of_compose(page):
    draw = random.Random(0)
    chosen = []
    for _ in range(600):
        features = draw.sample(FEATURES, draw.randrange(len(FEATURES) + 1))
        chosen.append([draw.choice(STARTS), draw.choice(DATA), features])
    shown = page.evaluate(f"""{json.dumps(chosen)}.map(([start, data, features]) => {{
        const why = refused({{ start, data, features }});
        if (why) return "error: " + why;
        fromLink(`#start=${{start}}&data=${{data}}&with=${{features}}`);
        showScript();
        return {SHOWN};
    }})""")
    for choice, text in zip(chosen, shown, strict=True):
        try:
            expected = compose.script(*choice)
        except ValueError as error:
            expected = f"error: {error}"
        assert text == expected, choice
    assert sum(not text.startswith("error: ") for text in shown) >= 500


@needs_chromium
def test_copies_downloads_and_links(page, tmp_path):
    """What is shown; the link brings the choice back, and a click changes it."""
    opened(page, "slurm", "images", ["resume", "amp"])
    text = compose.script("slurm", "images", ["amp", "resume"])
    assert page.evaluate(SHOWN) == text
    page.evaluate("navigator.clipboard.writeText = async (text) => { window.copied = text }")
    click(page, "#copy")
    assert page.evaluate("copied") == text
    click(page, "#share")
    assert page.evaluate("copied").endswith("#start=slurm&data=images&with=amp,resume&lang=en")
    click(page, "#command button")
    (two_nodes,) = commands_of(text)
    assert page.evaluate("copied") == two_nodes.replace("-N2", "-N1") + "\n"
    page.call("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    click(page, "#download")
    assert downloaded(tmp_path / "train.py") == text

    click(page, "[value=amp]")
    assert page.evaluate(SHOWN) == compose.script("slurm", "images", ["resume"])
    assert page.evaluate("location.hash") == "#start=slurm&data=images&with=resume"
    opened(page, "slurm", lang="zh")
    assert page.evaluate("document.documentElement.lang") == "zh-CN"


def downloaded(path):
    until = time.monotonic() + 30
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.05)
    return path.read_text()


@needs_chromium
def test_each_node_has_a_command_to_copy(page, tmp_path):
    """And the pods have a file."""
    opened(page, "torchrun")
    click(page, "#place-nodes")
    page.evaluate("navigator.clipboard.writeText = async (text) => { window.copied = text }")
    for rank in (0, 1):
        click(page, f"#command div:nth-child({rank + 1}) button")
        assert page.evaluate("copied") == source.NODES.format(rank).replace("$file", "train.py\n")
    click(page, "#place-kubernetes")
    page.call("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    click(page, "[data-file]")
    job = source.kubernetes().replace("$file", "train.py")
    assert downloaded(tmp_path / "train.yaml") == job + "\n"


@needs_chromium
def test_docker_gets_the_images_where_the_script_reads_them(page):
    command = "document.querySelector('#command code').textContent"
    for data, more in (("digits", ""), ("images", " -v /path/to/imagenet:/work/data")):
        opened(page, "torchrun", data)
        click(page, "#place-docker")
        docker = f'docker run --gpus all --ipc=host -v "$PWD:/work"{more} -w /work IMAGE '
        assert page.evaluate(command) == docker + commands_of(compose.script("torchrun"))[0]


@needs_chromium
def test_the_lines_of_the_last_choice_are_marked(page):
    """Against the script without it, but for the line that says how it was made."""
    opened(page, "torchrun", features=["loss"])
    click(page, "[value=f1]")
    lines = "[...document.querySelectorAll('.l.new')].map(line => line.textContent)"
    before = compose.script("torchrun", features=["loss"], made="").splitlines(keepends=True)
    after = compose.script("torchrun", features=["loss", "f1"], made="").splitlines(keepends=True)
    assert page.evaluate(lines) == [line for line in after if line not in before and line.strip()]

    opened(page, "torchrun", features=["amp"])  # its marks, from the first in main() downwards
    visited = []
    for _ in range(page.evaluate("blocks().length")):
        visited.append(page.evaluate("Number(state.at.dataset.n)"))
        click(page, "#next")
    turn = visited.index(min(visited))
    assert visited[turn:] + visited[:turn] == sorted(visited) and turn == len(visited) - 1 > 2


@needs_chromium
def test_what_is_refused_is_not_chosen_and_says_why(page):
    """A feature cannot be switched on; a start switches off what does not go with it."""
    (why,) = [rule["why"]["en"] for rule in KNOWN["refused"] if rule["when"] == "apex and amp"]
    opened(page, "apex")
    page.evaluate("document.querySelector('[value=amp]').focus()")
    page.press(" ", " ")
    assert page.evaluate(SHOWN) == compose.script("apex")
    heard = "document.querySelector('[role=status]').textContent"
    assert why in page.evaluate(heard)
    assert page.evaluate("document.querySelector('#why-amp').textContent") == why
    opened(page, "torchrun", features=["amp", "f1"])
    click(page, "[value=apex]")
    assert page.evaluate(SHOWN) == compose.script("apex", features=["f1"])
    assert why in page.evaluate(heard)


@needs_chromium
def test_each_mistake_is_what_patch_makes(page, tmp_path):
    path = tmp_path / "train.py"
    shown = page.evaluate(f"""{json.dumps(BUGS)}.map((name) => {{
        fromLink("#start=torchrun&mistake=" + name);
        return shown();
    }})""")
    for name, text in zip(BUGS, shown, strict=True):
        path.write_text(compose.script("torchrun"))
        assert patched(path, f"bugs/{name}.diff", "-F0") and text == path.read_text(), name


@needs_chromium
def test_a_mistake_is_applied_by_a_click_and_taken_back(page):
    """Where its lines are; elsewhere its diff is shown, and the script stays as it is."""
    opened(page, "torchrun", features=["amp"])
    text = compose.script("torchrun", features=["amp"])
    click(page, "#tab-mistakes")
    click(page, "[data-mistake=no_set_epoch]")
    without = "".join(line for line in text.splitlines(True) if "set_epoch" not in line)
    assert page.evaluate("shown()") == without
    assert "same in every epoch" in page.evaluate("document.querySelector('#change').textContent")
    click(page, "#next")
    assert page.evaluate(SHOWN) == text
    click(page, "[data-mistake=clip_before_unscale]")
    assert page.evaluate(SHOWN) == text
    diff = page.evaluate("document.querySelector('.found pre').textContent")
    assert "+            scaler.step(optimizer)\n" in diff


STOPS = """[...document.querySelectorAll('a[href], button, input, summary, [tabindex="0"]')]
    .filter(e => e.checkVisibility() && !e.classList.contains("skip"))
    .filter(e => e.type !== "radio" || e.checked).filter(e => e.tabIndex >= 0)"""


IN_VIEW = """(() => {
    const box = document.activeElement.getBoundingClientRect();
    return box.bottom > 0 && box.top < innerHeight && box.right > 0 && box.left < innerWidth;
})()"""


@needs_chromium
def test_everything_is_reached_by_the_keyboard(page):
    """Tab stops at each control once, in order; radio buttons and tabs are one stop together."""
    opened(page, "torchrun", features=["amp"])
    count = page.evaluate(f"window.stops = {STOPS}; stops.length")
    page.press("Tab")  # the link to the script, which shows itself
    assert page.evaluate("document.activeElement.className") == "skip"
    reached, seen = [], []
    for _ in range(count):
        page.press("Tab")
        reached.append(page.evaluate("stops.indexOf(document.activeElement)"))
        seen.append(page.evaluate(IN_VIEW))
    assert reached == [*range(count)] and all(seen)

    page.evaluate("document.querySelector('[value=torchrun]').focus()")
    page.press("ArrowDown")
    assert page.evaluate(SHOWN) == compose.script("spawn", features=["amp"])
    page.evaluate("document.querySelector('[value=f1]').focus()")
    page.press(" ", " ")
    assert page.evaluate(SHOWN) == compose.script("spawn", features=["amp", "f1"])
    page.evaluate("document.querySelector('#tab-reasons').focus()")
    page.press("ArrowRight")
    assert page.evaluate("document.activeElement.id") == "tab-mistakes"
    assert page.evaluate("document.activeElement.ariaSelected") == "true"
    page.press("Tab")
    page.press("Enter", "\r")  # the first mistake of the list
    assert page.evaluate("document.querySelectorAll('.found').length") == 1


# Texts that are hard to read: the contrast of their colours is below 4.5 (WCAG 2.2, AA).
FAINT = """(() => {
    const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const over = (colours) => {
        canvas.clearRect(0, 0, 1, 1);
        for (const colour of colours) canvas.fillStyle = colour, canvas.fillRect(0, 0, 1, 1);
        const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map(x => x / 255)
            .map(x => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    return [...document.querySelectorAll("body *")].filter(e => {
        if (!e.checkVisibility() || e.closest(".hidden, .skip")) return false;
        if (![...e.childNodes].some(n => n.nodeType === 3 && n.data.trim())) return false;
        const grounds = [];
        for (let up = e; up; up = up.parentElement)
            grounds.unshift(getComputedStyle(up).backgroundColor);
        const light = [over([...grounds, getComputedStyle(e).color]), over(grounds)];
        return (Math.max(...light) + 0.05) / (Math.min(...light) + 0.05) < 4.5;
    }).map(e => e.outerHTML.slice(0, 150));
})()"""


@needs_chromium
@pytest.mark.parametrize("dark", [False, True])
def test_all_text_can_be_read(page, dark):
    page.look(1440, 900, dark=dark)
    opened(page, "torchrun", features=["amp", "f1"])
    assert page.evaluate(FAINT) == []
    click(page, "#tab-mistakes")
    click(page, "[data-mistake=no_set_epoch]")
    assert page.evaluate(FAINT) == []


# What is wider than its place, or than the screen, and does not scroll.
CUT = """[...document.querySelectorAll("body *")].filter(e => {
    const style = getComputedStyle(e), box = e.getBoundingClientRect();
    if (!e.checkVisibility() || e.closest(".hidden, .skip, pre, svg")) return false;
    return box.right > innerWidth + 1 || box.left < -1 ||
        (style.display !== "inline" && e.scrollWidth > e.clientWidth + 1 && e.clientWidth);
}).map(e => e.outerHTML.slice(0, 200)).concat(
    document.documentElement.scrollWidth > innerWidth ? ["the page"] : [])"""


@needs_chromium
@pytest.mark.parametrize("language", ["en-US", "zh-CN"])
@pytest.mark.parametrize("width", [360, 390, 820, 1180, 1440, 1920])
def test_nothing_is_cut(page, width, language):
    page.look(width, 900, language=language)
    for start in ("torchrun", "accelerate", "apex"):
        opened(page, start, "images", ["amp", "weighted", "resume"])
        assert language.startswith(page.evaluate("document.documentElement.lang"))
        for place in ("nodes", "slurm", "docker", "kubernetes"):
            click(page, f"#place-{place}")
            assert page.evaluate(CUT) == []
        click(page, "#tab-mistakes")
        if start == "torchrun":
            click(page, "[data-mistake=clip_before_unscale]")
        assert page.evaluate(CUT) == []


@needs_chromium
def test_the_language_and_the_colours_are_kept(page):
    """As the visitor's system has them, until he switches."""
    page.look(1440, 900, dark=True, language="zh-CN")
    colour = "getComputedStyle(document.body).backgroundColor"
    page.open(FILE.as_uri())
    dark = page.evaluate(colour)
    assert page.evaluate("document.title") == "你的训练脚本"
    click(page, "#theme")
    click(page, "#language")
    light = page.evaluate(colour)
    for _ in range(2):
        assert page.evaluate("document.title") == "Your training script"
        assert page.evaluate(colour) == light != dark
        page.open(FILE.as_uri())
    page.evaluate("localStorage.clear()")


@needs_chromium
def test_small_quick_and_alone(page):
    """In seconds of the processor, for this machine may be busy; it fetches nothing."""
    assert FILE.stat().st_size < 500_000
    page.call("Performance.enable", timeDomain="threadTicks")
    for features in ([], FEATURES):
        opened(page, "torchrun", features=features)
        metrics = page.call("Performance.getMetrics")["metrics"]
        assert {m["name"]: m["value"] for m in metrics}["TaskDuration"] < 0.2
        assert page.evaluate("performance.getEntriesByType('resource').length") == 0


@needs_chromium
def test_the_pictures_of_the_readmes(page):
    """Small, sharp and of today's size; they are not compared: each machine has its own fonts."""
    for name, language in picture.PICTURES.items():
        for content in (picture.picture(page, language), (ROOT / "docs" / name).read_bytes()):
            assert len(content) < 150_000
            assert Image.open(io.BytesIO(content)).size == (1650, 925)


def test_its_links_hold():
    """Those of the page and of all texts in it, in both languages."""
    text = FILE.read_text(encoding="utf-8")
    (data,) = re.findall(r'id="data">(.*)</script>', text)
    found = re.findall(r"\]\(((?!https:)[^()\s\\]+)\)", data)
    found += re.findall(r"(?:data-link=\"|href='|href=\")([\w./-]+\.md[^'\"\\]*)", text)
    found += [link.replace(".md", ".zh-CN.md") for link in re.findall(r'data-link="(.*?)"', text)]
    assert len(found) > 20
    for link in found:
        path, _, anchor = unquote(link).partition("#")
        target = ROOT / "docs" / path
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text()), link


def test_its_commands_start_what_they_say():
    """torchrun takes them; the pods' one is that of docs/kubernetes.yaml without its flags."""
    for name, found in source.places(STARTS).items():
        for command in "\n".join(found.values()).splitlines():
            if "torchrun " in command:
                words = command[command.index("torchrun ") :].split()[1:]
                args = get_args_parser().parse_args(words)
                assert (args.training_script, args.training_script_args) == ("$file", []), name
    _, job = yaml.safe_load_all(source.kubernetes())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    _, theirs = yaml.safe_load_all((ROOT / "docs/kubernetes.yaml").read_text())
    (theirs,) = theirs["spec"]["template"]["spec"]["containers"]
    assert container["command"] == [*theirs["command"][:5], "$file"]
