"""Makes docs/index.html from tools/page.html: puts in the template of the minimal scripts, its
choices and its renderer, the launch commands, and the mistakes of docs/bugs.md.

tools/generate.py writes it.
"""

import itertools
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))
import compose  # noqa: E402

TEMPLATE = "minimal/template"
LANGUAGES = {"en": "", "zh": ".zh-CN"}
# The mistakes that are made where this was chosen; the others can be made in every script.
BELONG = {
    "slurm": ["local_rank_0", "local_rank_in_sampler"],
    "own": ["split_per_process", "stream_not_shared", "uneven_parts", "rank_0_prepares"],
    "loss": ["loss_all_reduced"],
    "amp": ["clip_before_unscale"],
    "accumulate": ["no_sync_off_by_one", "no_sync_around_backward"],
    "clip": ["clip_before_unscale"],
    "schedule": ["schedule_of_one_gpu", "longer_schedule", "plateau_per_process"],
    "weighted": ["masked_mean", "ratio_per_process", "ratio_all_reduced"],
    "f1": ["f1_per_process", "mean_of_means"],
    "best": ["no_barrier_after_save", "plateau_per_process"],
    "early_stopping": ["early_stop_on_rank_0"],
    "predictions": ["padded_validation", "validation_not_shared"],
    "resume": ["resume_on_rank_0", "resume_repeats_epoch", "longer_schedule"],
    "workers": ["workers_per_process"],
}
# What a mistake's text says after "Doctor", as a sentence.
DOCTOR = [
    (r"^\*\*Doctor\*\*: yes\. ", "[The doctor](doctor.md) names it. "),
    (r"^\*\*Doctor\*\*: no\. ", "[The doctor](doctor.md) does not name it. "),
    (r"^\*\*医生\*\*\W(.*?)。", r"[训练脚本医生](doctor.zh-CN.md)\1。"),
]
# The mistakes that the page shows are diffs against this script. The starts with its processes:
MISTAKEN = "minimal/distributed.py"
LIKE_TORCHRUN = ["torchrun", "spawn", "slurm", "apex"]

NODES = "torchrun --nnodes=2 --node-rank={} --nproc-per-node=4 --master-addr=HOST $file"
DOCKER = 'docker run --gpus all --ipc=host -v "$PWD:/work"$images -w /work IMAGE '
IMAGES = " -v /path/to/imagenet:/work/data"


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def mistakes(diffs):
    """[{name, hunks, en, zh}] in the order of docs/bugs.md; diffs: {name: text of the diff}.

    Of each language: title; sign, what one sees in a few words; group, where it is found; text,
    what stands above the diff; more, what stands below it.
    """
    found = {}
    for language, ending in LANGUAGES.items():
        page = re.sub(r"\]\(#", f"](bugs{ending}.md#", read(f"docs/bugs{ending}.md"))
        signs = {}
        tables = r"^\*\*(.+)\*\*\n\n.*\n\|---\|---\|\n((?:\|.*\n)+)"
        for group, rows in re.findall(tables, page, re.M):
            for sign, links in re.findall(r"^\| (.*) \| (.*) \|$", rows, re.M):
                for anchor in re.findall(r"#(.*?)\)", links):
                    signs.setdefault(anchor, {"group": group, "sign": sign})
        section = r"^### (.+)\n\n(.+) <!-- generated: bug (\w+) -->\n"
        section += r"(?:.*\n)*?<!-- end -->\n\n(.+)$"
        for title, text, name, more in re.findall(section, page, re.M):
            anchor = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
            if anchor not in signs:
                raise ValueError(f"docs/bugs{ending}.md: no row of its tables links to #{anchor}")
            for words, sentence in DOCTOR:
                more = re.sub(words, sentence, more)
            said = signs[anchor] | {"title": title, "text": text, "more": more}
            found.setdefault(name, {})[language] = said
    for name in sorted(found.keys() | diffs.keys()):
        if name not in diffs:
            raise ValueError(f"docs/bugs.md has a section for {name}, but bugs/ no diff")
        for language, ending in LANGUAGES.items():
            if language not in found.get(name, {}):
                form = f"text <!-- generated: bug {name} -->, a line <!-- end -->, **Doctor**: ..."
                raise ValueError(f"docs/bugs{ending}.md has no section of the form: {form}")
    script = compose.script("torchrun").splitlines()
    found = {n: said for n, said in found.items() if diffs[n].startswith(f"--- {MISTAKEN}\n")}
    return [{"name": n, "hunks": hunks(diffs[n], script), **said} for n, said in found.items()]


