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
from helpers.jsonl import BinIdxWriter
from helpers.ranks import free_port
from helpers.whole_runs import SMALL
from moe_exp.config import Config, load_config, to_yaml
from moe_exp.host import devices
from moe_exp.launch import machine_checks
from moe_exp.launch.machine_checks import OLDEST_GPU, check_environment, check_files, check_machine
from moe_exp.layers.kernels import launch
from moe_exp.runs.run_folder import RunFolder


def only_problem(problems: list[str], expected: str) -> None:
    """Exactly one problem, and it begins with `expected`, a regular expression."""
    assert len(problems) == 1, problems
    assert re.match(expected, problems[0]), problems[0]


def write_tokens(prefix: Path, num_documents: int = 100) -> str:
    """Documents of 4 tokens; a sample of the cpu preset has 257."""
    with BinIdxWriter(prefix, vocab_size=4096) as writer:
        for _ in range(num_documents):
            writer.add_document([1, 2, 3])
    return str(prefix)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A Config whose folders are inside an empty folder and whose port is free, on a host without GPUs."""
    monkeypatch.setattr("moe_exp.launch.machine_checks.count_gpus", lambda: 0)
    places = {"run_dir": str(tmp_path / "runs"), "data_dir": str(tmp_path / "data")}

    def config(**values) -> Config:
        given = SMALL | {"gpus_per_node": 1, "master_port": free_port()} | places | values
        return load_config({name: str(value) for name, value in given.items()}, {})

    return config


@pytest.fixture
def host(monkeypatch):
    """Changes what is found on this host: GPUs, and versions of packages by name, None: not installed."""
    find_spec, version = importlib.util.find_spec, importlib.metadata.version

    def change(gpus: int = 0, *, has_cuda=True, capability=(9, 0), **packages: str | None) -> None:
        found = {"count_gpus": gpus, "torch_has_cuda": has_cuda, "compute_capability": capability}
        for name, value in found.items():
            monkeypatch.setattr(machine_checks, name, lambda value=value: value)

        def spec(name):
            return (packages[name] and object()) if name in packages else find_spec(name)

        monkeypatch.setattr("importlib.util.find_spec", spec)
        installed = lambda name: packages.get(name) or version(name)  # noqa: E731
        monkeypatch.setattr("importlib.metadata.version", installed)

    return change


def test_a_model_that_the_gpus_have_no_memory_for(monkeypatch):
    def warnings(**values) -> list[str]:
        return machine_checks.memory_warnings(load_config({"preset": "reference"} | values, {}))

    monkeypatch.setattr(machine_checks, "count_gpus", lambda: 8)
    monkeypatch.setattr(machine_checks, "device_name", lambda: "NVIDIA A100-SXM4-80GB")
    needed = r"GPUS_PER_NODE=1: .* needs [89]\d\.\d GiB of memory, but A100-80GB has 80\.0 GiB\. Fix: use "
    needed += r"more GPUs, .* GRAD_DTYPE=bf16 \(8\.\d GiB less, -\d% time, enough\), OPTIMIZER_STATE_DTYPE"
    only_problem(warnings(gpus_per_node="1"), needed)
    assert warnings(gpus_per_node="8", ep="4") == warnings(gpus_per_node="1", num_layers="6") == []
    monkeypatch.setattr(machine_checks, "device_name", lambda: "some other GPU")
    assert warnings(gpus_per_node="1") == []
    monkeypatch.setattr(machine_checks, "count_gpus", lambda: 0)
    assert warnings(gpus_per_node="1") == []


def test_nothing_is_wrong_and_nothing_is_created(here, tmp_path):
    assert check_environment(here()) == []
    assert list(tmp_path.iterdir()) == []


def test_port_in_use(here):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        line = rf"MASTER_PORT={port}: is in use .* Fix: .*, for instance \d+, or omit MASTER_PORT"
        only_problem(check_machine(here(master_port=port)), line)
        assert check_machine(here(master_port=port, node_rank=1, nnodes=2)) == []
    assert check_machine(here(master_port=port)) == []


@pytest.mark.parametrize(
    ("cuda", "driver", "capability", "text"),
    [
        ("'13.0'", "12.4", (9, 0), "is built for CUDA 13.0, but this host's driver supports only CUDA 12.4"),
        ("'12.8'", "12.4", (7, 0), ""),
        ("'13.0'", "13.0", (7, 0), "is built for CUDA 13.0, which does not support compute capability 7.0"),
        ("'13.0'", "13.1", (7, 5), ""),
        ("None", "12.4", (9, 0), ""),
        ("'13.0'", "", (9, 0), ""),
    ],
)
def test_a_driver_or_gpu_that_is_too_old_for_torch(cuda, driver, capability, text, here, host, monkeypatch):
    monkeypatch.setattr(devices, "_torch_version_file", lambda: f"cuda: Optional[str] = {cuda}\n")
    monkeypatch.setattr(devices, "driver_version", lambda: driver)
    monkeypatch.setattr(devices, "compute_capability", lambda: capability)
    assert devices.cuda_problem() == text
    host(1)
    lines = [line for line in check_machine(here()) if line.startswith("TORCH=")]
    assert [text in line for line in lines] == [True] * bool(text)


def test_torch_knows_whether_it_has_cuda():
    assert devices.torch_has_cuda() == (torch.version.cuda is not None)


NO_CUDA = "requires a CUDA device, but this host has none"
FP8 = {"fp8": "hybrid", "dtype": "bf16", "use_moe": False}


@pytest.mark.parametrize(
    ("found", "values", "expected"),
    [
        ({"gpus": 2}, {"gpus_per_node": 4}, r"GPUS_PER_NODE=4: this host has 2 GPUs\. Fix: set GPUS_PER"),
        ({"gpus": 2}, {"gpus_per_node": 2}, ""),
        ({"gpus": 2, "has_cuda": False}, {"gpus_per_node": 2}, r"TORCH=\S+: is a build without CUDA.* 2 GP"),
        ({"transformer_engine": None}, {"impl": "te"}, "IMPL=te: .* not installed.* set IMPL=local"),
        ({"transformer_engine": None}, FP8, "FP8=hybrid: requires Transformer Engine, which is not"),
        ({"transformer_engine": "2"}, FP8, f"FP8=hybrid: {NO_CUDA}"),
        ({"wandb": None}, {"wandb_project": "x"}, "WANDB_PROJECT=x: .* not installed.* WANDB_MODE=disabled"),
        ({"wandb": None}, {"wandb_project": "x", "wandb_mode": "disabled"}, ""),
        ({"megablocks": None, "grouped_gemm": None}, {"expert_backend": "megablocks", "dtype": "bf16"},
         "EXPERT_BACKEND=megablocks: megablocks and grouped_gemm are not installed"),
        ({"transformer_engine": "2"}, {"expert_backend": "te"}, f"EXPERT_BACKEND=te: {NO_CUDA}"),
        ({"bitsandbytes": None}, {"optimizer": "adam8bit"}, r"OPTIMIZER=adam8bit: .*not installed.*>=0\.50'"),
        ({"bitsandbytes": "0.48.2"}, {"optimizer": "adam8bit"}, r"OPTIMIZER=.* 0\.48\.2 .* a CPU.*>=0\.50'"),
        ({"bitsandbytes": "0.50.0"}, {"optimizer": "adam8bit"}, ""),
        ({}, {"num_workers": 2}, ""),
        # 5 micro-batches of 257 tokens of 8 bytes: 10 TB.
        ({}, {"num_workers": 2, "mbsz": 10**9},
         r"NUM_WORKERS=2: .* 10\.3 TB of shared memory on .*, or start .* with --shm-size=19607544m\."),
        ({}, {"num_workers": 0, "mbsz": 10**9}, ""),
        ({}, {"trace_calls_from": 1}, ""),
        ({}, {"trace_calls_in": "nosuch"}, ""),
        ({}, {"trace_calls_from": 1, "trace_calls_in": "moe_exp,nosuch.x"}, r"TRACE_CALLS_IN=nosuch\.x: "),
        ({"triton": None}, {"expert_backend": "triton", "cross_entropy": "triton"}, ""),  # a CPU has twins
        ({}, {"prometheus_file": "x.txt"}, r"PROMETHEUS_FILE=x.txt: must be a .* Fix: "),
        ({}, {"prometheus_file": "gone/x.prom"}, r"PROMETHEUS_FILE=.* is not a folder\. Fix: "),
        ({}, {"prometheus_file": "x.prom"}, ""),
    ],
)  # fmt: skip
def test_what_this_machine_lacks(found, values, expected, here, host, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    host(**found)
    problems = check_machine(here(**values))
    assert not problems if not expected else only_problem(problems, expected) is None


def test_the_8_bit_kernels_of_a_gpu_are_older(host):
    host(bitsandbytes="0.48.2")
    assert machine_checks.bitsandbytes_problem("GPU") == ""


def test_missing_and_damaged_data(here, tmp_path):
    good, no_index, cut = (write_tokens(tmp_path / name) for name in ("good", "no_index", "cut"))
    Path(f"{no_index}.idx").unlink()
    Path(f"{cut}.bin").write_bytes(b"\0")
    gone = str(tmp_path / "gone")
    assert check_files(here(train_data=good, valid_data=good)) == []
    for train, valid, line in (
        (gone, good, rf"TRAIN_DATA={gone}: not found: .* {gone}\.bin"),
        (good, no_index, rf"VALID_DATA={no_index}: {no_index}\.idx is missing\. Fix: "),
        (f"0.5 {good} 0.5 {cut}", good, rf"TRAIN_DATA={cut}: {cut}\.bin is truncated.* Fix: "),
        ("0.5 a 0.5", "", r"TRAIN_DATA='0\.5 a 0\.5': must be 'PREFIX'.* Fix: "),
    ):
        only_problem(check_files(here(train_data=train, valid_data=valid)), line)


def test_data_smaller_than_a_sample(here, tmp_path):
    large, small = write_tokens(tmp_path / "large", 1000), write_tokens(tmp_path / "small", 64)
    rule = r"has 256 tokens for {}, but a sample needs SEQ_LEN \+ 1 = 257\. Fix: "
    problems = check_files(here(train_data=small, valid_data=large))
    only_problem(problems, rf"TRAIN_DATA={small}: {rule.format('training')}")
    problems = check_files(here(train_data=large, valid_data=small))
    only_problem(problems, rf"VALID_DATA={small}: {rule.format('validation')}")
    assert check_files(here(train_data=large, valid_data=small, seq_len=255)) == []
    assert check_files(here(train_data=large, valid_data=small, eval_interval=0)) == []


@pytest.mark.parametrize("data_order", ["stream", "megatron"])
def test_part_smaller_than_a_sample(here, tmp_path, data_order):
    data = {"train_data": write_tokens(tmp_path / "data", 1000), "data_order": data_order}
    assert check_files(here(split="93,7", **data)) == []
    expected = r"TRAIN_DATA=.*/data: has 240 tokens for validation with SPLIT=94,6, .* = 257\. "
    only_problem(check_files(here(split="94,6", **data)), expected)
    assert check_files(here(split="94,6", eval_interval=0, **data)) == []
    only_problem(check_files(here(split="1,15", **data)), r".*: has 248 tokens for training with SPLIT=1,15")


def test_ids_beyond_the_vocabulary(here, tmp_path):
    prefix = write_tokens(tmp_path / "data")
    data, manifest = {"train_data": prefix, "eval_interval": 0}, tmp_path / "data.manifest.json"
    for content in ('{"vocab_size": 5000}', '{"settings": {"tokenizer": {"vocab_size": 5000}}}'):
        manifest.write_text(content)
        rule = rf"TRAIN_DATA={prefix}: .* 5000 tokens, more than VOCAB_SIZE=4096\. .* at least 5000\."
        only_problem(check_files(here(**data)), rule)
        assert check_files(here(vocab_size=5000, **data)) == []
    manifest.write_text('{"stage": "another"}')
    assert check_files(here(**data)) == []


def test_tokenizer(here, tmp_path):
    file = tmp_path / "tokenizer.json"
    Tokenizer(models.WordLevel({f"t{i}": i for i in range(5000)}, unk_token="t0")).save(str(file))
    with BinIdxWriter(tmp_path / "tokens", vocab_size=4096) as writer:
        writer.add_document(range(3000))
    data = {"train_data": str(tmp_path / "tokens"), "eval_interval": 0}
    rule = r"has 5000 tokens, more than VOCAB_SIZE=4096\. Fix: "
    for place in (file, tmp_path):
        only_problem(check_files(here(tokenizer=place, **data)), f"TOKENIZER={place}: {rule}set VOCAB_SIZE")
    assert check_files(here(tokenizer=file, vocab_size=5000, **data)) == []
    write_without_tensors(tmp_path / "iter_0000000")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("0")
    loaded = here(tokenizer=file, load_dir=tmp_path, **data)  # whose VOCAB_SIZE cannot change
    only_problem(check_files(loaded), f"TOKENIZER={file}: {rule}use the checkpoint's own tokenizer")
    rule = "cannot be compared with the embedded corpus's tokenizer"
    only_problem(check_files(here(tokenizer=file, vocab_size=5000)), f"TOKENIZER={file}: {rule}")
    only_problem(check_files(here(tokenizer=tmp_path / "x")), r"TOKENIZER=.*/x: not found\. Fix: ")
    file.write_text("{}")
    only_problem(check_files(here(tokenizer=file, **data)), f"TOKENIZER={file}: is not a Hugging Face ")


def test_run_folder_of_another_model(here):
    config = here(run_name="one")
    RunFolder.of(config).path.mkdir(parents=True)
    RunFolder.of(config).config.write_text(to_yaml(config))
    assert check_files(config) == []
    problems = check_files(here(run_name="one", hidden_size=256, head_dim=32))
    only_problem(problems, r"HIDDEN_SIZE=256: .*/one contains a model with HIDDEN_SIZE=128\. Fix: ")


@pytest.mark.parametrize(
    ("name", "rule"),
    [("x/" * 2000, "the path of the run folder has "), ("x" * 5000, "must have at most 255 bytes")],
)
def test_a_run_name_that_is_too_long(name, rule, here):
    only_problem(check_files(here(run_name=name)), f"RUN_NAME=x.*{rule}")


def test_read_only_folders(here, monkeypatch, tmp_path):
    # Permission bits do not stop root, who may be running this.
    prefix = write_tokens(tmp_path / "tokens")
    monkeypatch.setattr("os.access", lambda path, mode: mode == 0 and Path(path).exists())
    for data in ({}, {"train_data": prefix, "valid_data": prefix, "data_order": "megatron"}):
        of_data, of_runs = check_files(here(**data))
        for name, line in (("DATA_DIR", of_data), ("RUN_DIR", of_runs)):
            assert re.match(rf"{name}=.*: .*{tmp_path} is not writable\. Fix: ", line)
    made = tmp_path / "data" / "python_3_torch_2_bpe2048"  # a corpus that is there
    made.mkdir(parents=True)
    (made / "manifest.json").touch()
    assert [line.partition("=")[0] for line in check_files(here())] == ["RUN_DIR"]


def test_data_dir_is_a_file(here, tmp_path):
    (tmp_path / "data").touch()
    only_problem(check_files(here()), r"DATA_DIR=.*/data is a file\. Fix: ")


def test_no_space_for_checkpoints(here, monkeypatch):
    usage = shutil.disk_usage("/")._replace(free=10**6)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    only_problem(
        check_files(here()), r"RUN_DIR=.* 1 MB free, .* needs 216 MB to reach iteration 300: 3 .* Fix: "
    )
    assert check_files(here(save_at_end=False, save_interval=0)) == []


def test_load_dir_is_missing(here, tmp_path):
    for folder in (tmp_path / "x", tmp_path):
        rule = rf"LOAD_DIR={folder}: .*latest_checkpointed_iteration\.txt not found\)\. Fix: "
        only_problem(check_files(here(load_dir=folder)), rule)
    for place in (tmp_path / "a", tmp_path / "b" / "checkpoints"):
        place.mkdir(parents=True)
        (place / "latest_checkpointed_iteration.txt").write_text("10")
        write_without_tensors(place / "iter_0000010")
    write_without_tensors(tmp_path / "c")
    for name in ("a", "b", "c"):
        assert check_files(here(load_dir=tmp_path / name)) == []
    (tmp_path / "c" / "common.pt").unlink()
    problems = check_files(here(load_dir=tmp_path / "c"))
    only_problem(problems, r".*no checkpoint can be used, .*/c/common\.pt: cannot be used")


@pytest.mark.parametrize(
    ("triton", "capability", "fix"),
    [
        (None, (9, 0), "pip install triton, or "),
        ("3.3.1", (9, 0), "install a newer torch, or "),
        ("3.4", (7, 5), ""),
        ("3.4", OLDEST_GPU, None),
    ],
)
def test_what_the_kernels_need_on_a_gpu(triton, capability, fix, here, host, monkeypatch):
    """The words are those that the layer would use, rank by rank, when the model is built."""
    host(8, capability=capability, triton=triton)
    monkeypatch.setattr(launch, "triton", object() if triton == "3.4" else None)
    monkeypatch.setattr(launch.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(launch.torch.cuda, "get_device_capability", lambda: capability)
    assert launch.OLDEST_GPU == OLDEST_GPU
    names = [] if fix is None else ["EXPERT_BACKEND", "CROSS_ENTROPY"]
    assert bool(launch.missing()) == bool(names)
    assert check_machine(here(expert_backend="triton", cross_entropy="triton")) == [
        f"{name}=triton: {launch.missing()}. Fix: {fix}set {name}=auto." for name in names
    ]
    assert check_machine(here()) == []


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
