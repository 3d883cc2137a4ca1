"""Reading ahead: the same batches as without, whatever the ranks and the ramp-up; nothing is left behind."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from itertools import islice, pairwise
from multiprocessing import resource_sharer
from unittest.mock import Mock

import pytest
import torch

from helpers import ROOT
from helpers.token_files import samples_of, write_distinct
from helpers.whole_runs import SMALL, wait_until_gone
from moe_exp.config import load_config
from moe_exp.data.samples import corpus
from moe_exp.data.samples.corpus import shuffled
from moe_exp.data.samples.dataset import SampleStream
from moe_exp.data.samples.prefetch import ReadAhead, microbatch_starts
from moe_exp.engine.optimizer_setup import next_batch

SEQ_LEN = 16


@pytest.fixture
def prefix(tmp_path):
    """40 samples an epoch."""
    return write_distinct(tmp_path / "part", [8] * 80)


@pytest.fixture(params=["stream", "megatron"])
def samples(request, prefix, tmp_path):
    """200 samples, five epochs, in either order."""
    return samples_of(request.param, prefix, SEQ_LEN, 200, tmp_path)


def schedule(*, dp_size, mbsz, rampup=""):
    """(micro-batches, global batch size) by samples consumed, GBSZ=16."""
    batch = {"gpus_per_node": dp_size, "mbsz": mbsz, "gbsz": 16, "rampup_batch_size": rampup}
    config = load_config({**SMALL, **batch, "use_moe": "false"}, {})
    return partial(next_batch, config, seq_len=config.seq_len)


def read_ahead(samples, *, dp_rank=0, dp_size=1, mbsz=4, rampup="", num_workers=2):
    place = {"dp_rank": dp_rank, "dp_size": dp_size}
    at = schedule(dp_size=dp_size, mbsz=mbsz, rampup=rampup)

    def starts(first):
        return microbatch_starts(first - dp_rank * mbsz, at, **place)

    return ReadAhead(samples, starts=starts, num_workers=num_workers)


def worker_pids(reader):
    return [worker.pid for worker in reader._batches._workers]


@pytest.mark.parametrize("rampup", ["", "8 4 60"])
def test_order_depends_on_samples_consumed_alone(rampup, samples):
    """At any number of ranks and any MBSZ an iteration has the same samples, also after it is resumed."""
    plain = schedule(dp_size=1, mbsz=4, rampup=rampup)
    bounds = [0]
    while bounds[-1] < 150:
        bounds.append(bounds[-1] + plain(bounds[-1])[-1])
    assert {after - before for before, after in pairwise(bounds)} == ({8, 12, 16} if rampup else {16})
    for dp_size, mbsz in ((1, 1), (1, 4), (2, 2), (4, 1)):
        at = schedule(dp_size=dp_size, mbsz=mbsz, rampup=rampup)
        on_rank = partial(microbatch_starts, schedule=at, dp_size=dp_size)
        for resumed in (0, 1, 5):
            running = [on_rank(bounds[resumed], dp_rank=rank) for rank in range(dp_size)]
            for begin, end in pairwise(bounds[resumed:]):
                each = (end - begin) // (mbsz * dp_size)
                starts = (start for rank in running for start in islice(rank, each))
                batches = {start: samples.batch(start, count) for start, count in starts}
                tokens = torch.cat([batches[start] for start in sorted(batches)])
                assert tokens.equal(samples.batch(begin, end - begin))


@pytest.mark.parametrize("rampup", ["", "8 8 60"])
def test_same_batches_as_without(rampup, samples):
    """Two ranks with two workers each, from sample 0 on and from the middle of the second epoch."""
    at = schedule(dp_size=2, mbsz=2, rampup=rampup)
    for dp_rank in range(2):
        reader = read_ahead(samples, dp_rank=dp_rank, dp_size=2, mbsz=2, rampup=rampup)
        for consumed in (0, 48):
            for first, count in islice(microbatch_starts(consumed, at, dp_rank=dp_rank, dp_size=2), 20):
                batch = reader.batch(first, 2)
                assert count == 2 and batch.dtype == torch.int64
                assert batch.equal(samples.batch(first, 2))
        reader.close()


def test_the_order_of_an_epoch_is_made_once(prefix, tmp_path, monkeypatch):
    """By the rank, whose memory its processes share."""
    made, blend = tmp_path / "made", [(1.0, prefix), (2.0, prefix)]

    def noted(*args):
        with made.open("a") as file:
            file.write(f"{os.getpid()}\n")
        return shuffled(*args)

    monkeypatch.setattr(corpus, "shuffled", noted)
    reader = read_ahead(SampleStream(blend, seq_len=SEQ_LEN, seed=1), mbsz=1)
    for first in range(30):
        reader.batch(first, 1)
    reader.close()
    assert set(made.read_text().split()) == {str(os.getpid())}


def test_workers_stay_while_the_guess_is_right(samples):
    reader = read_ahead(samples)
    reader.batch(0, 4)
    before = worker_pids(reader)
    for first in range(4, 80, 4):
        reader.batch(first, 4)
    assert worker_pids(reader) == before
    assert reader.batch(32, 4).equal(samples.batch(32, 4))  # again: others have to start
    assert not set(worker_pids(reader)) & set(before)
    wait_until_gone(before)
    assert reader.batch(36, 3).equal(samples.batch(36, 3))  # another size: read here
    assert reader.batch(36, 4).equal(samples.batch(36, 4))
    reader.close()


def test_reading_ahead_of_the_last_sample(prefix, tmp_path):
    """Workers ask for samples that do not exist; nobody takes what comes of it."""
    samples = samples_of("megatron", prefix, SEQ_LEN, 40, tmp_path)
    last = len(samples) // 4 * 4
    reader = read_ahead(samples)
    assert torch.cat([reader.batch(first, 4) for first in range(0, last, 4)]).equal(samples.batch(0, last))
    with pytest.raises(ValueError, match=r"Megatron's order was built for \d+ samples"):
        reader.batch(last, 4)
    reader.close()


def test_close_leaves_no_process_and_an_interrupt_of_the_terminal_all(samples):
    """Ctrl-C goes to all processes of the terminal; the rank saves first, and reads on for that."""
    reader = read_ahead(samples)
    reader.batch(0, 4)
    pids, kept = worker_pids(reader), reader._batches  # as the traceback of an error keeps it
    assert len(pids) == 2
    for pid in pids:
        os.kill(pid, signal.SIGINT)
    time.sleep(0.2)
    for first in range(4, 80, 4):
        assert reader.batch(first, 4).equal(samples.batch(first, 4))
    reader.close()
    wait_until_gone(pids, timeout=10)
    del kept
    reader.close()


def test_worker_that_dies_is_an_error_of_the_next_batches(samples):
    """Not of whatever the rank does when it dies, and no hang."""
    before = signal.getsignal(signal.SIGCHLD)
    reader = read_ahead(samples)
    reader.batch(0, 4)
    assert signal.getsignal(signal.SIGCHLD) is before
    for pid in worker_pids(reader):
        os.kill(pid, signal.SIGKILL)
    time.sleep(0.2)
    with pytest.raises(RuntimeError, match=r"^NUM_WORKERS=2: .* died .*Fix: .* set NUM_WORKERS=0"):
        [reader.batch(first, 4) for first in range(4, 200, 4)]
    reader.close()
    assert reader.batch(8, 4).equal(samples.batch(8, 4))
    reader.close()


def test_worker_that_dies_while_its_batch_is_fetched(samples, monkeypatch):
    reader = read_ahead(samples)
    reader.batch(0, 4)
    for cut_off in (ConnectionResetError(104, "Connection reset by peer"), EOFError()):
        monkeypatch.setattr(resource_sharer.DupFd, "detach", Mock(side_effect=cut_off))
        with pytest.raises(RuntimeError, match=r"^NUM_WORKERS=2: .* died"):
            [reader.batch(first, 4) for first in range(4, 200, 4)]
        reader.close()
        monkeypatch.undo()


# A rank, and how it ends.
PROGRAM = """
import os, signal, sys
from moe_exp.data.samples.dataset import SampleStream
from moe_exp.data.samples.prefetch import ReadAhead