def hunks(diff, script):
    """The hunks of a diff as lists of lines, each with as few lines around as tell its place."""
    for around in (1, 2, 3):
        parts = []
        for hunk in diff.split("\n@@")[1:]:
            lines = [line or " " for line in hunk.rstrip("\n").split("\n")[1:]]
            changed = [i for i, line in enumerate(lines) if line[0] in "+-"]
            starts = [i for i in changed if not {*range(i - 2 * around - 1, i)} & {*changed}]
            for start, following in zip(starts, [*starts[1:], len(lines) + 1], strict=True):
                last = max(i for i in changed if i < following)
                parts.append(lines[max(start - around, 0) : last + around + 1])
        old = [[line[1:] for line in part if line[0] != "+"] for part in parts]
        if all(count(script, part) == 1 for part in old):
            return parts
    raise ValueError(f"the lines around are not unique in the script:\n{diff}")


def count(script, lines):
    """How often the lines stand in the script."""
    return sum(script[i : i + len(lines)] == lines for i in range(len(script)))


def kubernetes():
    """docs/kubernetes.yaml for a script without flags, with its data beside it."""
    text = read("docs/kubernetes.yaml")
    changes = [
        (r"(each train one model\.).*", r"\1"),
        (r"^( +- )distributed\.py\n", r"\1$file\n"),
        (r"^ +- --(data|batch-size|checkpoint-freq|resume)=.*\n", ""),
        (r"mountPath: /data$", "mountPath: /work/data"),
        (r"(# the code and )its folder `checkpoints`", r"\1what it saves"),
        (r"cpu: 64  #.*", "cpu: 64"),
    ]
    for pattern, new in changes:
        text, times = re.subn(pattern, new, text, flags=re.M)
        assert times, f"docs/kubernetes.yaml: {pattern}"
    return text.rstrip("\n")


def places(starts):
    """{start: {place: the commands, or the word for why there are none}}

    In a command $file is the script, and $images the place of the images, where it reads some.
    """
    made = {}
    for name in starts:
        (one,) = re.findall(r"^\$ (.*)$", compose.script(name, file="$file"), re.M)
        by_torchrun = "torchrun" in one
        nodes = "\n".join(NODES.format(rank) for rank in (0, 1)) if by_torchrun else "library"
        alone = {"one_gpu": "alone", "dataparallel": "alone", "spawn": "spawn", "slurm": one}
        made[name] = {
            "one": one.replace("-N2", "-N1"),
            "nodes": alone.get(name, nodes),
            "slurm": one if name == "slurm" else "srun",
            "docker": "cluster" if name == "slurm" else DOCKER + one,
            "kubernetes": "yaml" if by_torchrun else "torchrun",
        }
    return made


def page(diffs):
    """The text of docs/index.html; diffs: {name: text} of bugs/."""
    choices = compose.choices()
    for choice in [*choices["starts"], *choices["data"], *choices["features"]]:
        for key, (language, ending) in itertools.product(("why", "wrong"), LANGUAGES.items()):
            if key in choice:
                page = f"](recipes{ending}.md#"
                choice[key][language] = choice[key][language].replace("](#", page)
    choices["starts"] = [start for start in choices["starts"] if not start.get("hidden")]
    data = {
        "template": read(f"{TEMPLATE}/train.py.txt"),
        "choices": choices,
        "mistakes": mistakes(diffs),
        "belong": BELONG,
        "likeTorchrun": LIKE_TORCHRUN,
        "places": places([start["name"] for start in choices["starts"]]),
        "images": IMAGES,
        "yaml": kubernetes(),
    }
    # No text may end the element that it stands in.
    data = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/")
    text = read("tools/page.html")
    for mark, part in (("@data@", data), ("@render@", read(f"{TEMPLATE}/render.js"))):
        before, after = text.split(mark)
        text = before + part + after
    return text
