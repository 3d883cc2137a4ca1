"""Stacks as py-spy and faulthandler print them, ranks with the same stack, and which ranks are named."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from moe_exp.watch.hangs.dump import GONE, STOPPED, last_collectives
from moe_exp.watch.hangs.files import (
    MAIN,
    Answer,
    Frame,
    RankDump,
    Thread,
    ask,
    package_folders,
    parse_stacks,
    read_dumps,
    write_answer,
    write_dump,
)
from moe_exp.watch.hangs.stacks import apart, groups_of, is_waiting, main_stack, summarize, where

SITE = "/env/lib/python3.11/site-packages"
FOLDERS = ["/home/me/moe_exp", f"{SITE}/torch"]
PY_SPY = f"""Process 25356: /env/bin/python -u -m moe_exp.train
Python v3.11.7 (/env/bin/python3.11)

Thread 25360 (idle): "collectives"
    _write_collectives (/home/me/moe_exp/heartbeat.py:249)
    Thread.run (/usr/lib/python3.11/threading.py:982)
Thread 25356 (idle): "MainThread"
    all_reduce ({SITE}/torch/distributed/distributed_c10d.py:3252)
    _exception_logger.<locals>.wrapper ({SITE}/torch/distributed/c10d_logger.py:83)
    <module> (/home/me/moe_exp/train.py:12)
"""
FAULTHANDLER = f"""Thread 0x00007f9600 (most recent call first):
  File "/home/me/moe_exp/heartbeat.py", line 249 in _write_collectives
  File "/usr/lib/python3.11/threading.py", line 982 in run

Current thread 0x00007f961001ab80 (most recent call first):
  File "{SITE}/torch/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "{SITE}/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/home/me/moe_exp/train.py", line 12 in <module>
"""
NATIVE = f"""Thread 25356 (idle): "MainThread"
    pthread_cond_wait (libc.so.6)
    c10d::Work::wait (libtorch_cpu.so)
    all_reduce ({SITE}/torch/distributed/distributed_c10d.py:3252)
    0x7f960f84524a (libc.so.6)
