import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, get_args, get_origin
from unittest.mock import Mock

import pytest

from helpers import wait_for
from helpers.ranks import free_port
from helpers.warm_runs import answer_warm
from helpers.whole_runs import ROOT, clean_environ
from moe_exp.cli import main
from moe_exp.config import Config, load_config
from moe_exp.config.learning_rate import BEGIN
from moe_exp.config.presets import PRESETS
from moe_exp.host.devices import KEEP_FREED_MEMORY
from moe_exp.host.exit_codes import EXIT_CODE_FILE, RENDEZVOUS_KEY, report_exit_code, reported_exit_code
from moe_exp.host.processes import own_command
from moe_exp.launch import torchrun_job
from moe_exp.launch.launch import dry_run_text, launch, rank_arguments, train
from moe_exp.launch.torchrun_job import child_environment, shared_key, torchrun_command
from moe_exp.runs.run_folder import open_run_folder
from moe_exp.training.metrics import Metrics

# Stands for a rank: tells where it is, then waits for SIGTERM, "saves" for a moment and ends with 0.
WORKER = """
import os, pathlib, signal, sys, time
here = pathlib.Path(__file__).parent
rank = os.environ["RANK"]
def stop(number, frame):
    time.sleep(0.5)
    (here / f"saved{rank}").write_text(signal.Signals(number).name)
    sys.exit(0)
STOP = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
for number in STOP:
    signal.signal(number, stop)
signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP)
from moe_exp.host.exit_codes import RESOLVED_SETTINGS
settings = pathlib.Path(os.environ["MOE_EXP_EXIT_CODE_FILE"]).with_name(RESOLVED_SETTINGS)
(here / f"settings{rank}").write_text(settings.read_text())
(here / f"args{rank}").write_text(" ".join(sys.argv[1:]))
time.sleep(60)
"""

# Stands for the agent: starts a rank in a session of its own, passes signals on, and ends with its exit code.
STARTER = """
import signal, subprocess, sys
rank = subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True)
PASSED = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP]
for number in PASSED:
    answers = {signal.SIGHUP: signal.SIGTERM}
    signal.signal(number, lambda number, frame: rank.send_signal(answers.get(number, number)))
signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED)
code = rank.wait()
sys.exit(code if code >= 0 else 1)
"""


def moe_exp(*args: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return answer_warm(args, clean_environ(PRESET="cpu", PYTHONPATH=ROOT) | environ, cwd)


def wait_for_files(*paths: Path) -> None:
    wait_for(lambda: all(path.exists() for path in paths))


def cpu(**values) -> Config:
    return load_config({"preset": "cpu", "gpus_per_node": 2} | values, {})


def test_torchrun_command():
    config = cpu(nnodes=2, node_rank=1, master_addr="node0", master_port=4000, max_restarts=3)
    assert torchrun_command(config, ["--topk=2"]) == [
        sys.executable, "-m", "moe_exp.launch.agent", "--nnodes", "2", "--node-rank", "1", "--nproc-per-node",
        "2", "--master-addr", "node0", "--master-port", "4000", "--max-restarts", "3", "-m", "moe_exp.train",
        "--topk=2",
    ]  # fmt: skip
    assert torchrun_command(config, [], "other")[-4:] == ["--max-restarts", "0", "-m", "other"]


@pytest.mark.parametrize(
    ("gpus", "threads", "expected"), [(0, 0, "1"), (0, 3, "3"), (8, 0, "7"), (8, 2, "2")]
)
def test_threads_and_allocator_of_the_ranks(monkeypatch, gpus, threads, expected):
    monkeypatch.setattr("moe_exp.launch.torchrun_job.count_gpus", lambda: gpus)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    for name in KEEP_FREED_MEMORY:
        monkeypatch.delenv(name, raising=False)
    environ = child_environment(cpu(threads_per_rank=threads))
    assert environ["OMP_NUM_THREADS"] == expected
    assert (KEEP_FREED_MEMORY.items() <= environ.items()) == (gpus == 0)
    monkeypatch.setenv("MALLOC_MMAP_MAX_", "100")
    assert child_environment(cpu())["MALLOC_MMAP_MAX_"] == "100"


EXCHANGES = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "NCCL_LAUNCH_ORDER_IMPLICIT": "1"}


