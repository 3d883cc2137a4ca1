"""How the fastest config is found and who takes it: interpreted kernels with times that the test makes up."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import pytest
import torch

from helpers.layers.backward_cases import drawn, offsets_of
from helpers.relative_error import relative_error

pytest.importorskip("triton")
from triton.tools.tensor_descriptor import TensorDescriptor

from moe_exp.layers.kernels import (
    activation_grad,
    combine,
    grouped_matmul,
    launch,
    tuning,
    up_projection,
    weight_grad,
)

pytestmark = pytest.mark.skipif(not launch.INTERPRETED, reason="needs Triton's interpreter")
TUNED = [activation_grad, combine, grouped_matmul, up_projection, weight_grad]


class Stopwatch:
    """In the place of the benchmark: launches each config twice; each is faster than the one before."""

    def __init__(self) -> None:
        self.num_timed = 0
        self.launched: list[dict[str, int]] = []

    def __call__(self, run_once):
        for _ in range(2):
            run_once()
            self.after_trial()
        self.num_timed += 1
        return 1 / self.num_timed

    def after_trial(self) -> None:
        pass


@pytest.fixture
def stopwatch(monkeypatch):
    """A function that gives the kernel of a module all of its configs and a stopwatch."""

    def attach(module: ModuleType) -> Stopwatch:
        watch, kernel = Stopwatch(), module._kernel
        configs = [tuning.make_config(config) for config in module.CONFIGS]
        fresh = {"configs": configs, "choices": {}, "_dropped": [], "_warned": [], "is_decided": False}
        for name, value in fresh.items():
            monkeypatch.setattr(kernel, name, value)
        monkeypatch.setattr(tuning, "milliseconds", watch)
        run = kernel.fn.run

        def launched(*args, **kwargs):
            watch.launched.append(kwargs)
            return run(*args, **kwargs)

        monkeypatch.setattr(kernel.fn, "run", launched)
        return watch

    return attach


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def warps(module: ModuleType) -> list[int]:
    return [config["num_warps"] for config in module.CONFIGS]


def combined(num_tokens: int, width: int = 8) -> torch.Tensor:
    row_TK = torch.arange(2 * num_tokens, dtype=torch.int32).view(-1, 2)
    return combine.combine(torch.ones(2 * num_tokens, width), row_TK)


def test_the_fastest_is_taken_and_timed_once(stopwatch):
    watch = stopwatch(combine)
    combined(3)
    assert watch.num_timed == len(combine.CONFIGS)
    assert watch.launched[-1]["num_warps"] == warps(combine)[-1] != warps(combine)[0]
    combined(5)
    assert watch.num_timed == len(combine.CONFIGS)


def test_deterministic_algorithms_take_the_first_whenever_they_are_asked_for(stopwatch):
    watch = stopwatch(combine)
    with deterministic():
        combined(3)
    assert watch.num_timed == 0
    combined(3)
    assert watch.num_timed == len(combine.CONFIGS)
    with deterministic():
        combined(3)
    combined(3)
    # Asked for before the configs were timed and after; and what was found is not forgotten.
    first, *_, again, fastest = (launched["num_warps"] for launched in watch.launched)
    assert [first, again, fastest] == [warps(combine)[0], warps(combine)[0], warps(combine)[-1]]
    assert watch.num_timed == len(combine.CONFIGS)


def test_few_rows_do_not_choose_for_many(stopwatch):
    watch = stopwatch(combine)
    for num_tokens, num_classes in ((1, 1), (63, 1), (64, 2), (100, 2), (3, 2)):
        combined(num_tokens)
        assert watch.num_timed == num_classes * len(combine.CONFIGS)


@pytest.mark.parametrize("module", TUNED)
def test_every_kernel_knows_how_many_rows_there_are(module):
    assert "rows_class" in dict(module._kernel._of_key)


def test_classes_of_rows():
    assert [tuning.rows_class(rows, 8) for rows in (0, 511, 512, 4095, 4096, 10**6)] == [0, 0, 1, 1, 2, 2]
    assert [tuning.rows_class(rows) for rows in (1, 64, 512)] == [0, 1, 2]


def test_a_config_with_descriptors_only_where_there_are_some(stopwatch):
    """Operands of the same shape, first at a multiple of 16 bytes and then not."""
    watch, ((x_RI, *others), expected) = stopwatch(grouped_matmul), product()
    grouped_matmul.grouped_matmul(x_RI, *others)
    assert watch.launched[-1]["TMA"] == 1
    shifted = x_RI.new_empty(9 * 32 + 1)[1:].view(9, 32).copy_(x_RI)
    assert launch.descriptors(shifted) == (None,)
    y_RO = grouped_matmul.grouped_matmul(shifted, *others)
    assert watch.launched[-1]["TMA"] == 0
    assert relative_error(y_RO, expected) < 1e-3


def failing(monkeypatch, is_failing, error):
    """Launches of grouped_matmul fail where `is_failing(args, kwargs)` says so."""
    run = grouped_matmul._kernel.fn.run

    def launched(*args, **kwargs):
        if is_failing(args, kwargs):
            raise error
        return run(*args, **kwargs)

    monkeypatch.setattr(grouped_matmul._kernel.fn, "run", launched)


def product():
    """x, w and offsets of two experts, and what a grouped matmul makes of them."""
    x_RI, w_LIO = drawn(9, 32, dtype=torch.float16, seed=1), drawn(2, 32, 32, dtype=torch.float16, seed=2)
    return (x_RI, w_LIO, offsets_of((4, 5))), torch.cat([x_RI[:4] @ w_LIO[0], x_RI[4:] @ w_LIO[1]])


def by_descriptor(args, kwargs):
    return kwargs["TMA"]


def with_descriptors(args, kwargs):
    """The driver encodes every descriptor of a launch, used or not."""
    return any(isinstance(x, TensorDescriptor) for x in args)


FAILURES = [
    (by_descriptor, RuntimeError("PassManager::run failed")),
    (by_descriptor, RuntimeError("Triton Error [CUDA]: invalid argument")),
    (by_descriptor, launch.triton.OutOfResources(300_000, 232_448, "shared memory")),
    (by_descriptor, ValueError("strides must be 16-byte aligned")),
    pytest.param(with_descriptors, RuntimeError("failed to create tensor map"), id="not encoded"),
]


@pytest.mark.parametrize(("is_failing", "failure"), FAILURES)
def test_a_config_that_fails_is_not_used_and_named_once(stopwatch, monkeypatch, caplog, is_failing, failure):
    """All with descriptors: those without are left."""
    watch, (operands, expected) = stopwatch(grouped_matmul), product()
    failing(monkeypatch, is_failing, failure)
    for _ in range(2):
        y_RO = grouped_matmul.grouped_matmul(*operands)
        assert relative_error(y_RO, expected) < 1e-3
        assert watch.launched[-1]["TMA"] == 0
    num_failing = sum(config["TMA"] for config in grouped_matmul.CONFIGS)
    assert len(caplog.records) == num_failing > 1
    for record in caplog.records:
        assert record.levelname == "WARNING" and "TMA: 1" in record.getMessage()
        assert record.getMessage().startswith("kernel grouped_matmul: config BLOCK_M: ")
        assert f"{type(failure).__name__}: {failure}" in record.getMessage()
    assert watch.num_timed == len(grouped_matmul.CONFIGS) - num_failing


def test_a_config_that_fails_after_it_was_chosen(stopwatch, monkeypatch, caplog):
    watch, (operands, expected) = stopwatch(grouped_matmul), product()
    grouped_matmul.grouped_matmul(*operands)
    chosen = watch.launched[-1]["num_stages"], watch.launched[-1]["num_warps"]
    assert watch.launched[-1]["TMA"] == 1

    def fails(args, kwargs):
        return kwargs["TMA"] and (kwargs["num_stages"], kwargs["num_warps"]) == chosen

    failing(monkeypatch, fails, RuntimeError("illegal alignment"))
    y_RO = grouped_matmul.grouped_matmul(*operands)
    assert relative_error(y_RO, expected) < 1e-3
    assert not fails((), watch.launched[-1])
    assert [record.levelname for record in caplog.records] == ["WARNING"]


# PyTorch's function as one more config


def with_library(monkeypatch, counts, *, transposed=False):
    """Operands in bf16, and torch._grouped_mm as the last config of grouped_matmul, and the fastest."""
    monkeypatch.setattr(launch, "has_grouped_mm", lambda x: x.dtype == torch.bfloat16)
    kernel = grouped_matmul._kernel
    monkeypatch.setattr(kernel, "configs", [*kernel.configs, tuning.KernelConfig({"LIBRARY": 1})])
    x_RI = drawn(sum(counts) + 3, 16, dtype=torch.bfloat16, seed=1)
    w_LIO = drawn(4, 16, 24, dtype=torch.bfloat16, seed=2)
    x_RI[sum(counts) :] = torch.nan
    w_LIO = w_LIO.transpose(1, 2).contiguous().transpose(1, 2) if transposed else w_LIO
    return x_RI, w_LIO, offsets_of(counts)


def num_calls(monkeypatch):
    calls, product = [], torch._grouped_mm
    monkeypatch.setattr(torch, "_grouped_mm", lambda *args, **how: calls.append(1) or product(*args, **how))
    return calls


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("counts", [(5, 0, 9, 2), (0, 0, 7, 0), (0, 3, 0, 0), (0, 0, 0, 0)])
def test_the_function_of_pytorch_is_a_config(stopwatch, monkeypatch, counts, transposed):
    """Rows past the last expert's, here NaN, are not read."""
    watch, calls, rows = stopwatch(grouped_matmul), num_calls(monkeypatch), sum(counts)
    operands = with_library(monkeypatch, counts, transposed=transposed)
    for number in (3, 4):  # two while timing; the second call times nothing
        y_RO = grouped_matmul.grouped_matmul(*operands)
        assert len(calls) == number and watch.num_timed == len(grouped_matmul.CONFIGS) + 1
    expected = grouped_matmul.grouped_matmul_torch(*operands)
    assert y_RO.shape == expected.shape and y_RO.is_contiguous()
    assert torch.equal(y_RO[:rows], expected[:rows])
    with deterministic():
        grouped_matmul.grouped_matmul(*operands)
    assert len(calls) == 4


