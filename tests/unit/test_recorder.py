"""The doctor reads torch's flight recorder; the files are made up as torch documents them."""

import json
import os
import pickle
import sys
from types import SimpleNamespace

import pytest
from conftest import PYTHON, ROOT, run

from doctor.recorder.calls import call_of
from doctor.recorder.compare import findings
from doctor.recorder.dump import write
from doctor.recorder.read import dump_of
from doctor.run import recorded

HERE = "/home/me/train.py"
BACK = "/home/me/venv/lib/python3.11/site-packages/torch/autograd/graph.py"


def entry(number, name, sizes, done=True, line=10, message=False, **more):
    """A call as NCCL's recorder writes it (version 2.5 and later)."""
    return {
        "record_id": more.pop("record", number),
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": 0 if message else number,
        "p2p_seq_id": number if message else 0,
        "op_id": number,
        "profiling_name": f"nccl:{name}",
        "time_created_ns": 1724779239936775119 + number,
        "input_sizes": sizes,
        "input_dtypes": ["Float"],
        "output_sizes": sizes,
        "output_dtypes": ["Float"],
        "state": "completed" if done else "started",
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": 1724779239975811724 if done else None,
        "retired": done,
        "timeout_ms": 600000,
        "is_p2p": message,
        "frames": [{"name": "main", "filename": HERE, "line": line}],
    } | more


def dump(*entries, ranks="[0, 1]"):
    return {
        "version": "2.5",
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": ranks}},
        "pg_status": {"0": {"last_enqueued_collective": len(entries)}},
        "entries": list(entries),
    }


def gradients(number, **more):
    """DDP's sum: on a GPU its thread has no frame of Python."""
    return entry(number, "all_reduce", [[23818]], frames=[], **more)


def step(number):
    return [entry(number, "broadcast", [[64]]), gradients(number + 1)]


def only(dumps):
    (finding,) = findings(dumps)
    return finding


def test_a_skipped_batch():
    same = [*step(1), *step(3), entry(5, "broadcast", [[64]])]
    skips = dump(*same, entry(6, "broadcast", [[64]], done=False, line=56))
    waits = dump(*same, gradients(6, done=False))
    one = only({0: skips, 1: waits})
    assert one.place == "bugs.md#a-branch-that-depends-on-a-processs-own-data" and one.mistake
    assert one.line == "train.py:56"
    assert "rank 0 has left out a backward" in one.text
    assert "it has made 2, the others 3" in one.text


def test_other_calls():
    one = only(
        {
            0: dump(*step(1), entry(3, "all_reduce", [[1]], done=False, line=73)),
            1: dump(*step(1), entry(3, "broadcast", [[64]], done=False, line=56)),
        }
    )
    assert one.text.startswith(
        "call 3 is not the same: rank 0 all_reduce [1] (train.py:73), rank 1"
    )


def test_unequal_sizes():
    """gather takes one size; a scatter's input is of its source alone."""
    one = only(
        {rank: dump(entry(1, "_all_gather_base", [[3 + rank]], done=False)) for rank in (0, 1)}
    )
    assert "of tensors that are not alike: rank 0 _all_gather_base [3]" in one.text
    assert not findings({r: dump(entry(1, "scatter", [[r]] * r)) for r in (0, 1)})


def test_a_rank_that_has_not_come():
    one = only({0: dump(*step(1), gradients(3, done=False)), 1: dump(*step(1))})
    assert one.text.startswith("rank 1 has not come to call 3, which is rank 0 all_reduce [23818]")
    # The buffer is a ring: what the others have forgotten is not compared.
    late = {0: dump(*step(1), *step(3)), 1: dump(*step(3))}
    assert not findings(late)


def test_a_send_without_its_recv():
    sends = [entry(n, "send 0->1", [[3]], done=n < 2, message=True, line=n) for n in (1, 2)]
    recv = entry(1, "recv 1<-0", [[3]], message=True)
    one = only({0: dump(*sends), 1: dump(recv)})
    assert one.line == "train.py:2" and "which has made 1 of the other kind" in one.text
    assert not findings({0: dump(*sends[:1]), 1: dump(recv)})


def test_all_have_made_the_call():
    same = {rank: dump(*step(1), gradients(3, done=False)) for rank in (0, 1)}
    assert "all ranks have made the same calls" in only(same).text and not only(same).mistake
    del same[1]
    assert "there is no file of rank 1: it may have died" in only(same).text


def test_gloos_calls_end_though_they_stay_scheduled():
    known = entry(1, "all_reduce", [[3]], done=False) | {"profiling_name": "gloo:all_reduce"}
    assert not call_of(known | {"state": "scheduled"}).done
    assert call_of(known | {"state": "scheduled", "retired": True}).done
    timed_out = entry(1, "all_reduce", [[3]], done=False) | {"retired": True}
    assert not call_of(timed_out).done


def test_the_command(tmp_path):
    """Pickles and JSON, whose group is a list, and numbers are text; other files are left."""
    skips = dump(*step(1), entry(3, "broadcast", [[64]], done=False))
    waits = dump(*step(1), gradients(3, done=False))
    waits["pg_status"]["0"] = {"last_enqueued_collective": "3"}
    (tmp_path / "nccl_trace_rank_0").write_bytes(pickle.dumps(skips, protocol=2))
    (tmp_path / "nccl_trace_rank_1.json").write_text(json.dumps(waits))
    (tmp_path / "notes.txt").write_text("none of them")
    output = run([PYTHON, ROOT / "doctor", "--dumps", tmp_path], tmp_path, code=1)
    assert " rank 0: call 3 is the last, call 2 has ended" in output
    assert "→ docs/bugs.md#a-branch-that-depends" in output
    (tmp_path / "nccl_trace_rank_0").unlink()
    output = run([PYTHON, ROOT / "doctor", "--dumps", tmp_path], tmp_path, code=3)
    assert "there is no file of rank 0" in output


class Harmful:
    def __reduce__(self):
        return os.system, ("touch harmed",)


@pytest.mark.parametrize("what", [Harmful(), [Harmful()], 3, {"entries": [1]}, {"entries": 1}])
def test_a_file_cannot_run_anything(what, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"would run it|no list|no calls"):
        dump_of(pickle.dumps(what))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("data", [b"", b"{", b"text", b"\x80\x02}", pickle.dumps({})[:-1]])
def test_a_damaged_file_is_refused(data):
    with pytest.raises(ValueError):
        dump_of(data)


def refuses(**_):
    raise TypeError("other arguments")


@pytest.mark.parametrize("module", [SimpleNamespace(), SimpleNamespace(_dump_fr_trace=refuses)])
def test_a_torch_without_it(module, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", module)
    write(tmp_path / "1.calls")
    assert not list(tmp_path.iterdir()) and recorded(tmp_path / "1.calls") is None


def test_without_files(tmp_path):
    output = run([PYTHON, ROOT / "doctor", "--dumps", tmp_path], tmp_path, code=2)
    assert "no file of the flight recorder" in output
    assert "is no folder" in run([PYTHON, ROOT / "doctor", "--dumps", "none"], tmp_path, code=2)


def test_fields_of_another_kind_are_one_line(tmp_path):
    call = {"profiling_name": "nccl:all_reduce", "frames": 5}
    (tmp_path / "rank_0.json").write_text(json.dumps({"entries": [call]}))
    output = run([PYTHON, ROOT / "doctor", "--dumps", tmp_path], tmp_path, code=2)
    assert output.startswith(" the files cannot be compared: TypeError: ")
