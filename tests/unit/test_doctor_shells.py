"""What the doctor's reader of shell lines finds in them, without a shell."""

import importlib
import os
import sys

import pytest

from doctor.files import effects, pythons, shells, syntax, writers

CLEAR = {
    "echo x\nrm -rf ckpt": ["echo x", "rm -rf ckpt"],
    "cp a \\\n  b; ls": ["cp a b", "ls"],
    "rm x#1 b # a note": ["rm x#1 b"],
    "timeout 5 nice -n 3 bash -c 'rm a'": ["rm a"],
    "env -u X bash -euo pipefail -c 'rm \"$1\"' 0 a": ["rm a"],
    "d='a b'; rm $d \"$d\" '$d'": ["rm|a|b|a b|$d"],
    "for i in {1..3}; do rm e$i.{pt,bin}; done": [f"rm e{i}.pt e{i}.bin" for i in (1, 2, 3)],
    "F=(a 'b c'); rm \"${F[@]}\" ${G:-g}": ["rm|a|b c|g"],
    "A=a; rm ${A:?}": ["rm a"],
    "flock lock rm a": ["rm a"],
    "rm $(ls -t e* | tail -1)": ["ls -t e*", "tail -1", "rm ?"],
    "ls | while read f; do rm $f; done": ["ls", "rm ?"],
    "cat <<E\nit's\nE\nrm a": ["cat", "rm a"],
    "case $x in a) rm b;; esac; f() { rm c; }": ["rm b", "rm c"],
    "((n++)); x=$((1 + 2)); time -p rm e$x; command -v rm": ["rm e?"],
    "trap 'rm a' EXIT; eval rm b; export A=1": ["rm a", "rm b"],
    "rm 'unclosed": ["rm unclosed"],
    "[[ -d a && ! -d b ]] && rm c": ["rm c"],
    "for f in /etc/host[s]; do rm $f; done": ["rm /etc/hosts"],
}


@pytest.mark.parametrize("line", CLEAR)
def test_the_commands_of_a_line(line, tmp_path):
    found = [one.words for one in shells.commands(["sh", "-c", line], str(tmp_path))]
    found = [[word.replace(syntax.UNKNOWN, "?") for word in words] for words in found]
    assert found == [one.split("|" if "|" in one else None) for one in CLEAR[line]]


def test_where_a_command_may_be(tmp_path):
    (tmp_path / "in").mkdir()
    lines = {
        "cd in; rm a": ["in"],
        "cd in && ls && rm a": ["in"],
        "(cd in; ls); rm a": ["."],
        "cd missing; rm a": ["missing", "."],
        "test -d in && cd in; rm a": ["in", "."],
        "for d in in out; do cd $d; rm a; done": ["in", "out", "."],
    }
    for line, folders in lines.items():
        *_, last = shells.commands(["bash", "-c", line], str(tmp_path))
        assert last.words == ["rm", "a"]
        assert [os.path.relpath(one, tmp_path) for one in last.folders] == folders, line


def test_where_a_line_writes(tmp_path):
    line = "a > x 2>&1; b >> y 2> z < in; exec &> log; echo 2>&- >| w"
    found = shells.commands(["sh", "-c", line], str(tmp_path))
    assert [one.cuts for one in found] == [["x"], ["z"], ["log"], ["w"]]
    assert found[1].into == ["y"] and [one.sure for one in found] == [True, False, False, False]
    (one,) = shells.commands(["sh", "-c", "[ -f a ] && exit; echo > x"], str(tmp_path))
    assert one.cuts == ["x"] and not one.sure


