"""The kernels as compiled for GPUs that are not there: they fit, spill nothing and use tensor cores."""

import importlib
import pkgutil
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from helpers import ROOT
from helpers.layers import ceilings
from helpers.layers import kernel_launches as launches
from helpers.layers.compiled import (
    SHARED_LIMIT,
    Compiled,
    compiled,
    devices,
    num_configs,
    specializations,
    triton_code,
)
from helpers.layers.kernel_launches import Sizes
from moe_exp.layers import kernels as package
from moe_exp.layers.kernels import activation_grad as activation_grads
from moe_exp.layers.kernels import weight_grad as weight_grads
from moe_exp.layers.kernels.grouped_matmul import CONFIGS

CONFIGS_OF = {
    launches.activation_gradient: activation_grads.CONFIGS,
    launches.weight_gradient: weight_grads.CONFIGS,
}
OTHERS = [launches.combined, launches.sorted_slots]
ROUTING = [
    launches.routed, partial(launches.routed, at=Sizes(routed=512)), launches.routed_back,
    partial(launches.routed, "sigmoid", True), partial(launches.routed_back, "sqrtsoftplus", True),
    launches.losses_of_sums, launches.rotated_keys, launches.norms_of_sums,
    partial(launches.norms_of_sums, at=Sizes(dim=7168)), launches.rows_in_order, launches.chunks,
    launches.kept,
    partial(launches.kept, False), launches.padded, launches.loss, launches.loss_back,
]  # fmt: skip
SLOW = [pytest.param(capability, marks=pytest.mark.slow) for capability in (90, 100)]
VARIANTS = [
    partial(launches.up, "gelu", False),
    partial(launches.up, "squared_relu"),
    partial(launches.up, bias=True),
    *launches.BIASED.values(),
    partial(launches.up, gather=False),
    partial(launches.up, dtype=torch.float16),
    partial(launches.down, False),
    partial(launches.down, dtype=torch.float16),
    partial(launches.activation_gradient, "gelu", False),
    partial(launches.weight_gradient, False, True),
    partial(launches.up, keeps_hidden=False),
    *(partial(gemm, at=Sizes(experts=number)) for gemm in launches.GEMMS for number in (1, 128)),
]
TENSOR_CORES = {80: "mma", 86: "mma", 89: "mma", 90: "wgmma", 100: "tcgen05", 120: "mma"}


def name_of(launch: Any) -> str:
    if hasattr(launch, "__name__"):
        return launch.__name__
    options = [f"{key}={getattr(value, 'experts', value)}" for key, value in launch.keywords.items()]
    return "-".join([launch.func.__name__, *map(str, launch.args), *options])


def check(kernel: Compiled, capability: int, *, is_gemm: bool, spilled_bytes: int = 0) -> None:
    assert kernel.shared_bytes <= SHARED_LIMIT[capability], kernel
    assert kernel.stack_bytes <= spilled_bytes, f"registers are spilled: {kernel}"
    assert kernel.instructions["atomic"] == 0 or not is_gemm, kernel
    if is_gemm:
        assert kernel.instructions[TENSOR_CORES[capability]] > 0, kernel
        assert kernel.instructions["cp.async"] + kernel.instructions["tma"] > 0, f"not pipelined: {kernel}"


needs_ceilings = pytest.mark.skipif(
    not ceilings.file_of().is_file(), reason="no file: helpers/layers/ceilings.py writes it"
)


def products(kernels: list[Compiled]) -> list[Compiled]:
    return [kernel for kernel in kernels if any(kernel.instructions[kind] for kind in TENSOR_CORES.values())]


GEMM_CASES = ["up", "down", "activation_grad", "weight_grad"]
BIAS_CASES = ["up, clamped, with bias", "down, with bias"]


@pytest.mark.parametrize(
    ("case", "capability"),
    [
        *((case, 90) for case in [*GEMM_CASES, *BIAS_CASES]),
        ("down", 80),
        *(
            pytest.param(case, 80, marks=pytest.mark.slow)
            for case in [*GEMM_CASES, *BIAS_CASES]
            if case != "down"
        ),
    ],
)
def test_first_config(case: str, capability: int) -> None:
    """It has to run everywhere, also in the 99 KB of a gaming card."""
    (kernel,) = products(compiled(ceilings.CASES[case], capability))
    check(kernel, capability, is_gemm=True)
    assert capability != 80 or kernel.shared_bytes <= SHARED_LIMIT[86]
    if ceilings.file_of().is_file():
        assert ceilings.exceeded([ceilings.row_of(case, capability, kernel)], ceilings.limits()) == []


@needs_ceilings
@pytest.mark.slow
@pytest.mark.parametrize("capability", ceilings.CAPABILITIES)
@pytest.mark.parametrize("case", ceilings.CASES)
def test_every_kernel_and_config_stays_below_its_ceilings(case: str, capability: int) -> None:
    rows = ceilings.measured(case, capability)
    assert ceilings.exceeded(rows, ceilings.limits()) == []
    known = [(row["case"], row["capability"]) for row in ceilings.limits().values()]
    assert len(rows) == known.count((case, str(capability))), "helpers/layers/ceilings.py writes them anew"


