"""docs/index.html in a real Chromium: what it shows is what compose.py prints, on every screen."""

import io
import itertools
import json
import os
import random
import re
import time
from urllib.parse import unquote

import pytest
import yaml
from conftest import ROOT, each
from markdown_it import MarkdownIt
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
# Those of other scripts than this one are not on the page.
OURS = f"--- {source.MISTAKEN}\n"
BUGS = sorted(p.stem for p in ROOT.glob("bugs/*.diff") if p.read_text().startswith(OURS))
SHOWN = "document.querySelector('#code code').textContent"
needs_chromium = pytest.mark.skipif(
    not EXECUTABLE and "CI" not in os.environ, reason="needs: apt-get install chromium"
)


@pytest.fixture(scope="module")
def browser():
    with Browser(seconds=300) as started:
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
    """What is shown; the link brings the choice and the language back, and a click changes it."""
    opened(page, "slurm", "images", ["resume", "amp"])
    text = compose.script("slurm", "images", ["amp", "resume"])
    assert page.evaluate(SHOWN) == text
    page.call("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))

    def copied(selector):
        page.evaluate("navigator.clipboard.writeText = async (text) => { window.copied = text }")
        click(page, selector)
        return page.evaluate("copied")

    def downloaded(selector, name):
        click(page, selector)
        until = time.monotonic() + 30
        while not (tmp_path / name).exists() and time.monotonic() < until:
            time.sleep(0.05)
        return (tmp_path / name).read_text()

    assert copied("#copy") == downloaded("#download", "train.py") == text
    (two_nodes,) = commands_of(text)
    assert copied("#command [data-copy]") == two_nodes.replace("-N2", "-N1") + "\n"

    click(page, "[value=amp]")
    assert page.evaluate(SHOWN) == compose.script("slurm", "images", ["resume"])
    click(page, "#language")
    address = copied("#share")
    assert address.endswith("#start=slurm&data=images&with=resume&lang=zh")
    page.evaluate("localStorage.clear()")
    page.open(address)
    assert page.evaluate("document.documentElement.lang") == "zh-CN"

    opened(page, "torchrun")  # a command for each node, and one for the file that it names
    click(page, "#place-nodes")
    nodes = [copied(f".command:nth-child({i}) [data-copy]") for i in (1, 2)]
    assert nodes == [source.NODES.format(i).replace("$file", "train.py") + "\n" for i in (0, 1)]
    click(page, "#place-kubernetes")
    assert copied(".command:last-child [data-copy]") == "kubectl apply -f train.yaml\n"
    file = source.kubernetes().replace("$file", "train.py") + "\n"
    button = "#command [data-download]"
    assert copied("#command [data-copy]") == downloaded(button, "train.yaml") == file


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


@needs_chromium
def test_it_counts_the_lines_of_a_start_as_the_readme_does(page):
    """Those of code: what the script's first lines say of it is not counted."""
    opened(page, "torchrun")
    (added,) = re.findall(r"generated: added -->(\d+)<", (ROOT / "README.md").read_text())
    assert page.evaluate("document.querySelector('.plus').textContent") == f"+{added}"


# The numbers of the lines that the reader is at, and whether the first of them is in view.
AT = """(() => {
    const lines = [...document.querySelectorAll(".l.at")], box = lines[0].getBoundingClientRect();
    const seen = document.elementFromPoint(box.left + 50, box.top + 5);
    return lines[0].contains(seen) && lines.map((line) => +line.dataset.n);
})()"""
FRAME = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"


@needs_chromium
@pytest.mark.parametrize("size", [(1440, 900), (820, 700)])
def test_next_change_goes_on_from_where_the_reader_is(page, size):
    """Down the script, and round; on a narrow page a button leads to the first change."""
    page.look(*size)
    opened(page, "torchrun", features=["amp"])
    page.evaluate("scrollTo(0, 0)")
    click(page, "[value=resume]")
    page.evaluate(FRAME)
    jump = "document.querySelector('#jump').checkVisibility()"
    assert page.evaluate(jump) == (size[0] < 1180)
    if size[0] < 1180:
        click(page, "#jump")
        page.evaluate(FRAME)
        assert not page.evaluate(jump)
    news = page.evaluate("[...document.querySelectorAll('.l.new')].map(line => +line.dataset.n)")
    blocks = []
    for number in news:
        if number - 1 not in news:
            blocks.append([])
        blocks[-1].append(number)
    at = page.evaluate(AT)
    assert at in blocks
    order = blocks[blocks.index(at) + 1 :] + blocks[: blocks.index(at) + 1]
    for block in order:
        click(page, "#next")
        assert page.evaluate(AT) == block
    if at == blocks[0]:  # which he would still see from above
        click(page, "#next")
    page.evaluate("document.querySelector('.l').scrollIntoView()")  # he goes up by himself
    click(page, "#next")
    assert page.evaluate(AT) == blocks[0]


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


# Without #jump, which goes when the changed lines come into view.
STOPS = """[...document.querySelectorAll('a[href], button, input, summary, [tabindex="0"]')]
    .filter(e => e.checkVisibility() && !e.matches('.skip, #jump, [tabindex="-1"]'))
    .filter(e => e.type !== "radio" || e.checked)"""
# Whether the focus is in view, and nothing lies over it.
IN_VIEW = """(() => {
    const e = document.activeElement, box = e.getBoundingClientRect();
    const middle = (from, to, most) => (Math.max(from, 0) + Math.min(to, most)) / 2;
    const x = middle(box.left, box.right, innerWidth), y = middle(box.top, box.bottom, innerHeight);
    const on = document.elementFromPoint(x, y);
    return e.contains(on) || e.closest("label")?.contains(on) || e.outerHTML.slice(0, 200);
})()"""


@needs_chromium
@pytest.mark.parametrize("size", each([(390, 844), (820, 700), (1366, 600)], [(390, 844)]))
def test_everything_is_reached_by_the_keyboard(page, size):
    """Tab stops at each control once, in order; a group of radio buttons or of tabs is one stop."""
    page.look(*size)
    opened(page, "torchrun", features=["amp"])
    count = page.evaluate(f"window.stops = {STOPS}; stops.length")
    page.press("Tab")  # the link to the script, which shows itself
    assert page.evaluate("document.activeElement.className") == "skip"
    reached = []
    for _ in range(count):
        page.press("Tab")
        page.evaluate(FRAME)
        assert page.evaluate(IN_VIEW) is True
        reached.append(page.evaluate("stops.indexOf(document.activeElement)"))
        page.evaluate("window.stops = stops.map(e => e.isConnected ? e : null)")
    assert reached == [*range(count)]

    page.evaluate("document.querySelector('[value=torchrun]').focus()")
    page.press("ArrowDown")
    assert page.evaluate(SHOWN) == compose.script("spawn", features=["amp"])
    page.evaluate("document.querySelector('[value=f1]').focus()")
    page.press(" ", " ")
    assert page.evaluate(SHOWN) == compose.script("spawn", features=["amp", "f1"])

    focus = "document.activeElement.id"
    for tabs in (["place-one", "place-nodes", "place-kubernetes"], ["tab-reasons", "tab-mistakes"]):
        page.evaluate(f"document.querySelector('#{tabs[0]}').focus()")
        keys = [("ArrowRight", 1), ("End", -1), ("ArrowRight", 0), ("ArrowLeft", -1), ("Home", 0)]
        for key, reached in [*keys, ("End", -1)]:
            page.press(key)
            assert page.evaluate(focus) == tabs[reached], key
            assert page.evaluate("document.activeElement.ariaSelected") == "true"
    page.press("Tab")
    page.evaluate("[...document.querySelectorAll('.row.fits')].at(-1).focus()")
    for found in (1, 0):
        page.press("Enter", "\r")  # the last mistake; then the button that takes it out
        page.evaluate(FRAME)
        assert page.evaluate("document.querySelectorAll('.found').length") == found
        assert page.evaluate(IN_VIEW) is True
        page.evaluate("document.querySelector('.found .act')?.focus()")


# The texts that stand out too little from what is behind them: less than 4.5 to 1.
PALE = """(() => {
    const options = { willReadFrequently: true };
    const pen = new OffscreenCanvas(1, 1).getContext("2d", options);
    function light(colours) {
        for (pen.fillStyle of colours) pen.fillRect(0, 0, 1, 1);
        const [r, g, b] = [...pen.getImageData(0, 0, 1, 1).data]
            .map(v => v <= 10 ? v / 3294.6 : ((v / 255 + .055) / 1.055) ** 2.4);
        return .2126 * r + .7152 * g + .0722 * b + .05;
    }
    const pale = [];
    for (const e of document.querySelectorAll("body *")) {
        const texts = [...e.childNodes].some(n => n.nodeType === Node.TEXT_NODE && n.data.trim());
        if (!e.checkVisibility() || !(texts || e.matches(".l"))) continue;
        const behind = [];
        for (let a = e; a; a = a.parentElement) behind.unshift(getComputedStyle(a).backgroundColor);
        for (const style of [getComputedStyle(e), getComputedStyle(e, "::before")]) {
            const color = style.color.replace("rgb(", "rgba(").replace(")", `, ${style.opacity})`);
            const [a, b] = [light(behind), light([...behind, color])];
            if (Math.max(a, b) / Math.min(a, b) < 4.5) pale.push(e.outerHTML.slice(0, 200));
        }
    }
    return pale;
})()"""


@needs_chromium
def test_long_lines_wrap_when_asked_and_stay_so(page):
    page.look(390, 844)
    opened(page, "torchrun")
    wide = "(e => e.scrollWidth > e.clientWidth)(document.querySelector('#code'))"
    assert page.evaluate(wide)
    click(page, "#wrap")
    opened(page, "torchrun")
    assert not page.evaluate(wide)
    assert page.evaluate(SHOWN) == compose.script("torchrun")


@needs_chromium
@pytest.mark.parametrize("dark", [False, True])
def test_all_texts_stand_out(page, dark):
    page.look(1440, 900, dark=dark)
    for start, place in (("torchrun", "nodes"), ("apex", "kubernetes")):
        opened(page, start, features=["weighted", "resume"])
        click(page, f"#place-{place}")
        assert page.evaluate(PALE) == []
    opened(page, "torchrun", mistake="no_set_epoch")
    assert page.evaluate(PALE) == []


@needs_chromium
@pytest.mark.parametrize("size", [(1440, 900), (1366, 768), (820, 700)])
def test_no_feature_hides(page, size):
    """All are in view, or words say how many follow, and lead there."""
    page.look(*size)
    opened(page, "torchrun")
    page.evaluate("scrollTo(0, 150)")
    edge = "document.querySelector('#choices').getBoundingClientRect().bottom"
    seen = f"""[...document.querySelectorAll('.check')]
        .filter(row => row.getBoundingClientRect().bottom <= {edge}).length"""
    more = "document.querySelector('#more button')"
    assert (page.evaluate(seen) == len(FEATURES)) == (size == (1440, 900))
    while page.evaluate(f"{more}.checkVisibility()"):
        hidden = len(FEATURES) - page.evaluate(seen)
        assert hidden <= int(page.evaluate(f"parseInt({more}.textContent)")) <= hidden + 2
        page.evaluate(f"{more}.click(); {FRAME}")
    assert page.evaluate(seen) == len(FEATURES)


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
@pytest.mark.parametrize("width", each([360, 390, 820, 1180, 1440, 1920], [360, 820]))
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


WORDS = ["constructor", "__proto__", "toString", "%", "nonsense"]


@needs_chromium
@pytest.mark.parametrize("word", each(WORDS, ["constructor", "nonsense"]))
def test_a_link_of_words_that_it_does_not_know(word, page):
    """Each counts as not said: also what every object of JavaScript has."""
    opened(page, "torchrun")
    usual = page.evaluate(SHOWN)
    page.evaluate(f"localStorage.setItem('language', '{word}')")
    for key in ("start", "data", "with", "mistake", "lang", word):
        page.open(f"{FILE.as_uri()}#{key}={word}")
        assert page.evaluate(SHOWN) == usual, key
        assert page.evaluate("document.title") == "Your training script"
        page.evaluate(f"location.hash = 'lang=zh&with=amp&{key}={word}'")
        page.evaluate("new Promise((done) => setTimeout(done, 50))")
        assert page.evaluate(SHOWN)


@needs_chromium
def test_small_and_alone(page):
    """It is laid out a few times, with few nodes, and fetches nothing."""
    assert FILE.stat().st_size < 500_000
    page.call("Performance.enable")
    for features in ([], FEATURES):
        counts = []
        for _ in range(3):  # a busy machine shows the page before it is whole, and again
            opened(page, "torchrun", features=features)
            metrics = page.call("Performance.getMetrics")["metrics"]
            counts += [metric["value"] for metric in metrics if metric["name"] == "LayoutCount"]
            if counts[-1] <= 6:
                break
        assert min(counts) <= 6, counts
        elements = page.evaluate("document.querySelectorAll('*').length")
        assert elements < 4000, elements
        assert page.evaluate("performance.getEntriesByType('resource').length") == 0


@needs_chromium
def test_the_pictures_of_the_readmes(page):
    """Small, sharp and of today's size; they are not compared: each machine has its own fonts."""
    for name, language in picture.PICTURES.items():
        for content in (picture.picture(page, language), (ROOT / "docs" / name).read_bytes()):
            assert len(content) < 150_000
            assert Image.open(io.BytesIO(content)).size == (960, 1680)


# Roughly how GitHub shows a text on a phone: the sizes of its letters, and the space between.
ON_GITHUB = """<!doctype html><meta charset="utf-8"><base href="{base}">
<meta name="viewport" content="width=device-width">
<style>
body {{ margin: 0; padding: 16px; font: 16px/1.5 sans-serif; overflow-wrap: break-word }}
h1, h2, h3 {{ margin: 24px 0 16px; line-height: 1.25 }}
h1, h2 {{ padding-bottom: .3em; border-bottom: 1px solid }}
h1 {{ margin-top: 0 }} h2 {{ font-size: 1.5em }} h3 {{ font-size: 1.25em }}
p, ul, pre {{ margin: 0 0 16px }} ul {{ padding-left: 2em }} li + li {{ margin-top: .25em }}
code {{ font-family: monospace; font-size: 13.6px; padding: .2em .4em }}
pre {{ padding: 16px; overflow: auto; line-height: 1.45; font-size: 13.6px }}
pre code {{ padding: 0 }} img {{ max-width: 100% }}
</style>{text}"""


@needs_chromium
@pytest.mark.full
@pytest.mark.parametrize("name", ["README.md", "README.zh-CN.md"])
def test_a_readme_is_at_most_nine_screens_of_a_phone(browser, name, tmp_path):
    text = MarkdownIt("commonmark", {"html": True}).render((ROOT / name).read_text())
    shown = ON_GITHUB.format(base=f"{ROOT.as_uri()}/", text=text)
    (tmp_path / "shown.html").write_text(shown)
    browser.look(390, 844)
    browser.open((tmp_path / "shown.html").as_uri())
    size = browser.evaluate("[document.body.scrollWidth, document.body.scrollHeight]")
    assert size[0] == 390 and 5 * 844 < size[1] <= 9 * 844, size


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


# ---- The figures


@needs_chromium
@pytest.mark.parametrize("path", sorted(ROOT.glob("docs/*.svg")), ids=lambda path: path.name)
def test_no_words_of_a_figure_are_cut_or_written_over_each_other(browser, path):
    browser.open(path.as_uri())
    boxes = browser.evaluate(
        "[...document.querySelectorAll('text')].map(text => {"
        "const box = text.getBBox();"
        "return [text.textContent, box.x, box.y, box.x + box.width, box.y + box.height]})"
    )
    wide, high = map(float, re.search('viewBox="0 0 ([0-9]+) ([0-9]+)"', path.read_text()).groups())
    cut = [box for box in boxes if min(box[1:3]) < 3 or box[3] > wide - 3 or box[4] > high - 3]
    over = [
        (one[0], other[0])
        for one, other in itertools.combinations(boxes, 2)
        if min(one[3], other[3]) - max(one[1], other[1]) > 2
        and min(one[4], other[4]) - max(one[2], other[2]) > 4
    ]
    assert boxes and cut == over == []