def test_the_function_of_pytorch_only_where_it_suits(stopwatch, monkeypatch):
    """Not with biases, not in fp16, not where it pads its rows, and not for unaligned rows."""
    stopwatch(grouped_matmul)
    calls, (x_RI, w_LIO, offsets_L1) = num_calls(monkeypatch), with_library(monkeypatch, (5, 0, 9, 2))
    wide = torch.zeros(19, 17, dtype=torch.bfloat16)
    for case in (
        (x_RI, w_LIO, offsets_L1, w_LIO[:, 0], x_RI[:, 0].float()),
        (x_RI.half(), w_LIO.half(), offsets_L1),
        (x_RI, w_LIO.transpose(1, 2).contiguous()[:, :20].transpose(1, 2), offsets_L1),
        (wide[:, :16], w_LIO, offsets_L1),
    ):
        grouped_matmul.grouped_matmul(*case)
        (chosen,) = list(grouped_matmul._kernel.choices.values())[-1:]
        assert not calls and "LIBRARY" not in chosen.constants


def test_the_function_of_pytorch_that_fails_leaves_memory_for_another_config(stopwatch, monkeypatch, caplog):
    stopwatch(grouped_matmul)
    x_RI, w_LIO, offsets_L1 = with_library(monkeypatch, (5, 0, 9, 2))

    def fails(*args, **options):
        raise RuntimeError("groups")

    monkeypatch.setattr(torch, "_grouped_mm", fails)
    y_RO = grouped_matmul.grouped_matmul(x_RI, w_LIO, offsets_L1)
    at = {"x": x_RI, "w": w_LIO, "y": torch.empty(19, 24), "offsets": offsets_L1}
    with pytest.raises(RuntimeError, match="groups"):
        grouped_matmul._by_library(at)
    assert at["y"].untyped_storage().nbytes() == 19 * 24 * 4  # the interpreter would allocate it
    expected = grouped_matmul.grouped_matmul_torch(x_RI, w_LIO, offsets_L1)
    assert relative_error(y_RO[:16], expected[:16]) < 1e-2
    (record,) = caplog.records
    assert record.getMessage() == (
        "kernel grouped_matmul: config LIBRARY: 1 is not used: RuntimeError: groups"
    )