@needs_ceilings
def test_every_kernel_has_ceilings() -> None:
    modules = [module.name for module in pkgutil.iter_modules(package.__path__)]
    names = {
        f"{module}{name}"
        for module in modules
        for name in vars(importlib.import_module(f"{package.__name__}.{module}"))
        if name.startswith("_") and name.endswith("_kernel")
    }
    assert {row["kernel"] for row in ceilings.limits().values()} == names


def test_the_page_has_the_table() -> None:
    page = ceilings.PAGE.read_text()
    triton = page.partition("Compiled with Triton ")[2].partition(" ")[0]
    assert f"{ceilings.START}\n{ceilings.table(triton)}\n\n{ceilings.END}" in page
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line.startswith("triton==")]
    assert pins in ([f"triton=={triton}"], [])  # none where another torch was installed


# What may be a factor of a product of 32 bits: strides inside the matrix of an expert, numbers of chunks and
# of padded rows, all below 2^31.
IN_32_BITS = {
    "up_projection_kernel": {"stride_ww", "width"},
    "grouped_matmul_kernel": {"stride_wi", "stride_wo"},
    "activation_grad_kernel": {"stride_wd", "stride_wf"},
    "topk_forward_kernel": {"num_experts"},  # twice the experts
    "drops_pad_kernel": {"num_experts", "rows_per_expert"},
    "rows_chunk_kernel": {"num_sources", "num_experts"},
}


def factors_in_32_bits(code: str, widths: set[int]) -> set[str]:
    """Arguments, and constants among `widths`, by which something is multiplied in 32 bits."""
    arguments = set(re.findall(r"%(\w+): ", re.search(r"tt\.func public .*", code)[0]))
    names = {argument: argument for argument in arguments}
    found = set()
    for name, operation, operands, kind in re.findall(r"^ *%(\S+) = (\S+) (.*?) : (.*?) loc", code, re.M):
        if operation == "arith.constant":
            names[name] = re.sub(r"\D", "", operands)
        elif operation in ("tt.splat", "tt.broadcast", "tt.expand_dims", "arith.trunci"):
            names[name] = names.get(operands.split()[0].strip("%,"), "")
        elif operation == "arith.muli" and re.search(r"\bi32$|xi32>$", kind):
            found |= {names.get(operand.strip("%,"), "") for operand in operands.split()}
    return found & (arguments | set(map(str, widths)))


def test_rows_are_multiplied_by_strides_in_64_bits() -> None:
    """Where rows times width exceeds 2^31. No block has the size of a width."""
    at = Sizes(tokens=2**23, rows=2**23, dim=1040, ffn=528, routed=160)
    for code in triton_code(partial(launches.all_kernels, at), 90):
        name = re.search(r"public @(\w+)", code)[1]
        widths = {at.dim, at.ffn, 2 * at.ffn} | ({launches.TOPK} if "topk" in name else set())
        assert factors_in_32_bits(code, widths) <= IN_32_BITS.get(name, set()), name


@pytest.mark.parametrize(
    ("launch", "config", "masked"),
    [
        (launches.up, 0, [0]),
        (launches.down, 0, [0]),
        (launches.activation_gradient, 0, [0]),
        (launches.weight_gradient, 0, [0, 3]),
        (launches.weight_gradient, -1, [0, 3]),  # by descriptors
    ],
)
def test_full_steps_have_no_masks(launch: Callable[[], None], config: int, masked: list[int]) -> None:
    """What is loaded with a mask in each loop with a product: only the rest of the weight gradient's rows."""
    *_, code = triton_code(launch, 90, config)
    loops = [part.rpartition("scf.for")[2] for part in code.split("tt.dot ")[:-1]]
    assert [len(re.findall(r"tt\.load %\w+, ", loop)) for loop in loops] == masked


@pytest.mark.parametrize("capability", [80, *SLOW])
@pytest.mark.parametrize("launch", [*OTHERS, *ROUTING], ids=name_of)
def test_kernels_without_products(launch: Callable[[], None], capability: int) -> None:
    kernels = compiled(launch, capability)
    assert kernels
    for kernel in kernels:
        check(kernel, capability, is_gemm=False)
        assert kernel.shared_bytes <= SHARED_LIMIT[86]
        # those of a histogram stay in shared memory
        assert "red.global" not in kernel.ptx and "atom.global" not in kernel.ptx


@pytest.mark.parametrize("launch", [launches.rows_in_order, launches.loss, launches.loss_back], ids=name_of)
def test_16_bytes_are_moved_at_a_time(launch: Callable[[], None]) -> None:
    (kernel,) = compiled(launch, 80)
    ways = ["ld.global.v4.b32", "st.global.v4.b32"] if launch is launches.rows_in_order else ["v4.b32"]
    assert all(way in kernel.ptx for way in ways)