@pytest.mark.parametrize(("gpus", "ep", "expected"), [(2, 2, True), (2, 1, False), (0, 2, False)])
def test_environment_of_ranks_that_exchange_rows(monkeypatch, gpus, ep, expected):
    monkeypatch.setattr("moe_exp.launch.torchrun_job.count_gpus", lambda: gpus)
    for name in EXCHANGES:
        monkeypatch.delenv(name, raising=False)
    assert (EXCHANGES.items() <= child_environment(cpu(ep=ep)).items()) == expected
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:native")
    assert child_environment(cpu(ep=ep))["PYTORCH_CUDA_ALLOC_CONF"] == "backend:native"


def test_dry_run_text_says_where_a_setting_comes_from(monkeypatch):
    monkeypatch.setenv("PRESET", "cpu")
    monkeypatch.setenv("NUM_EXPERTS", "16")
    flags = {"topk": "2", "lr": None, "train_iters": "50"}
    text = dry_run_text(load_config(flags), flags, {"seed": "a file"}, BEGIN)
    for line in (
        "TOPK=2 +# command line", "NUM_EXPERTS=16 +# environment", "NUM_LAYERS=4 +# preset cpu",
        "WARMUP_ITERS=5 +# from TRAIN_ITERS", "SEED=1234 +# a file", "VPP=none", "USE_MOE=true",
    ):  # fmt: skip
        assert re.search(f"^{line}$", text, re.M), line
    assert re.search(r"moe_exp\.launch\.agent .* --topk=2", text)


def test_many_micro_batches_in_bf16_are_warned_of(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = {"preset": "cpu", "dtype": "bf16", "grad_dtype": "bf16", "gpus_per_node": 1, "gbsz": 32}
    for mbsz, is_warned in ((4, True), (8, False)):
        assert train(flags | {"mbsz": mbsz}, dry_run=True) == 0
        error = capsys.readouterr().err
        assert ("warning: GRAD_DTYPE=bf16: sums the gradients of 8 micro-batches" in error) is is_warned


def test_dry_run_of_the_reference(tmp_path):
    environ = {"PRESET": "reference", "GPUS_PER_NODE": "8", "NUM_EXPRTS": "8"}
    done = moe_exp("train", "--dry-run", "--ep", "4", cwd=tmp_path, **environ)
    assert done.returncode == 0, done.stderr
    for text in (
        "4,375,732,736", "rank (0, 0): 1204838912", "13153.68 MB", "--nproc-per-node 8",
        "-m moe_exp.train --ep=4", "iteration (cosine): 0 at 0 (0%), 0.000525 at 10000 (25%), ",
    ):  # fmt: skip
        assert text in done.stdout
    line = "moe-exp: warning: NUM_EXPRTS is not a setting; did you mean NUM_EXPERTS?"
    assert line in done.stderr.splitlines()
    assert list(tmp_path.iterdir()) == []


def test_bad_settings_end_with_2_before_anything_exists(tmp_path):
    done = moe_exp("train", "--topk", "65", cwd=tmp_path, EP="3", GPUS_PER_NODE="3", GBSZ="48")
    assert (done.returncode, done.stdout) == (2, "")
    given = [line.partition(": ")[2].partition(":")[0] for line in done.stderr.splitlines()]
    assert given == ["TOPK=65", "EP=3"] and list(tmp_path.iterdir()) == []


def _drawn(name: str, rng: random.Random) -> str:
    """A value of the right kind, or now and then of another."""
    kind = Config.model_fields[name].annotation
    texts = [
        "", "none", "auto", "all", "a b c", "0.5 a 0.5", "64 64 1000000000", "[0,1]*200000000", "[1]*10000",
        "9999*9999," * 40 + "1", "1*9999", "10-12", "1,2,3", "99,1", "x" * 300, "x" * 5000, "x/" * 2500,
        "\n", "\x1b[2J", "a\tb", "\udcff", "a\0b", "\u202e", "null", "{}", "[[[[", "1e999", "-1", "0x10",
        "true", "~no_such_user/x", "/dev/null/x", "/", "..", "%s{}", "--", "²", "9" * 5000,
    ]  # fmt: skip
    numbers = [
        "-1", "nan", "9" * 40, "0", "1", "2", "3", "7", "64", "4096", "10000", "100000", "16777216",
        "1000000000", "1e30",
    ]  # fmt: skip
    if get_origin(kind) is Literal and rng.random() < 0.95:
        return str(rng.choice(get_args(kind)))
    if kind is bool and rng.random() < 0.95:
        return rng.choice(["true", "false"])
    if kind is float:
        return rng.choice([*numbers, "0.5", "1e-320", "1e308"])
    return rng.choice(texts if kind is str or rng.random() < 0.05 else numbers)


@pytest.mark.parametrize(("seed", "count"), [(20, 100), pytest.param(21, 2200, marks=pytest.mark.slow)])
def test_random_settings_are_answered_at_once(seed, count, tmp_path, monkeypatch, capsys):
    rng, names = random.Random(seed), [name for name in Config.model_fields if name != "preset"]
    monkeypatch.chdir(tmp_path)
    for _ in range(count):
        flags = {name: _drawn(name, rng) for name in rng.sample(names, rng.choice([1, 1, 2, 3, 6]))}
        flags["preset"] = rng.choice(list(PRESETS))
        start = time.process_time()
        assert train(flags, dry_run=True) in (0, 2), flags
        assert time.process_time() - start < 2, flags
    assert not list(tmp_path.iterdir())
    assert all(len(line) < 1000 for line in capsys.readouterr().err.splitlines())


@pytest.mark.parametrize(
    ("given", "port"), [({}, "0"), ({"nnodes": 2}, "23456"), ({"master_port": 25000}, "25000")]
)
def test_the_port_of_a_job(given, port):
    command = torchrun_command(cpu(**given), rank_arguments(cpu(**given), {}))
    assert command[command.index("--master-port") + 1] == port
    assert f"--master-port={port}" in command


def test_port_in_use_ends_with_2_before_anything_exists(tmp_path):
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        given = {"GPUS_PER_NODE": "1", "MASTER_PORT": str(port)}
        done = moe_exp("train", cwd=tmp_path, **given)
        planned = moe_exp("train", "--dry-run", cwd=tmp_path, **given)
    assert (done.returncode, planned.returncode) == (2, 0)
    assert f"moe-exp: MASTER_PORT={port}: is in use" in done.stderr
    assert f"moe-exp: warning: MASTER_PORT={port}: is in use" in planned.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("rank", "local_rank", "code"), [(0, 0, 75), (1, 1, None), (8, 0, 75)])