def test_the_function_of_pytorch_runs_only_on_hopper(monkeypatch):
    monkeypatch.setattr(launch, "_num_free_processors", 0)
    for capability, dtype, margin, found in (
        ((9, 0), torch.bfloat16, 0, True), ((9, 0), torch.bfloat16, 8, False),
        ((9, 0), torch.float16, 0, False), ((8, 0), torch.bfloat16, 0, False),
        ((10, 0), torch.bfloat16, 0, False), ((12, 0), torch.bfloat16, 0, False),
    ):  # fmt: skip
        monkeypatch.setattr(launch, "_capability", lambda index, found=capability: found)
        launch.leave_free(margin)
        x = SimpleNamespace(is_cuda=True, dtype=dtype, device=torch.device("cuda:0"))
        assert launch.has_grouped_mm(x) is found


def test_full_memory_ends_the_timing_and_not_the_run(stopwatch, monkeypatch, caplog):
    """Triton's benchmark needs a buffer."""
    watch, (operands, expected) = stopwatch(grouped_matmul), product()

    def full(run):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(tuning, "milliseconds", full)
    for _ in range(2):
        assert relative_error(grouped_matmul.grouped_matmul(*operands), expected) < 1e-3
    assert [launched["num_warps"] for launched in watch.launched] == [warps(grouped_matmul)[0]] * 2
    (record,) = caplog.records
    line = "kernel grouped_matmul: out of memory while timing configs, using config BLOCK_M: 32"
    assert record.getMessage().startswith(line)