samples = SampleStream([(1.0, sys.argv[1])], seq_len=16, seed=1)
starts = lambda first: ((start, 4) for start in range(first, 10**9, 4))
reader = ReadAhead(samples, starts=starts, num_workers=2)
how = sys.argv[2]
reader._start(0) if how == "at once" else reader.batch(0, 4)
print(*(worker.pid for worker in reader._batches._workers), flush=True)
ends = {"at once": lambda: os._exit(3), "os._exit": lambda: os._exit(2), "raise": lambda: 1 / 0,
        "kill": lambda: os.kill(os.getpid(), signal.SIGKILL), "end": lambda: None}
ends[how]()
"""

slow = pytest.mark.slow
SLOW_ENDS = [
    pytest.param(*case, marks=slow) for case in (("end", 0), ("kill", -9), ("raise", 1), ("os._exit", 2))
]


@pytest.mark.parametrize(("how", "code"), [("at once", 3), *SLOW_ENDS])
def test_no_process_outlives_its_rank(how, code, prefix):
    """A rank that ends, is killed, fails, or ends as `faults` ends it, also before its workers have begun."""
    command, environ = [sys.executable, "-c", PROGRAM, prefix, how], {**os.environ, "PYTHONPATH": str(ROOT)}
    rank = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert rank.returncode == code and ("Traceback" in rank.stderr) == (how == "raise"), rank.stderr
    pids = [int(pid) for pid in rank.stdout.split()]
    assert len(pids) == 2
    wait_until_gone(pids, timeout=30)


def settings(prefix, **changes):
    """Megatron's order and two workers, with a part for validation, ramp-up and more than one epoch."""
    return {
        "TRAIN_DATA": prefix, "SPLIT": "90,10", "EVAL_INTERVAL": 4, "EVAL_ITERS": 1, "SEQ_LEN": SEQ_LEN,
        "VOCAB_SIZE": 1024, "DATA_ORDER": "megatron", "NUM_WORKERS": 2, "TRAIN_ITERS": 8, "MBSZ": 1,
        "RAMPUP_BATCH_SIZE": "4 2 24",
    } | changes  # fmt: skip