def test_the_first_rank_of_every_node_reports_the_exit_code(rank, local_rank, code, tmp_path, monkeypatch):
    for name, value in ((EXIT_CODE_FILE, tmp_path / "code"), ("RANK", rank), ("LOCAL_RANK", local_rank)):
        monkeypatch.setenv(name, str(value))
    assert report_exit_code(75)  # there is a launcher
    assert reported_exit_code() == code
    monkeypatch.setenv(EXIT_CODE_FILE, str(tmp_path / "gone" / "exit_code"))  # the launcher has ended
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert not report_exit_code(1) and reported_exit_code() is None


def test_version_and_help(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0 and capsys.readouterr().out.startswith("moe-exp ")
    assert main([]) == 0 and "doctor" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("end", "told", "code", "written"),
    [
        ("stopped", 75, 75, "stopped"),
        ("stopped", 1, 1, "stopped"),  # without a checkpoint
        ("finished", 1, 0, "finished"),  # torn down with an error
        (None, 143, 143, "failed"),
        (None, 0, 1, "failed"),
    ],
)
def test_exit_code_of_a_run(tmp_path, monkeypatch, capsys, end, told, code, written):
    config = cpu(run_dir=str(tmp_path), run_name="one", train_data="given")

    def job(command, environ, config, poll):
        folder = open_run_folder(config)
        with Metrics(config, folder) as metrics:
            if end:
                metrics.event("end", 7, status=end)
        return told

    monkeypatch.setattr("moe_exp.launch.launch.run_job", job)
    assert launch(config, {}) == code
    assert json.loads((tmp_path / "one" / "summary.json").read_text())["status"] == written
    assert f"Run {written}" in capsys.readouterr().out


def test_an_earlier_runs_end_is_not_this_runs(tmp_path, monkeypatch):
    config = cpu(run_dir=str(tmp_path), run_name="one", train_data="given")
    folder = open_run_folder(config)
    old = {"kind": "event", "iteration": 0, "status": "finished", "time": "2020-01-01T00:00:00+00:00"}
    lines = [json.dumps(old | {"event": name}) + "\n" for name in ("start", "end")]
    folder.metrics.write_text("".join(lines))
    monkeypatch.setattr("moe_exp.launch.launch.run_job", lambda *_, **__: 3)
    assert launch(config, {}) == 3
    assert not folder.summary.exists()