def test_a_new_key_during_a_capture_is_an_error_in_words(stopwatch, monkeypatch):
    """One that is known is launched."""
    watch = stopwatch(combine)
    combined(3)
    num_timed = watch.num_timed
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(tuning, "device_facts", lambda: ())
    combined(5)
    operands = "rows_class=1, WIDTH=8, TOPK=2, float32 int32 float32"
    with pytest.raises(RuntimeError, match=f"^kernel combine: {operands}: .* capture. Fix: call the kernel"):
        combined(100)
    assert watch.num_timed == num_timed


def test_no_config_runs(stopwatch, monkeypatch):
    """The last error is the cause; a full memory is nobody's fault but its own."""
    stopwatch(grouped_matmul)
    operands, _ = product()
    failing(monkeypatch, lambda args, kwargs: True, RuntimeError("the driver says no"))
    with pytest.raises(RuntimeError, match="kernel grouped_matmul: all of its 7 configs failed") as raised:
        grouped_matmul.grouped_matmul(*operands)
    assert str(raised.value.__cause__) == "the driver says no"
    failing(monkeypatch, lambda args, kwargs: True, torch.OutOfMemoryError("full"))
    with pytest.raises(torch.OutOfMemoryError):
        grouped_matmul.grouped_matmul(*operands)


