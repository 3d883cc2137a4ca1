from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, models

from helpers.checkpoint.ckpt_files import write_without_tensors
from helpers.whole_runs import SMALL
from moe_exp.config import Config, load_config, to_yaml
from moe_exp.data.tokens.tokens import BinIdxWriter
from moe_exp.host import devices
from moe_exp.launch import room
from moe_exp.launch.machine_checks import (
    OLDEST_GPU,
    bitsandbytes_problem,
    check_environment,
    check_files,
    check_machine,
)
from moe_exp.layers.kernels import launch
from moe_exp.runs.run_folder import RunFolder


def cpu(**values) -> Config:
    return load_config(SMALL | {"gpus_per_node": 1} | values, {})


def only_problem(problems: list[str], expected: str) -> None:
    """Exactly one problem, and it is `expected`, a regular expression for the whole line."""
    assert len(problems) == 1, problems
    assert re.fullmatch(expected, problems[0]), problems[0]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A Config whose folders are inside an empty folder and whose port is free, on a host without GPUs."""
    monkeypatch.setattr("moe_exp.launch.machine_checks.count_gpus", lambda: 0)
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]

    def config(**values) -> Config:
        return cpu(
            **(
                {"master_port": port, "run_dir": str(tmp_path / "runs"), "data_dir": str(tmp_path / "data")}
                | values
            )
        )

    return config


def test_a_model_that_the_gpus_have_no_memory_for(monkeypatch):
    def warnings(**values) -> list[str]:
        return room.memory_warnings(load_config({"preset": "reference"} | values, {}))

    monkeypatch.setattr(room, "count_gpus", lambda: 8)
    monkeypatch.setattr(room, "device_name", lambda: "NVIDIA A100-SXM4-80GB")
    only_problem(
        warnings(gpus_per_node="1"),
        r"GPUS_PER_NODE=1: the planner expects that a rank needs (8|9)\d\.\d GiB, and A100-80GB has"
        r" 80\.0 GiB\. Fix: use more GPUs, .*",
    )
    assert warnings(gpus_per_node="8", ep="4") == warnings(gpus_per_node="1", num_layers="6") == []
    monkeypatch.setattr(room, "device_name", lambda: "some other GPU")
    assert warnings(gpus_per_node="1") == []
    monkeypatch.setattr(room, "count_gpus", lambda: 0)
    assert warnings(gpus_per_node="1") == []


def write_tokens(prefix: Path, num_documents: int = 100) -> str:
    """Documents of 4 tokens; a sample of the cpu preset has 257."""
    with BinIdxWriter(prefix, vocab_size=4096) as writer:
        for _ in range(num_documents):
            writer.add_document([1, 2, 3])
    return str(prefix)


def test_nothing_is_wrong_and_nothing_is_created(here, tmp_path):
    assert check_environment(here()) == []
    assert list(tmp_path.iterdir()) == []


def test_port_in_use(here):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        line = (
            rf"MASTER_PORT={port}: is in use by another program on this host\. Fix: set MASTER_PORT to a free"
            r" port, for instance \d+, or leave it out: one node takes a free one\."
        )
        only_problem(check_machine(here(master_port=port)), line)
        assert check_machine(here(master_port=port, node_rank=1, nnodes=2)) == []
    assert check_machine(here(master_port=port)) == []


def test_more_ranks_than_gpus(here, monkeypatch):
    monkeypatch.setattr("moe_exp.launch.machine_checks.count_gpus", lambda: 2)
    monkeypatch.setattr("moe_exp.launch.machine_checks.torch_has_cuda", lambda: True)
    only_problem(
        check_machine(here(gpus_per_node=4)),
        r"GPUS_PER_NODE=4: this host has 2 GPUs\. Fix: set GPUS_PER_NODE to at most 2, .*",
    )
    assert check_machine(here(gpus_per_node=2)) == []


@pytest.mark.parametrize(
    ("cuda", "driver", "capability", "text"),
    [
        ("'13.0'", "12.4", (9, 0), "is built for CUDA 13.0, and this host's driver supports CUDA 12.4"),
        ("'12.8'", "12.4", (7, 0), ""),
        ("'13.0'", "13.0", (7, 0), "is built for CUDA 13.0, which has no code for compute capability 7.0"),
        ("'13.0'", "13.1", (7, 5), ""),
        ("None", "12.4", (9, 0), ""),
        ("'13.0'", "", (9, 0), ""),
    ],
)
def test_a_driver_or_gpu_that_is_too_old_for_torch(cuda, driver, capability, text, here, monkeypatch):
    monkeypatch.setattr(devices, "_torch_version_file", lambda: f"cuda: Optional[str] = {cuda}\n")
    monkeypatch.setattr(devices, "driver_version", lambda: driver)
    monkeypatch.setattr(devices, "compute_capability", lambda: capability)
    assert devices.cuda_problem() == text
    monkeypatch.setattr("moe_exp.launch.machine_checks.count_gpus", lambda: 1)
    monkeypatch.setattr("moe_exp.launch.machine_checks.torch_has_cuda", lambda: True)
    lines = [line for line in check_machine(here()) if line.startswith("TORCH=")]
    assert [text in line for line in lines] == [True] * bool(text)


def test_torch_without_cuda_beside_gpus(here, monkeypatch):
    assert devices.torch_has_cuda() == (torch.version.cuda is not None)
    monkeypatch.setattr("moe_exp.launch.machine_checks.count_gpus", lambda: 2)
    monkeypatch.setattr("moe_exp.launch.machine_checks.torch_has_cuda", lambda: False)
    only_problem(
        check_machine(here(gpus_per_node=2)),
        r"TORCH=\S+: is a build without CUDA, and this host has 2 GPUs\. Fix: install torch with CUDA, or set"
        r" CUDA_VISIBLE_DEVICES= to run on the CPU\.",
    )


@pytest.mark.parametrize(
    ("values", "package", "expected"),
    [
        (
            {"impl": "te"},
            "transformer_engine",
            r"IMPL=te: transformer_engine is not installed\. Fix: .* set IMPL=local\.",
        ),
        (
            {"wandb_project": "x"},
            "wandb",
            r"WANDB_PROJECT=x: wandb is not installed\. Fix: .* set WANDB_MODE=disabled\.",
        ),
        ({"wandb_project": "x", "wandb_mode": "disabled"}, "wandb", None),
    ],
)
def test_missing_packages(here, monkeypatch, values, package, expected):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == package else object())
    problems = check_machine(here(**values))
    assert problems == [] if expected is None else only_problem(problems, expected) is None


def test_a_file_for_prometheus_that_its_collector_would_not_read(here, tmp_path):
    rules = {"x.txt": "must be a file", "gone/x.prom": "is no folder", "x.prom": ""}
    for name, rule in rules.items():
        problems = check_machine(here(prometheus_file=str(tmp_path / name)))
        assert (
            problems == []
            if not rule
            else only_problem(
                problems, rf"PROMETHEUS_FILE=.* {rule}.* Fix: name a file such as NAME\.prom .*"
            )
            is None
        )


def test_missing_and_damaged_data(here, tmp_path):
    good, no_index, cut = (write_tokens(tmp_path / name) for name in ("good", "no_index", "cut"))
    Path(f"{no_index}.idx").unlink()
    Path(f"{cut}.bin").write_bytes(b"\0")
    gone = str(tmp_path / "gone")
    assert check_files(here(train_data=good, valid_data=good)) == []
    only_problem(
        check_files(here(train_data=gone, valid_data=good)),
        rf"TRAIN_DATA={gone}: there is no such file or folder of text, .* {gone}\.bin and \.idx\. Fix: .*",
    )
    only_problem(
        check_files(here(train_data=good, valid_data=no_index)),
        rf"VALID_DATA={no_index}: {no_index}\.idx is missing\. Fix: .*",
    )
    only_problem(
        check_files(here(train_data=f"0.5 {good} 0.5 {cut}", valid_data=good)),
        rf"TRAIN_DATA={cut}: {cut}\.bin is truncated.* Fix: .*",
    )


def test_data_smaller_than_a_sample(here, tmp_path):
    large, small = write_tokens(tmp_path / "large", 1000), write_tokens(tmp_path / "small", 64)
    rule = (
        r"has 256 tokens for {}, one sample needs SEQ_LEN \+ 1 = 257\. Fix: use more data or a smaller"
        r" SEQ_LEN\."
    )
    only_problem(
        check_files(here(train_data=small, valid_data=large)),
        rf"TRAIN_DATA={small}: {rule.format('training')}",
    )
    only_problem(
        check_files(here(train_data=large, valid_data=small)),
        rf"VALID_DATA={small}: {rule.format('validation')}",
    )
    assert check_files(here(train_data=large, valid_data=small, seq_len=255)) == []
    assert check_files(here(train_data=large, valid_data=small, eval_interval=0)) == []


@pytest.mark.parametrize("data_order", ["stream", "megatron"])
def test_part_smaller_than_a_sample(here, tmp_path, data_order):
    data = {"train_data": write_tokens(tmp_path / "data", 1000), "data_order": data_order}
    assert check_files(here(split="93,7", **data)) == []
    expected = (
        r"TRAIN_DATA=.*/data: has 240 tokens for validation by SPLIT=94,6, one sample needs .* = 257\. Fix:"
        r" .* another SPLIT\."
    )
    only_problem(check_files(here(split="94,6", **data)), expected)
    assert check_files(here(split="94,6", eval_interval=0, **data)) == []
    only_problem(
        check_files(here(split="1,15", **data)),
        r"TRAIN_DATA=.*/data: has 248 tokens for training by SPLIT=1,15, .*",
    )


def test_ids_beyond_the_vocabulary(here, tmp_path):
    prefix = write_tokens(tmp_path / "data")
    manifest = tmp_path / "data.manifest.json"
    for content in ('{"vocab_size": 5000}', '{"settings": {"tokenizer": {"vocab_size": 5000}}}'):
        manifest.write_text(content)
        rule = (
            r"was tokenized with 5000 tokens, more than VOCAB_SIZE=4096\. Fix: set VOCAB_SIZE to at least"
            r" 5000\."
        )
        only_problem(check_files(here(train_data=prefix, eval_interval=0)), rf"TRAIN_DATA={prefix}: {rule}")
        assert check_files(here(train_data=prefix, eval_interval=0, vocab_size=5000)) == []
    manifest.write_text('{"stage": "another"}')
    assert check_files(here(train_data=prefix, eval_interval=0)) == []


def test_shared_memory(here):
    assert check_machine(here(num_workers=2)) == []
    # 5 micro-batches of 257 tokens of 8 bytes: 10 TB.
    expected = (
        r"NUM_WORKERS=2: its batches need 10\.3 TB of shared memory on this node, /dev/shm has [\d.]+"
        r" [MGT]B\. Fix: "
    )
    expected += r"set NUM_WORKERS=0, or start the container with --shm-size=19607544m\."
    only_problem(check_machine(here(num_workers=2, mbsz=10**9)), expected)
    assert check_machine(here(num_workers=0, mbsz=10**9)) == []


def test_modules_whose_calls_are_traced(here):
    assert check_machine(here(trace_calls_from=1)) == check_machine(here(trace_calls_in="nosuch")) == []
    expected = (
        r"TRACE_CALLS_IN=nosuch\.x: no package of that name is installed\. Fix: name packages or modules,"
        r" with commas\."
    )
    only_problem(check_machine(here(trace_calls_from=1, trace_calls_in="moe_exp,nosuch.x")), expected)


def test_blend_that_cannot_be_read(here):
    only_problem(
        check_files(here(train_data="0.5 a 0.5")), r"TRAIN_DATA='0\.5 a 0\.5': must be 'PREFIX'.* Fix: .*"
    )


def test_tokenizer(here, tmp_path):
    file = tmp_path / "tokenizer.json"
    Tokenizer(models.WordLevel({f"t{i}": i for i in range(5000)}, unk_token="t0")).save(str(file))
    with BinIdxWriter(tmp_path / "tokens", vocab_size=4096) as writer:
        writer.add_document(range(3000))
    data = {"train_data": str(tmp_path / "tokens"), "eval_interval": 0}
    rule = r"has 5000 tokens, more than VOCAB_SIZE=4096\. Fix: set VOCAB_SIZE to at least 5000\."
    only_problem(check_files(here(tokenizer=str(file), **data)), rf"TOKENIZER={file}: {rule}")
    only_problem(check_files(here(tokenizer=str(tmp_path), **data)), rf"TOKENIZER={tmp_path}: {rule}")
    assert check_files(here(tokenizer=str(file), vocab_size=5000, **data)) == []
    write_without_tensors(tmp_path / "iter_0000000")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("0")
    loaded = here(tokenizer=str(file), load_dir=str(tmp_path), **data)  # whose VOCAB_SIZE cannot change
    rule = r"has 5000 tokens, more than VOCAB_SIZE=4096\. Fix: use the tokenizer that the checkpoint .*"
    only_problem(check_files(loaded), rf"TOKENIZER={file}: {rule}")
    rule = r"cannot be compared with that of the embedded corpus \(TRAIN_DATA is empty\), not made yet"
    only_problem(
        check_files(here(tokenizer=str(file), vocab_size=5000)), rf"TOKENIZER={file}: {rule}\. Fix: .*"
    )
    missing = tmp_path / "x"
    only_problem(check_files(here(tokenizer=str(missing))), rf"TOKENIZER={missing}: does not exist\. Fix: .*")
    file.write_text("{}")
    only_problem(
        check_files(here(tokenizer=str(file), **data)),
        rf"TOKENIZER={file}: is not a Hugging Face tokenizer\.json .* Fix: .*",
    )


def test_run_folder_of_another_model(here):
    config = here(run_name="one")
    RunFolder.of(config).path.mkdir(parents=True)
    RunFolder.of(config).config.write_text(to_yaml(config))
    assert check_files(config) == []
    other = here(run_name="one", hidden_size=256, head_dim=32)
    only_problem(
        check_files(other),
        r"HIDDEN_SIZE=256: .*/one holds a model with HIDDEN_SIZE=128\. Fix: give another RUN_NAME .*",
    )


def test_read_only_folders(here, monkeypatch, tmp_path):
    # Permission bits do not stop root, who may be running this.
    prefix = write_tokens(tmp_path / "tokens")
    monkeypatch.setattr("os.access", lambda path, mode: mode == 0 and Path(path).exists())
    for data in ({}, {"train_data": prefix, "valid_data": prefix, "data_order": "megatron"}):
        problems = check_files(here(**data))
        assert [line.partition(":")[0] for line in problems] == [
            f"DATA_DIR={tmp_path}/data",
            f"RUN_DIR={tmp_path}/runs",
        ]
        assert [f"{tmp_path} is not writable. Fix: " in line for line in problems] == [True, True], problems


def test_corpus_that_is_there_may_be_read_only(here, monkeypatch, tmp_path):
    made = tmp_path / "data" / "python_3_torch_2_bpe2048"
    made.mkdir(parents=True)
    (made / "manifest.json").touch()
    monkeypatch.setattr("os.access", lambda path, mode: mode == 0 and Path(path).exists())
    assert [line.partition("=")[0] for line in check_files(here())] == ["RUN_DIR"]


def test_data_dir_is_a_file(here, tmp_path):
    (tmp_path / "data").touch()
    only_problem(
        check_files(here()),
        rf"DATA_DIR={tmp_path}/data: .* {tmp_path}/data is a file\. Fix: set DATA_DIR to .*",
    )


def test_no_space_for_checkpoints(here, monkeypatch):
    usage = shutil.disk_usage("/")._replace(free=10**6)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    only_problem(
        check_files(here()),
        r"RUN_DIR=.* has 1 MB free and the run needs 216 MB until iteration 300: 3 .* Fix: choose .*",
    )
    assert check_files(here(save_at_end=False, save_interval=0)) == []


def test_load_dir_is_missing(here, tmp_path):
    for folder in (tmp_path / "x", tmp_path):
        rule = r"is not a folder with checkpoints, it has no latest_checkpointed_iteration\.txt"
        only_problem(check_files(here(load_dir=str(folder))), rf"LOAD_DIR={folder}: {rule}\. Fix: .*")
    for place in (tmp_path / "a", tmp_path / "b" / "checkpoints"):
        place.mkdir(parents=True)
        (place / "latest_checkpointed_iteration.txt").write_text("10")
        write_without_tensors(place / "iter_0000010")
    write_without_tensors(tmp_path / "c")
    for name in ("a", "b", "c"):
        assert check_files(here(load_dir=str(tmp_path / name))) == []
    (tmp_path / "c" / "common.pt").unlink()
    only_problem(
        check_files(here(load_dir=str(tmp_path / "c"))),
        r".*none can be used, .*/c/common\.pt: cannot be used.*",
    )


def test_an_expert_backend_whose_package_is_missing(here):
    expected = (
        r"EXPERT_BACKEND=megablocks: megablocks and grouped_gemm are not installed\. Fix: pip .*, or set"
        r" EXPERT_BACKEND=auto\."
    )
    only_problem(check_machine(here(expert_backend="megablocks", dtype="bf16")), expected)


def test_an_expert_backend_that_needs_a_gpu(here, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    expected = r"EXPERT_BACKEND=te: needs a CUDA device, this host has none\. Fix: set EXPERT_BACKEND=auto\."
    only_problem(check_machine(here(expert_backend="te")), expected)


def test_the_kernels_want_triton_on_a_gpu(here, monkeypatch):
    config, find_spec = here(expert_backend="triton", cross_entropy="triton"), importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "triton" else find_spec(name)
    )
    assert check_machine(config) == []  # a CPU takes their twins
    monkeypatch.setattr("moe_exp.launch.machine_checks.count_gpus", lambda: 8)
    monkeypatch.setattr("moe_exp.launch.machine_checks.torch_has_cuda", lambda: True)
    monkeypatch.setattr(launch, "triton", None)
    assert check_machine(config) == [
        f"EXPERT_BACKEND=triton: {launch.missing()}. Fix: pip install triton, or set EXPERT_BACKEND=auto.",
        f"CROSS_ENTROPY=triton: {launch.missing()}. Fix: pip install triton, or set CROSS_ENTROPY=auto.",
    ]
    assert check_machine(here()) == []


def test_the_kernels_want_a_triton_with_descriptors(here, monkeypatch):
    find_spec, version = importlib.util.find_spec, importlib.metadata.version
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: object() if name == "triton" else find_spec(name)
    )
    monkeypatch.setattr(
        "importlib.metadata.version", lambda name: "3.3.1" if name == "triton" else version(name)
    )
    for name, value in (("count_gpus", 8), ("torch_has_cuda", True), ("compute_capability", (9, 0))):
        monkeypatch.setattr(f"moe_exp.launch.machine_checks.{name}", lambda value=value: value)
    monkeypatch.setattr(launch, "triton", None)
    assert launch.missing() == "the kernels need triton 3.4 or newer"
    fix = "Fix: install a newer torch, or set EXPERT_BACKEND=auto."
    assert check_machine(here(expert_backend="triton")) == [
        f"EXPERT_BACKEND=triton: {launch.missing()}. {fix}"
    ]


def test_the_kernels_want_a_gpu_of_today(here, monkeypatch):
    """The words are those that the layer would use, rank by rank, when the model is built."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: object() if name == "triton" else find_spec(name)
    )
    monkeypatch.setattr("moe_exp.launch.machine_checks.count_gpus", lambda: 8)
    monkeypatch.setattr("moe_exp.launch.machine_checks.torch_has_cuda", lambda: True)
    monkeypatch.setattr("moe_exp.launch.machine_checks.compute_capability", lambda: (7, 5))
    monkeypatch.setattr(launch, "triton", object())
    monkeypatch.setattr(launch.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(launch.torch.cuda, "get_device_capability", lambda: (7, 5))
    assert launch.OLDEST_GPU == OLDEST_GPU
    for name in ("expert_backend", "cross_entropy"):
        expected = f"{name.upper()}=triton: {launch.missing()}. Fix: set {name.upper()}=auto."
        assert check_machine(here(**{name: "triton"})) == [expected]
    monkeypatch.setattr("moe_exp.launch.machine_checks.compute_capability", lambda: OLDEST_GPU)
    monkeypatch.setattr(launch.torch.cuda, "get_device_capability", lambda: OLDEST_GPU)
    assert launch.missing() == ""
    assert check_machine(here(expert_backend="triton", cross_entropy="triton")) == []


def test_the_capability_is_that_of_the_oldest_gpu(monkeypatch):
    found = [(9, 0), (7, 5), (8, 6)]

    def attribute(number, name, device):
        number._obj.value = found[device.value][name - 75]
        return 0

    def get(device, index):
        device._obj.value = index
        return 0

    driver = SimpleNamespace(cuDeviceGet=get, cuDeviceGetAttribute=attribute)
    monkeypatch.setattr(devices.ctypes, "CDLL", lambda name: driver)
    for number, oldest in ((0, (0, 0)), (1, (9, 0)), (3, (7, 5))):
        monkeypatch.setattr(devices, "count_gpus", lambda number=number: number)
        assert devices.compute_capability.__wrapped__() == oldest


def test_the_driver_says_which_cuda_it_supports(monkeypatch):
    def get(version):
        version._obj.value = 12080
        return 0

    monkeypatch.setattr(devices.ctypes, "CDLL", lambda name: SimpleNamespace(cuDriverGetVersion=get))
    assert devices.driver_version() == "12.8"

    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(devices.ctypes, "CDLL", missing)
    assert devices.driver_version() == ""


def test_an_8_bit_optimizer_whose_package_is_missing_or_too_old(here, monkeypatch):
    config, find_spec, version = (
        here(optimizer="adam8bit"),
        importlib.util.find_spec,
        importlib.metadata.version,
    )
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "bitsandbytes" else find_spec(name)
    )
    expected = (
        r"OPTIMIZER=adam8bit: bitsandbytes is not installed\. Fix: pip install 'bitsandbytes>=0\.50', or set"
        r" OPTIMIZER=adam\."
    )
    only_problem(check_machine(config), expected)
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: object() if name == "bitsandbytes" else find_spec(name)
    )
    monkeypatch.setattr(
        "importlib.metadata.version", lambda name: "0.48.2" if name == "bitsandbytes" else version(name)
    )
    expected = (
        r"OPTIMIZER=adam8bit: bitsandbytes 0\.48\.2 has no 8-bit kernels for a CPU\. Fix: pip .*>=0\.50', or"
        r" set OPTIMIZER=adam\."
    )
    only_problem(check_machine(config), expected)
    assert bitsandbytes_problem("GPU") == ""
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.50.0")
    assert check_machine(config) == []