@pytest.mark.parametrize("train_data", ["given", ""])
def test_embedded_corpus_is_made_only_without_train_data(train_data, tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr("moe_exp.launch.launch.ensure_embedded_corpus", made.append)
    monkeypatch.setattr("moe_exp.launch.launch.run_job", lambda *_, **__: 0)
    launch(cpu(train_data=train_data, data_dir="mine", run_dir=str(tmp_path)), {})
    assert made == ([] if train_data else [Path("mine")])


def test_embedded_corpus_that_cannot_be_made_ends_with_2(tmp_path, monkeypatch, capsys):
    full = Mock(side_effect=ValueError("DATA_DIR=data: has 1 MB free. Fix: free some space."))
    monkeypatch.setattr("moe_exp.launch.launch.ensure_embedded_corpus", full)
    monkeypatch.setattr("moe_exp.launch.launch.check_environment", lambda config: [])
    assert main(["train", "--preset=cpu", f"--run-dir={tmp_path}", "--gpus-per-node=1"]) == 2
    assert capsys.readouterr().err == "moe-exp: DATA_DIR=data: has 1 MB free. Fix: free some space.\n"


# Signals. The launcher is a process of its own, so that Ctrl-C does not reach pytest.

RUN_JOB = """
import os, sys
from moe_exp.config import load_config
from moe_exp.launch import torchrun_job
torchrun_job._STILL_SECONDS = 2.0
sys.exit(torchrun_job.run_job(sys.argv[1:], os.environ, config=load_config()))
"""
LAUNCH = """
import sys
from moe_exp.config import load_config
from moe_exp.launch import launch, torchrun_job
launch.torchrun_command = lambda *given: torchrun_job.torchrun_command(*given, "stand_in")
flags = {"run_dir": sys.argv[1], "train_data": "given", "master_port": sys.argv[2], "topk": "2"}
sys.exit(launch.launch(load_config(flags), flags))
"""


def start(code: str, *args: str, **environ: str) -> subprocess.Popen[str]:
    environ = clean_environ(PRESET="cpu", PYTHONPATH=ROOT) | environ
    options = {"env": environ, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    return subprocess.Popen([sys.executable, "-c", code, *args], **options)


def rank_source(tmp_path: Path) -> str:
    return WORKER.replace("__file__", repr(str(tmp_path / "x"))).replace('["RANK"]', '.get("RANK", "0")')


def test_ctrl_c_lets_the_ranks_save(tmp_path):
    (tmp_path / "stand_in.py").write_text(WORKER)
    port, path = str(free_port()), f"{ROOT}:{tmp_path}"
    launcher = start(LAUNCH, str(tmp_path / "runs"), port, GPUS_PER_NODE="2", PYTHONPATH=path)
    wait_for_files(tmp_path / "args0", tmp_path / "args1")
    os.killpg(launcher.pid, signal.SIGINT)  # what a terminal does
    errors = launcher.communicate(timeout=60)[1]
    assert launcher.returncode == 0, errors
    assert (tmp_path / "saved0").exists() and (tmp_path / "saved1").exists()
    assert re.fullmatch("moe-exp: stopping: the run saves .*; a second Ctrl-C kills it\n", errors)
    assert "--topk=2" in (tmp_path / "args0").read_text().split()
    settings = json.loads((tmp_path / "settings0").read_text())
    assert (settings["topk"], settings["master_port"], settings["preset"]) == (2, int(port), "cpu")


@pytest.mark.parametrize(
    ("number", "passed_on"),
    [
        ("SIGHUP", "SIGTERM"),
        ("SIGUSR1", "SIGUSR1"),
        *(pytest.param(name, name, marks=pytest.mark.slow) for name in ("SIGTERM", "SIGINT")),
    ],
)
def test_first_signal_is_passed_on(tmp_path, number, passed_on):
    source = rank_source(tmp_path)
    launcher = start(RUN_JOB, sys.executable, "-c", STARTER, source, SAVE_AT_END="false")
    wait_for_files(tmp_path / "args0")
    launcher.send_signal(getattr(signal, number))
    errors = launcher.communicate(timeout=30)[1]
    assert launcher.returncode == 0, errors
    assert (tmp_path / "saved0").read_text() == passed_on
    assert "the run ends without a save (SAVE_AT_END=false); a second Ctrl-C" in errors


def test_second_ctrl_c_kills_the_job_and_no_other_signal_does(tmp_path):
    waits = "(here / f'stopping{number}').touch(); time.sleep(60)"
    source = rank_source(tmp_path).replace("time.sleep(0.5)", waits)
    launcher = start(RUN_JOB, sys.executable, "-c", STARTER, source)
    wait_for_files(tmp_path / "args0")
    for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM):
        launcher.send_signal(number)
        wait_for_files(tmp_path / f"stopping{int(number)}")
    assert launcher.poll() is None
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=30)
    assert launcher.returncode == 128 + signal.SIGUSR1
    assert not (tmp_path / "saved0").exists()