@pytest.mark.parametrize("module", [activation_grad, up_projection])
def test_an_activation_with_a_gate_does_not_choose_for_one_without(stopwatch, module):
    """The matrices that decide on the tiles are of the same shape."""
    watch = stopwatch(module)
    for activation, width in (("swiglu", 32), ("squared_relu", 16)):
        x_RD, offsets_L1 = drawn(9, 24, dtype=torch.float32, seed=1), offsets_of((4, 5))
        options = {"activation": activation, "weights_R": torch.ones(9, device=x_RD.device)}
        if module is up_projection:
            weight1_LWD = drawn(2, width, 24, dtype=torch.float32, seed=2)
            up_projection.up_projection(x_RD, weight1_LWD, offsets_L1, **options)
        else:
            weight2_LDF = drawn(2, 24, 16, dtype=torch.float32, seed=2)
            hidden_RW = drawn(9, width, dtype=torch.float32, seed=3)
            activation_grad.activation_grad(x_RD, weight2_LDF, hidden_RW, offsets_L1, **options)
    assert len(module._kernel.choices) == 2
    assert watch.num_timed >= 2 * sum(not config.get("TMA") for config in module.CONFIGS)


@pytest.mark.parametrize(
    ("programs", "num_warps", "most"), [(1, 8, None), (2, 4, None), (2, 8, 128), (1, 16, 128)]
)
def test_programs_that_share_a_processor_share_its_registers(programs, num_warps, most):
    """It has 65536; a program of 8 warps has 256 threads, and no thread can have more than 255."""
    config = tuning.make_config({"PROGRAMS": programs, "num_warps": num_warps, "num_stages": 3})
    assert config.constants.get("maxnreg") == most


# What another process has found


@pytest.fixture
def stored(monkeypatch, tmp_path):
    """As on a GPU: choices are kept in files."""
    monkeypatch.setattr(tuning, "device_facts", lambda: ("H200", "12.8"))
    monkeypatch.setattr(combine._kernel.fn, "cache_key", "source", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.usefixtures("stored")
def test_a_later_process_times_nothing(stopwatch, tmp_path):
    watch = stopwatch(combine)
    for num_tokens in (3, 100):
        combined(num_tokens)
    chosen, num_timed = dict(combine._kernel.choices), 2 * len(combine.CONFIGS)
    assert watch.num_timed == num_timed
    assert len(list(tmp_path.glob("cache/moe_exp/combine-*.json"))) == 2
    combine._kernel.choices.clear()
    for num_tokens in (100, 3):
        combined(num_tokens)
        assert watch.launched[-1]["num_warps"] == warps(combine)[-1]
    assert combine._kernel.choices == chosen and watch.num_timed == num_timed


@pytest.mark.usefixtures("stored")
@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setattr(tuning, "device_facts", lambda: ("H100", "12.8")),
        lambda patch: patch.setattr(tuning, "device_facts", lambda: ("H200", "13.0")),
        lambda patch: patch.setattr(combine._kernel.fn, "cache_key", "other source"),
        lambda patch: patch.setattr(launch.triton, "__version__", "9.9"),
        lambda patch: patch.setattr(launch, "_num_free_processors", 16),
        lambda patch: patch.setattr(combine._kernel, "configs", combine._kernel.configs[1:]),
    ],
)
def test_a_choice_counts_only_where_it_was_made(stopwatch, monkeypatch, change):
    watch = stopwatch(combine)
    combined(3)
    before = watch.num_timed
    combine._kernel.choices.clear()
    change(monkeypatch)
    combined(3)
    assert watch.num_timed == before + len(combine._kernel.configs)


@pytest.mark.usefixtures("stored")
@pytest.mark.parametrize("damage", ["", "{", "[]", "{}", '{"config": "BLOCK_D: 7"}', "\udcff"])
def test_a_damaged_file_is_written_anew(stopwatch, tmp_path, damage):
    watch = stopwatch(combine)
    combined(3)
    (file,) = tmp_path.glob("cache/moe_exp/*")
    text = file.read_text()
    file.write_bytes(damage.encode(errors="surrogateescape"))
    combine._kernel.choices.clear()
    combined(3)
    assert watch.num_timed == 2 * len(combine.CONFIGS) and file.read_text() == text