"""

REDUCE = Frame("all_reduce", f"{SITE}/torch/distributed/distributed_c10d.py", 3252)
WAIT = Frame("AllToAll._launch.<locals>.wait", "moe_exp/layers/dispatcher/collectives.py", 92)
STEP = Frame("train_step", "moe_exp/train.py", 250)
READ = Frame("SampleStream.batch", "moe_exp/data/samples/dataset.py", 80)
BACKWARD = Frame("_engine_run_backward", f"{SITE}/torch/autograd/graph.py", 800)
APPLY = Frame("BackwardCFunction.apply", f"{SITE}/torch/autograd/function.py", 300)


def rank(number: int, *frames: Frame, source="", state="sleeping", iteration=9, **more: str):
    """A rank whose main thread has these frames, innermost first."""
    facts = {"host": f"node{number // 2}", "state": state, "iteration": str(iteration), "source": source}
    facts |= {"phase": "data", "seconds in it": "70.0"}
    return RankDump(number, facts | more, [Thread(MAIN, frames)] if frames else [])


def test_both_tools_give_the_same_stack():
    spied, handled = parse_stacks(PY_SPY, FOLDERS), parse_stacks(FAULTHANDLER, FOLDERS)
    assert [thread.name for thread in spied] == [MAIN, "collectives"]
    assert [thread.name for thread in handled] == [MAIN, "0x00007f9600"]
    assert [frame.key for frame in spied[0].frames] == [frame.key for frame in handled[0].frames]
    assert [frame.place for frame in spied[0].frames] == [
        "torch/distributed/distributed_c10d.py:3252", "torch/distributed/c10d_logger.py:83",
        "moe_exp/train.py:12",
    ]  # fmt: skip


@pytest.mark.parametrize("clone", ["moe_exp", "megatron", "torch", "a b"])
def test_files_beside_the_package_are_not_its_own_whatever_the_clone_is_called(clone):
    text = PY_SPY.replace("/home/me/moe_exp/train.py", f"/home/{clone}/tests/test_x.py")
    text = text.replace(f"{SITE}/torch", f"/home/{clone}/.venv/torch")
    frames = parse_stacks(text, [f"/home/{clone}/moe_exp", f"/home/{clone}/.venv/torch"])[0].frames
    assert [frame.file for frame in frames] == [
        "torch/distributed/distributed_c10d.py", "torch/distributed/c10d_logger.py",
        f"/home/{clone}/tests/test_x.py",
    ]  # fmt: skip
    assert [frame.is_in_packages for frame in frames] == [True, True, False]
    asleep = rank(1, Frame("_sleep", f"/home/{clone}/tests/test_x.py", 9), STEP)
    called = "called by train_step (moe_exp/train.py:250)"
    expected = f"is in _sleep (test_x.py:9), {called}, outside any collective"
    assert apart([rank(0, REDUCE), asleep]) == {1: expected}


def test_folders_of_the_packages(tmp_path):
    assert {Path(folder).name for folder in package_folders()} == {"moe_exp", "megatron", "torch"}
    own = next(folder for folder in package_folders() if Path(folder).name == "moe_exp")
    write_dump(tmp_path, 0, {"host": "node0"}, PY_SPY.replace("/home/me/moe_exp", own))
    (dump,) = read_dumps(tmp_path)
    assert main_stack(dump)[-1].place == "moe_exp/train.py:12" and "packages" not in dump.facts


def test_our_own_trace_of_calls_is_on_no_stack(tmp_path):
    file = "/home/me/moe_exp/watch/hangs/call_trace.py"
    called, top = f"    CallTrace._called ({file}:67)\n", f"    all_reduce ({SITE}/torch"
    assert parse_stacks(PY_SPY.replace(top, called + top)) == parse_stacks(PY_SPY)
    line = f'  File "{SITE}/torch/distributed/distributed_c10d.py"'
    handled = FAULTHANDLER.replace(line, f'  File "{file}", line 67 in _called\n{line}')
    assert parse_stacks(handled) == parse_stacks(FAULTHANDLER)
    native = NATIVE.replace("    pthread", f"    clock_gettime (libc.so.6)\n{called}    pthread")
    write_dump(tmp_path, 3, {}, PY_SPY, native=native, calls=[])
    (dump,) = read_dumps(tmp_path)
    assert dump.native == ["pthread_cond_wait", "c10d::Work::wait"]


def test_main_thread_is_found():
    # another thread got the signal
    text = FAULTHANDLER.replace("Current thread 0x00007f961001ab80", "Thread 0x1")
    text = text.replace("Thread 0x00007f9600", "Current thread 0x2")
    assert parse_stacks(text)[0].frames[-1].name == "<module>"
    # the end of a deep stack is cut off
    text = FAULTHANDLER.replace('  File "/home/me/moe_exp/train.py", line 12 in <module>', "  ...")
    wrapper = Frame("wrapper", f"{SITE}/torch/distributed/c10d_logger.py", 83)
    assert parse_stacks(text)[0] == Thread(MAIN, (REDUCE, wrapper))


def test_file_of_a_rank_says_what_was_written(tmp_path):
    facts = {"host": "node1", "state": "sleeping", "iteration": 7, "source": "work.wait()"}
    write_dump(tmp_path, 3, facts, PY_SPY, native=NATIVE, calls=["1.0 moe_exp.train.main:1"])
    (dump,) = read_dumps(tmp_path)
    assert (dump.rank, dump.host, dump.iteration, dump.facts["source"]) == (3, "node1", 7, "work.wait()")
    assert list(dump.native) == ["pthread_cond_wait", "c10d::Work::wait"]
    assert list(dump.calls) == ["1.0 moe_exp.train.main:1"]
    assert dump.threads == parse_stacks(PY_SPY)


def test_who_waits():
    assert is_waiting(rank(0, REDUCE, STEP))
    assert is_waiting(rank(0, WAIT, STEP, source="work.wait()"))
    assert not is_waiting(rank(0, READ, STEP, source="return self.tokens[first]"))
    lock = Frame("wait", "/usr/lib/python3.11/threading.py", 320)
    assert not is_waiting(rank(0, lock, READ, source="waiter.acquire()"))
    # A host waits for its GPU, in which the collectives are; on a CPU the same line computes.
    assert is_waiting(rank(0, STEP, source="counts = table.tolist()", gpus="8"))
    assert not is_waiting(rank(0, STEP, source="counts = table.tolist()", gpus="0"))
    assert is_waiting(replace(rank(0, STEP), native=["futex_wait", "ncclGroupEnd"]))
    assert not is_waiting(rank(0))


def test_backward_on_a_gpu_is_where_autograds_thread_is():
    main, other = Thread(MAIN, (BACKWARD, STEP)), Thread("reader", (READ,))
    dump = replace(rank(0), threads=[main, other, Thread("0x5", (REDUCE, APPLY))])
    assert main_stack(dump) == (REDUCE, APPLY, BACKWARD, STEP)


def test_groups_are_by_stack_and_largest_first():
    dumps = [rank(0, READ), rank(1, REDUCE, STEP), rank(2, WAIT, STEP), rank(3, REDUCE, STEP)]
    assert [[dump.rank for dump in group] for group in groups_of(dumps)] == [[1, 3], [0], [2]]


def test_rank_that_does_not_wait_is_named():
    waiting = rank(1, WAIT, source="work.wait()")
    place = "SampleStream.batch (moe_exp/data/samples/dataset.py:80)"
    found = apart([rank(0, REDUCE), waiting, rank(2, READ, STEP), rank(3, REDUCE)])
    assert found == {2: f"is in {place}, outside any collective"}
    launch = replace(WAIT, name="AllToAll._launch", line=85)
    found = apart([waiting, rank(2, Frame("sleepy", "/tmp/patch.py", 9), launch, STEP)])
    inside = "inside AllToAll._launch (moe_exp/layers/dispatcher/collectives.py:85)"
    assert found == {2: f"is in sleepy (patch.py:9), {inside}, but does not wait for others"}


def test_state_of_a_process_is_the_first_evidence():
    assert where(rank(0, without="py-spy: not installed")) == "has no stack (py-spy: not installed)"
    stopped = "is stopped (by a signal such as SIGSTOP)"
    assert apart([rank(0, REDUCE), rank(1, state=STOPPED), rank(2, REDUCE)]) == {1: stopped}
    assert apart([rank(0, REDUCE), rank(1, state=GONE), rank(2, REDUCE)]) == {1: "has ended"}
    found = apart([rank(0, REDUCE), rank(1, REDUCE, state=STOPPED)])
    assert found == {1: f"{stopped}; it waits in all_reduce (torch/distributed/distributed_c10d.py:3252)"}


def test_rank_that_is_behind_is_named_where_all_wait():
    found = apart([rank(0, REDUCE), rank(1, REDUCE, iteration=8), rank(2, REDUCE)])
    assert list(found) == [1] and found[1].startswith("is in iteration 8, others in 9")
    last = {"ranks": "[0, 1]", "description": "EP", "name": "gloo:all_to_all", "state": "scheduled"}
    begun = [("5", 41), ("5", 40), ("6", 7)]
    dumps = [
        replace(rank(index, REDUCE), collectives=[last | {"group": group, "number": number}])
        for index, (group, number) in enumerate(begun)
    ]
    found = apart(dumps)
    assert list(found) == [1]
    assert found[1].startswith("has started 40 collectives of EP, others 41 (gloo:all_to_all)")


def test_minority_is_the_last_evidence():
    other = Frame("broadcast", REDUCE.file, 99)
    assert list(apart([rank(0, REDUCE), rank(1, other), rank(2, REDUCE)])) == [1]
    assert apart([rank(0, REDUCE), rank(1, other)]) == {}  # no majority
    assert apart([rank(0, REDUCE), rank(1, REDUCE)]) == {}
    assert apart([]) == {}


def test_record_of_collectives():
    entry = {"process_group": ["0", "default_pg"], "profiling_name": "gloo:all_reduce", "state": "scheduled"}
    other = entry | {"process_group": ["3", "EP"], "collective_seq_id": 9}
    entries = [entry | {"collective_seq_id": 4}, other, entry | {"collective_seq_id": 5}]
    found = last_collectives({"entries": entries, "pg_config": {"0": {"ranks": "[0, 1]"}}})
    numbers = [(last["group"], last["number"], last["ranks"]) for last in found["last"]]
    assert numbers == [("0", 5, "[0, 1]"), ("3", 9, "")]
    assert len(found["entries"]) == 3
    assert last_collectives({}) == {"last": [], "entries": []}


def test_summary_names_ranks_hosts_and_nodes_that_are_silent(tmp_path):
    with pytest.raises(ValueError, match=r"stacks=.*: has no stacks\. Fix: "):
        summarize(tmp_path)
    folder = tmp_path / ask(tmp_path, "hang", "iteration 9, data: no progress on any rank for 70.0 s").folder
    write_answer(folder, Answer(0, 3, 6, "node0", [0, 1], [], True))
    facts = {"host": "node0", "state": "sleeping", "iteration": 9, "phase": "data", "seconds in it": 70.0}
    handled = facts | {"tool": "faulthandler", "without": "py-spy: not installed"}
    write_dump(folder, 0, facts, PY_SPY)
    write_dump(folder, 1, handled, FAULTHANDLER.replace("all_reduce", "other"))
    write_dump(folder, 2, facts | {"state": STOPPED}, PY_SPY, calls=["1.0 moe_exp.train.main:1"])
    (folder / "rank_00000.collectives.json").write_text(json.dumps({"last": [], "entries": []}))
    summary = summarize(folder)
    assert list(summary.named) == [2, 3, 4, 5]
    assert summary.line.startswith("rank 2 on node0 (is stopped); rank 3 on node 1 (was not found: ")
    assert summary.line.endswith("; and 1 more")
    reason, silent, _, first, *_ = summary.short.splitlines()
    assert reason == "iteration 9, data: no progress on any rank for 70.0 s"
    assert silent == "no answer from the launchers of nodes 1-2"
    assert first.startswith("  rank 2 on node0 (iteration 9, data for 70.0 s): is stopped (by a signal")
    assert "; it waits in all_reduce" in first
    assert "stacks of rank 1 by faulthandler (py-spy: not installed)" in summary.whole
    assert "latest calls of rank 2" in summary.whole
    assert summary.whole.startswith(summary.short)


def test_ranks_of_a_run_that_goes_on_are_in_other_places_and_nobody_is_named(tmp_path):
    folder = tmp_path / ask(tmp_path, "stacks", "stacks on demand").folder
    facts = {"host": "node0", "state": "sleeping", "iteration": 9, "phase": "data", "seconds in it": 0.3}
    write_dump(folder, 0, facts | {"iteration": 10}, PY_SPY)
    write_dump(folder, 1, facts, FAULTHANDLER.replace("all_reduce", "other"))
    summary = summarize(folder)
    assert not summary.named
    assert "differ from the others" not in summary.whole and "location of all ranks:" in summary.short
    write_dump(folder, 1, facts | {"state": STOPPED}, PY_SPY)
    assert list(summarize(folder).named) == [1]
    for rank_ in (0, 1):
        write_dump(folder, rank_, facts | {"iteration": 10 - rank_, "seconds in it": 90.0}, PY_SPY)
    assert list(summarize(folder).named) == [1]  # nobody has gone on for a while: as in a hang