@pytest.mark.parametrize("capability", [80, 90, SLOW[1]])
@pytest.mark.parametrize("experts", [64, 256, 512, 1024])
@pytest.mark.parametrize("sources", [1, 8])
def test_registers_of_the_chunk_order_do_not_grow_with_experts(sources, experts, capability) -> None:
    (kernel,) = compiled(partial(launches.chunks, sources, at=Sizes(routed=experts)), capability)
    assert kernel.stack_bytes == 0
    assert kernel.registers <= 32


@pytest.mark.parametrize("launch", [launches.routed, partial(launches.routed, "sigmoid", True)], ids=name_of)
def test_four_programs_of_the_router_fit_on_a_processor(launch: Callable[[], None]) -> None:
    (kernel,) = compiled(launch, 80)
    assert kernel.registers * 32 * 4 * 4 <= 65536


def test_one_kernel_for_all_numbers_of_rows() -> None:
    """Multiples of 16, others and 1: compiling in the middle of a run would stall all ranks."""
    usual, *others = (
        specializations(partial(launches.micro_batch, Sizes(tokens=tokens, rows=rows)), 80)
        for tokens, rows in ((1024, 4096), (1025, 4099), (1030, 1))
    )
    assert len(usual) > 15
    for other in others:
        assert other == usual


def test_kernels_are_launched_on_the_device_of_their_tensors() -> None:
    """Which is not the current one here."""
    started = devices(launches.all_kernels, 80)
    assert {name for name, _ in started} >= {"cross_entropy", "topk", "rows", "weight_grad", "combine"}
    assert {device for _, device in started} == {1}


def test_hidden_is_not_written_where_nobody_wants_it() -> None:
    (both,), (one,) = compiled(launches.up, 80), compiled(partial(launches.up, keeps_hidden=False), 80)
    assert 0 < one.ptx.count("st.global") <= both.ptx.count("st.global") / 2
    check(one, 80, is_gemm=True)


def test_descriptors_replace_addresses() -> None:
    """All that comes from memory in the loop then comes by descriptors, which cost fewer registers."""
    alike = [{**config, "TMA": 0, "PROGRAMS": 0, "num_stages": 0} for config in CONFIGS]
    number = next(i for i, config in enumerate(alike) if config == alike[0] and CONFIGS[i]["TMA"])
    (by_address,), (by_descriptor,) = compiled(launches.down, 90), compiled(launches.down, 90, number)
    assert by_descriptor.instructions["tma"] > 0
    assert by_descriptor.instructions["cp.async"] == 0
    assert by_descriptor.registers < by_address.registers
    assert num_configs(launches.down, 80) < num_configs(launches.down, 90)


@pytest.mark.parametrize("gemm", [launches.activation_gradient, launches.weight_gradient])
def test_gradients_have_descriptors_for_what_is_not_gathered(gemm: Callable[..., None]) -> None:
    number = next(i for i, config in enumerate(CONFIGS_OF[gemm]) if config["TMA"])
    (one_gathered,) = products(compiled(gemm, 90, number))
    (none_gathered,) = products(compiled(partial(gemm, gather=False), 90, number))
    assert 0 < one_gathered.instructions["tma"] < none_gathered.instructions["tma"]
    assert none_gathered.instructions["cp.async"] == 0 < one_gathered.instructions["cp.async"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launch", "capability"),
    [
        pytest.param(launch, capability, id=f"{name_of(launch)}-{capability}")
        for launch in [*launches.GEMMS, *OTHERS, *VARIANTS]
        for capability in SHARED_LIMIT
        if launch not in VARIANTS or capability not in (86, 89)  # the instructions of 80
    ],
)
def test_all_configs(launch: Callable[[], None], capability: int) -> None:
    """Every config compiles, the first fits and spills four registers at most, and enough others fit.

    The limit of registers for two programs is too low for sm_120, where no second program fits either.
    """
    num_fitting = 0
    for config in range(num_configs(launch, capability)):
        for kernel in compiled(launch, capability, config):
            is_gemm = any(kernel.instructions[kind] for kind in TENSOR_CORES.values())
            if config == 0 or kernel.shared_bytes <= SHARED_LIMIT[capability]:
                is_limited = capability == 120 and "maxnreg" in kernel.config
                spilled_bytes = 448 if is_limited else 256 if config else 16
                check(kernel, capability, is_gemm=is_gemm, spilled_bytes=spilled_bytes)
                num_fitting += is_gemm
    assert num_fitting >= 2 or launch in OTHERS


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_tf32_only_when_asked_for(capability: int) -> None:
    (plain,) = compiled(partial(launches.down, dtype=torch.float32), capability)
    assert not any(plain.instructions[kind] for kind in TENSOR_CORES.values())
    (tf32,) = compiled(partial(launches.down, dtype=torch.float32, tf32=True), capability)
    assert tf32.instructions[TENSOR_CORES[capability]] > 0
    for kernel in (plain, tf32):
        assert kernel.shared_bytes <= SHARED_LIMIT[86 if capability == 80 else 90]