def test_run_with_workers(runs, prefix):
    run = runs.succeed("workers", **settings(prefix))
    assert run.curve("consumed_samples") == [4, 8, 12, 18, 24, 32, 40, 48]
    assert len(run.records("valid")) == 2
    assert "Warning" not in run.text


@slow
@pytest.mark.parametrize("data_order", ["stream", "megatron"])
def test_run_goes_on_bit_for_bit(data_order, runs, prefix):
    """8 iterations on two ranks with workers, or 3 and then 5 without; the losses also with one rank."""
    changes = {"DATA_ORDER": data_order, "GPUS_PER_NODE": 2}
    whole = runs.succeed("whole", **settings(prefix, **changes))
    first = runs.stopped("resumed", EXIT_INTERVAL=3, **settings(prefix, **changes))
    assert first.curve("iteration") == [1, 2, 3]
    resumed = runs.succeed("resumed", **settings(prefix, **changes, NUM_WORKERS=0))
    assert resumed.curve("iteration") == list(range(1, 9))
    for name in ("lm_loss", "grad_norm", "consumed_samples"):
        assert resumed.curve(name) == whole.curve(name), name
    losses = [[record["lm_loss"] for record in run.records("valid")] for run in (resumed, whole)]
    assert losses[0] == losses[1]
    alone = runs.succeed("alone", **settings(prefix, DATA_ORDER=data_order))
    assert alone.curve("lm_loss") == pytest.approx(whole.curve("lm_loss"), rel=1e-5)