@pytest.mark.usefixtures("stored")
def test_a_folder_that_cannot_be_written_to_changes_nothing(stopwatch, tmp_path, caplog):
    (tmp_path / "cache").write_text("not a folder")
    watch = stopwatch(combine)
    combined(3)
    assert watch.num_timed == len(combine.CONFIGS) and not caplog.records
    assert watch.launched[-1]["num_warps"] == warps(combine)[-1]


# What another rank has found


def test_nothing_is_timed_after_the_choices_of_another_rank_are_taken(stopwatch, monkeypatch, caplog):
    watch, kernel = stopwatch(combine), combine._kernel
    monkeypatch.setattr(tuning, "TUNED", {"combine": kernel})
    for num_tokens in (3, 100):
        combined(num_tokens)
    (of_3, of_100), num_timed = kernel.choices, watch.num_timed
    tuning.take_choices({"combine": {of_3: 1, of_100: 2}})
    for num_tokens, number in ((3, 1), (100, 2)):
        combined(num_tokens)
        assert watch.launched[-1]["num_warps"] == warps(combine)[number]
    assert tuning.choices()["combine"] == {of_3: 1, of_100: 2}
    assert not caplog.records
    # A third class of rows, and another width with few rows, each twice.
    for num_tokens, width, number in ((600, 8, 1), (600, 8, 1), (3, 16, 1), (100, 16, 2), (100, 16, 2)):
        combined(num_tokens, width)
        assert watch.launched[-1]["num_warps"] == warps(combine)[number]
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 3
    line = "kernel combine: not timed at the start for rows_class=2, WIDTH=8, TOPK=2, float32 int32 float32"
    assert caplog.records[0].getMessage().startswith(line)
    tuning.take_choices({})
    combined(3)
    assert watch.launched[-1]["num_warps"] == warps(combine)[0]
    assert watch.num_timed == num_timed


def test_a_config_that_has_failed_here_is_not_taken_from_another_rank(stopwatch, monkeypatch, caplog):
    watch, (operands, expected), kernel = stopwatch(grouped_matmul), product(), grouped_matmul._kernel
    grouped_matmul.grouped_matmul(*operands)
    (key,), num_timed = kernel.choices, watch.num_timed
    kernel.drop(kernel.configs[4], RuntimeError("no descriptors here"))
    kernel.take({key: kernel.configs[4]})
    assert relative_error(grouped_matmul.grouped_matmul(*operands), expected) < 1e-3
    assert watch.launched[-1]["TMA"] == 0 and watch.num_timed == num_timed


# Gradients that are added to main_grad


def operands() -> tuple[torch.Tensor, ...]:
    a, b = (drawn(8, size, dtype=torch.float32, seed=size) for size in (40, 24))
    return a, b, offsets_of((3, 0, 5))


def test_timing_adds_nothing_to_main_grad_and_copies_nothing(stopwatch, monkeypatch):
    watch, main_grad = stopwatch(weight_grad), drawn(3, 40, 24, dtype=torch.float32, seed=3)
    before, expected = main_grad.clone(), weight_grad.weight_grad(*operands())
    num_suited = sum(not config["TMA"] for config in weight_grad.CONFIGS)  # for fp32
    watch.num_timed = 0
    unchanged = []
    watch.after_trial = lambda: unchanged.append(torch.equal(main_grad, before))
    clone, cloned = torch.Tensor.clone, []
    monkeypatch.setattr(torch.Tensor, "clone", lambda x, **how: cloned.append(id(x)) or clone(x, **how))
    for total in (before + expected, before + expected + expected):
        weight_grad.weight_grad(*operands(), out=main_grad)
        assert watch.num_timed == num_suited
        assert torch.equal(main_grad, total)
    assert all(unchanged) and id(main_grad) not in cloned


@pytest.mark.usefixtures("poisoned")
def test_a_rank_without_rows_times_nothing(stopwatch):
    watch, (a, b, offsets_L1) = stopwatch(weight_grad), operands()
    assert not weight_grad.weight_grad(a[:0], b[:0], offsets_L1 * 0).any()
    assert watch.num_timed == len(watch.launched) == 0