def test_who_has_the_hook(tmp_path, monkeypatch):
    monkeypatch.setitem(pythons.OURS, "PYTHONPATH", "/ours")
    lines = {
        "python": True,
        "PYTHONPATH=src python": False,
        'PYTHONPATH="src:$PYTHONPATH" python': True,
        'export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}"; python': True,
        "export PYTHONPATH=src; bash -c python": False,
        "PYTHONPATH+=:src; python": True,
        "unset PYTHONPATH; python": False,
        "env -i python": False,
        "env A=1 python": True,
        "env -u PYTHONPATH nice python": False,
    }
    (tmp_path / "python").touch(mode=0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for line, hooked in lines.items():
        env = {"PYTHONPATH": "/ours:/theirs"}
        (one,) = shells.commands(["sh", "-c", line], str(tmp_path), env)
        assert one.words == ["python"] and one.hooked == hooked, line


def test_which_python_has_the_hook():
    lines = {
        "python x.py -I": True,
        "python -u -B -I x.py": False,
        "python -W ignore -I x.py": False,
        "python -Wi -X dev x.py -E": True,
        "python -c x -I": True,
        "python3 -uE": False,
        "python2 x.py": False,
    }
    assert {line: pythons.has_hook(line.split()) for line in lines} == lines


def test_scripts_that_call_each_other_come_to_an_end(tmp_path):
    (tmp_path / "a.sh").write_text('cd "$(dirname "$0")"/in\nbash b.sh x\nbash ../a.sh $1\nrm $1\n')
    (tmp_path / "in").mkdir()
    (tmp_path / "in/b.sh").write_text("bash ../a.sh y\n. ../a.sh\n")
    found = shells.commands(["bash", str(tmp_path / "a.sh"), "z"], "/")
    removes = {one.words[1] for one in found if one.words[0] == "rm"}
    assert removes >= {"y", "z"} and len(found) < 50


@pytest.mark.parametrize("depth", [1, 200, 5000])
def test_no_line_is_too_deep_or_too_long(depth, tmp_path):
    for line in ("$(" * depth, "{a,b}" * depth, "(" * depth, '"$(' * depth, "x=$x$x;" * depth):
        shells.commands(["sh", "-c", "rm a; " + line], str(tmp_path))


WRITES = {
    "cp -r src/. store": {"writes store/one"},
    "cp -r src/ store": {"writes store/one", "writes store/src"},
    "cp -rT src store": {"writes store/one"},
    "cp -t store src/one": {"cuts store/one"},
    "cp --target-directory=store src/one": {"cuts store/one"},
    "mv -t store src/one": {"removes src/one", "removes store/one"},
    "cp -n src/one store": {"writes store/one"},
    "rsync -a src/ store/": {"removes store/one"},
    "ln -sfn run2 latest": {"removes latest"},
    "tar czf x.tgz src": {"writes x.tgz"},
    "tar -c -f x.tar src": {"writes x.tar"},
    "tar tf x.tar": set(),
    "zip -qr code.zip .": {"writes code.zip"},
    "diff -r src store": set(),
    "git status": set(),
    "git init -q .": {"writes .git"},
    "git clone -q src/one.git": {"writes one"},
    "git clone src/one new": {"writes new"},
    "xz src/none*": {"alone src/none*", "writes src/none*.xz"},
    "sed s/a/b/ src/one": set(),
    "gzip -k src/one": {"alone src/one", "writes src/one.gz"},
    "sort -uo src/one src/two": {"writes src/one"},
    "sort -osrc/one src/two": {"writes src/one"},
    "sort --output=src/one src/two": {"writes src/one"},
    "sort -u src/one": set(),
    "uniq src/two src/one": {"writes src/one"},
    "find src -fprint0 x": {"writes src", "writes x"},
    "find -delete": {"goes ."},
    "rm -- -x": {"goes -x"},
    "mkdir -p src new": {"writes new"},
    "bash run.sh src/one": {"writes src/one"},
    "tar -xf x.tar": {"writes x.tar", "near ."},
    "unzip -qo x.zip": {"writes x.zip", "near ."},
    "curl -sO http://a/b/c": {"writes c", "writes http:/a/b/c"},
    "git branch --show-current": set(),
    "git tag": set(),
    "git remote -v": set(),
    "git config --get user.name": set(),
    "git stash list": set(),
    "git stash": {"near ."},
    "sed -i.old s/a/ src/one": {"writes s/a", "writes s/a/.old", "writes src/one"}
    | {"writes src/one.old"},
    "nvidia-smi --filename=x": {"writes x"},
    "gcc -c src/one.c": {"writes one.o", "writes one.s"},
    "gcc src/one.c": {"writes a.out"},
    "gcc -osrc/one src/one.c": {"writes src/one"},
    "shred -u src/one": {"writes src/one"},
}


@pytest.mark.parametrize("line", WRITES)
def test_what_programs_write(line, tmp_path):
    for name in ("src/one", "store/one"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    os.symlink("src", tmp_path / "latest")
    found = effects.effects(line.split(), str(tmp_path))
    said = {f"{how} {os.path.relpath(os.fsdecode(path), tmp_path)}" for how, path in found}
    writes = {one for one in said if "latest/" not in one and "src/run2" not in one}
    assert writes == WRITES[line]


def test_a_commit_that_tells_of_a_list_is_a_commit(tmp_path):
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git/index").touch()
    (one,) = effects.effects(["git", "commit", "-m", "a stash list"], str(tmp_path))
    assert one == ("writes", os.fsencode(tmp_path / ".git/index"))


def test_a_module_that_is_built_in_leaves_the_others_as_they_are(monkeypatch):
    """All built-in modules have one loader: some Pythons have readline there."""
    found, loader = [], importlib.machinery.BuiltinImporter
    monkeypatch.setitem(
        writers.SPECIAL, "_symtable", [lambda process, module: found.append(module)]
    )
    monkeypatch.delitem(sys.modules, "_symtable", raising=False)
    monkeypatch.setattr(sys, "meta_path", [writers.Finder(None), *sys.meta_path])
    before = loader.exec_module
    assert importlib.import_module("_symtable") is found[0] and loader.exec_module == before