def test_exit_code_of_a_rank_that_fails():
    launcher = start(RUN_JOB, sys.executable, "-c", STARTER, "raise SystemExit(7)")
    launcher.communicate(timeout=30)
    assert launcher.returncode == 7


# Stands for an agent that gets stuck, as in a file system that does not answer: it hears no signal.
STUCK = """
import signal, sys, time
from pathlib import Path
from moe_exp.host.exit_codes import RENDEZVOUS_KEY, show_alive
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
Path(sys.argv[1]).touch()
stuck = Path(sys.argv[2])
while not stuck.exists():
    show_alive()
    time.sleep(0.05)
time.sleep(60)
"""


def test_an_agent_that_does_not_move_after_a_signal_is_killed(tmp_path):
    launcher = start(RUN_JOB, sys.executable, "-c", STUCK, str(tmp_path / "up"), str(tmp_path / "stuck"))
    wait_for_files(tmp_path / "up")
    launcher.send_signal(signal.SIGTERM)
    time.sleep(4)
    assert launcher.poll() is None  # its ranks save: it continues looking after them
    (tmp_path / "stuck").touch()
    errors = launcher.communicate(timeout=15)[1]
    assert launcher.returncode == 128 + signal.SIGTERM
    assert "no response from the agent for 2 s" in errors


def test_processes_that_survive_sigkill_are_not_waited_for(monkeypatch, capfd):
    """Those of a killed agent, in a driver or a file system that does not answer."""
    killed, clock = [], iter([0.0, 599.0, 601.0, 629.0, 631.0])
    monkeypatch.setattr("moe_exp.launch.torchrun_job.children_of", lambda pid: [7, 8, 9])
    monkeypatch.setattr("moe_exp.launch.torchrun_job.os.waitpid", lambda pid, _: (9 if pid == 9 else 0, 0))
    monkeypatch.setattr("moe_exp.launch.torchrun_job.kill_job", lambda pids: killed.append(list(pids)))
    monkeypatch.setattr("moe_exp.launch.torchrun_job.time.monotonic", lambda: next(clock))
    monkeypatch.setattr("moe_exp.launch.torchrun_job.time.sleep", lambda seconds: None)
    orphans = torchrun_job._Orphans()
    assert [orphans.are_left(-9, {7}) for _ in range(4)] == [True, True, True, False]
    assert killed == [[8]] * 3
    assert "processes 8 did not end after SIGKILL" in capfd.readouterr().err


def test_nodes_that_come_at_once_share_one_key(tmp_path, monkeypatch):
    path = tmp_path / "run" / ".rendezvous_key"
    with ThreadPoolExecutor(8) as pool:
        keys = set(pool.map(lambda _: shared_key(path), range(64)))
    assert len(keys) == 1 and path.stat().st_mode & 0o777 == 0o600
    assert shared_key(path) in keys  # that of the run, for its next start
    monkeypatch.setattr("moe_exp.launch.torchrun_job._KEY_SECONDS", 0.2)
    path.write_text("")  # it was never written
    with pytest.raises(ValueError, match="key: contains no key"):
        shared_key(path)


@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl")
def test_job_ends_when_the_launcher_is_killed(tmp_path):
    launcher = start(RUN_JOB, sys.executable, "-c", STARTER, rank_source(tmp_path))
    wait_for_files(tmp_path / "args0")
    launcher.kill()
    launcher.communicate(timeout=30)
    wait_for_files(tmp_path / "saved0")


def test_own_command_is_one_that_the_shell_finds(tmp_path, monkeypatch):
    python, script = tmp_path / "bin" / "python", tmp_path / "bin" / "moe-exp"
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("PATH", "")
    assert own_command() == [str(python), "-m", "moe_exp"]
    script.parent.mkdir()
    script.touch(0o755)
    assert own_command() == [str(script)]
    monkeypatch.chdir(tmp_path)
    assert own_command() == ["bin/moe-exp"]
    monkeypatch.setenv("PATH", str(script.parent))
    assert own_command() == ["moe-exp"]


def test_all_nodes_of_a_job_have_the_key_that_they_are_given():
    """Of a preflight node 0's, of a training that in the run folder; one node needs no other."""
    nodes = [cpu(nnodes=2, node_rank=0), cpu(nnodes=2, node_rank=1), cpu(), cpu()]
    *of_two, alone, again = (child_environment(node, "shared")[RENDEZVOUS_KEY] for node in nodes)
    assert of_two == ["shared", "shared"] and len({alone, again, "shared"}) == 3
