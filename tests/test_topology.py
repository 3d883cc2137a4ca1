"""The same numbers at every topology: 12 steps in fp32, six for what is not slow, against the run on
one process, for dense, capacity and dropless models.

The largest deviations are properties of the tests: `pytest -m "" tests/test_topology.py -o
junit_family=xunit1 --junit-xml matrix.xml`.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import pytest

from helpers.whole_runs import EndedRun, Runs


class Layout(NamedTuple):
    tp: int = 1
    pp: int = 1
    vpp: str = "none"
    ep: int = 1
    etp: int = 1
    cp: int = 1

    def fits(self, num_ranks: int) -> bool:
        dense, experts = self.tp * self.pp * self.cp, self.etp * self.ep * self.pp
        return num_ranks % dense == 0 and num_ranks % experts == 0

    @property
    def num_layers(self) -> int:
        """A layer for every model chunk."""
        return 2 if self.vpp == "none" else self.pp * int(self.vpp)


LAYOUTS = (
    Layout(), Layout(tp=2), Layout(pp=2), Layout(pp=2, vpp="2"), Layout(ep=2), Layout(ep=4),
    Layout(tp=2, ep=2), Layout(tp=2, ep=2, etp=2), Layout(tp=2, pp=2, ep=2), Layout(pp=2, ep=2), Layout(cp=2),
)  # fmt: skip

KINDS = {
    "dense": {"USE_MOE": False},
    "moe": {
        "MOE_TYPE": "moe", "CAPACITY_FACTOR": 0.8, "ROUTER_BIAS_RULE": "quantile", "MOE_LATENT_SIZE": 24,
        "NULL_EXPERTS": 2,
    },
    # With everything that looks at more than one token: losses of every scope, the expert bias, the shared
    # expert; with muP every kind of weight has its own learning rate.
    "dmoe": {
        "MOE_TYPE": "dmoe", "AUX_LOSS_TYPE": "aux_loss,seq_aux_loss,global_aux_loss",
        "AUX_LOSS_COEFF": "0.01,0.01,0.02", "ROUTER_BIAS_UPDATE_RATE": 0.001, "PARAMETRIZATION": "mup",
        "MUP_BASE_HIDDEN_SIZE": 64, "SHARED_EXPERT_SIZE": 32, "SHARED_EXPERT_GATE": True, "MBSZ": 2,
    },
    # All that DeepSeek-V3 has, attention too. A fast run of it is in test_attention_layouts.py.
    "deepseek": {
        "MULTI_LATENT_ATTENTION": True, "QK_NORM": True, "Q_LORA_RANK": 24, "KV_LORA_RANK": 32,
        "QK_HEAD_DIM": 12, "QK_POS_EMB_HEAD_DIM": 8, "V_HEAD_DIM": 16, "FIRST_K_DENSE": 1, "MBSZ": 2,
        "ROUTER_SCORE": "sigmoid", "ROUTER_BIAS_UPDATE_RATE": 0.001, "NUM_ROUTER_GROUPS": 4,
        "ROUTER_GROUP_TOPK": 2, "ROUTER_SCALING_FACTOR": 2.5, "AUX_LOSS_TYPE": "seq_aux_loss",
        "SHARED_EXPERT_SIZE": 32,
    },
    # layers after the last one, which the last stage has
    "mtp": {
        "MTP_NUM_LAYERS": 2, "MTP_LOSS_COEFF": "0.4:25%,0.1", "Z_LOSS_COEFF": 0.001,
        "AUX_LOSS_TYPE": "aux_loss,seq_aux_loss", "ROUTER_BIAS_UPDATE_RATE": 0.001, "SHARED_EXPERT_SIZE": 32,
    },
    # a number of experts per token that a token decides
    "relu": {"ROUTER_SCORE": "relu", "AUX_LOSS_TYPE": "l1,aux_loss", "AUX_LOSS_COEFF": "0.01,0.01"},
    "top-p": {"ROUTER_TOP_P": 0.5, "AUX_LOSS_TYPE": "aux_loss,entropy", "AUX_LOSS_COEFF": "0.01,0.001"},
}  # fmt: skip
TOLERANCES = {"lm_loss": 1e-5, "load_balancing_loss": 1e-5, "z_loss": 1e-5, "grad_norm": 1e-4}

# The rest is slow; what else there is, tests/checkpoint/test_any_to_any.py and
# tests/layers/megatron/test_attention_layouts.py try in fewer processes.
SHORT_LIST = [("dmoe", 2, Layout(tp=2)), ("moe", 2, Layout(ep=2))]
ALL = [(kind, n, layout) for kind in KINDS for n in (2, 4) for layout in LAYOUTS if layout.fits(n)]


def _case(kind: str, num_ranks: int, layout: Layout) -> object:
    name = "-".join(f"{field}{value}" for field, value in layout._asdict().items())
    marks = [] if (kind, num_ranks, layout) in SHORT_LIST else [pytest.mark.slow]
    return pytest.param(kind, num_ranks, layout, id=f"{kind}-{num_ranks}-{name}", marks=marks)


@pytest.fixture(scope="session")
def reference(session_runs: Runs) -> Callable[..., EndedRun]:
    """The one-process run of a kind of model, of two layers or more."""

    @cache
    def run(kind: str, num_layers: int = 2) -> EndedRun:
        name = f"one_process_{kind}_{num_layers}"
        return session_runs.succeed(name, **KINDS[kind], NUM_LAYERS=num_layers)

    return run


def deviation(run: EndedRun, expected: EndedRun, name: str, num_iterations: int | None = None) -> float:
    """Largest relative deviation of one value over the first iterations of `run`; None: over all."""
    pairs = zip(run.curve(name), expected.curve(name)[: len(run.records())], strict=True)
    return max(abs(value - right) / abs(right) for value, right in list(pairs)[:num_iterations])


def iterations_alike(run: EndedRun, expected: EndedRun) -> int:
    """Iterations before the first in which a token takes another expert: all, or some and then one token.

    Where two experts are equally good but for rounding, as happens once in tens of thousands of choices, the
    layouts may differ in it, and from then on in everything.
    """
    of_expected = of_layers(expected, "tokens_per_expert")[: len(run.records())]
    counts = list(zip(of_layers(run, "tokens_per_expert"), of_expected, strict=True))
    alike = next((number for number, (ours, right) in enumerate(counts) if ours != right), len(counts))
    if alike < len(counts):
        ours, right = ([count for layer in layers for count in layer] for layers in counts[alike])
        moved = sum(abs(one - other) for one, other in zip(ours, right, strict=True))
        assert alike >= 5 and moved in (1, 2)  # 1: a token that uses one more, or less
    return alike


def of_layers(run: EndedRun, name: str) -> list[list[Any]]:
    """A value of every layer, by iteration."""
    return [[layer[name] for layer in experts] for experts in run.curve("experts")]


@pytest.mark.parametrize(("kind", "num_ranks", "layout"), [_case(*case) for case in ALL])
def test_same_numbers_as_one_process(kind, num_ranks, layout, runs, reference, record_property):
    expected = reference(kind, layout.num_layers)
    sizes = {name.upper(): value for name, value in layout._asdict().items()}
    settings = KINDS[kind] | sizes | {"NUM_LAYERS": layout.num_layers}
    iterations = 4 if (kind, num_ranks, layout) in SHORT_LIST else 12
    run = runs.succeed("run", GPUS_PER_NODE=num_ranks, TRAIN_ITERS=iterations, **settings)
    assert run.curve("iteration") == list(range(1, iterations + 1))
    names = [name for name in TOLERANCES if expected.curve(name)[0] is not None]
    alike = iterations_alike(run, expected)
    deviations = {name: deviation(run, expected, name, alike) for name in names}
    for name, value in deviations.items():
        record_property(name, value)
    assert {name: value for name, value in deviations.items() if not value <= TOLERANCES[name]} == {}
    dropped = "dropped_fraction"
    assert of_layers(run, dropped)[:alike] == of_layers(expected, dropped)[:alike]
    for name in ("aux_losses", "mtp_losses"):
        for losses, right in zip(*(one.curve(name)[:alike] for one in (run, expected)), strict=True):
            assert losses == pytest.approx(right, rel=1e-5), name


# Settings that save memory: with the same order of sums, and the loss by chunks of tokens.
SAVING: dict[str, tuple[dict[str, object], float]] = {
    "modules": ({"RECOMPUTE_MODULES": "norm,{again}", "OFFLOAD_MODULES": "attention,mlp"}, 0.0),
    "all on the host": ({"OFFLOAD_MODULES": "{all}", "OFFLOAD_OPTIMIZER": True}, 0.0),
    "linear loss": ({"CROSS_ENTROPY": "linear"}, 1e-6),
}
NAMES = {
    "dense": {"again": "core_attn", "all": "attention,mlp"},
    "dmoe": {"again": "router,experts,shared_expert", "all": "attention,mlp,experts,shared_expert"},
}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "num_ranks", "layout"), [_case(*case) for case in ALL if case[0] in NAMES])
def test_saving_memory_changes_nothing(kind, num_ranks, layout, runs):
    sizes = {name.upper(): value for name, value in layout._asdict().items()}
    settings = KINDS[kind] | sizes | {"NUM_LAYERS": layout.num_layers, "TRAIN_ITERS": 6}
    plain = {
        dtype: runs.succeed(
            f"plain {dtype}", GPUS_PER_NODE=num_ranks, **settings, DTYPE=dtype, OPTIMIZER="adam"
        )
        for dtype in ("fp32", "bf16")
    }
    for name, (changes, limit) in SAVING.items():
        dtype = "bf16" if "OFFLOAD_OPTIMIZER" in changes else "fp32"
        texts = {key: str(value).format(**NAMES[kind]) for key, value in changes.items()}
        others = {"GPUS_PER_NODE": num_ranks, "DTYPE": dtype, "OPTIMIZER": "adam", **settings, **texts}
        run = runs.succeed(name, **others)
        for curve in (*TOLERANCES, "params_norm"):
            if plain[dtype].curve(curve)[0] is not None:
                assert deviation(run, plain[dtype], curve) <= limit, (name, curve)


@pytest.mark.parametrize("kind", ["dense", "moe", "dmoe"])
def test_one_process_trains_what_it_says(kind, reference):
    run = reference(kind)
    losses = run.curve("lm_loss")
    assert losses[0] == pytest.approx(7.62, abs=0.05)  # ln(2048)
    assert losses[-1] < losses[0] - 0.2
    assert [len(experts) for experts in run.curve("experts")] == [0 if kind == "dense" else 2] * 20
    if kind == "dense":
        assert set(run.curve("load_balancing_loss") + run.curve("z_loss")) == {None}
        return
    slots = 8 * 64 * 2  # GBSZ * SEQ_LEN * TOPK
    used = {sum(counts) / slots for layers in of_layers(run, "tokens_per_expert") for counts in layers}
    assert 0.6 < min(used) < max(used) < 0.95 if kind == "moe" else used == {1.0}  # 0.8 by null experts
    fractions = [fraction for layers in of_layers(run, "dropped_fraction") for fraction in layers]
    assert min(fractions) > 0.01 if kind == "moe" else set(fractions) == {0.0}
    assert min(run.curve("load_balancing_loss")) >= 1 and min(run.curve("z_loss")) > 0
    kinds = KINDS[kind].get("AUX_LOSS_TYPE", "aux_loss").split(",")
    assert all(list(losses) == kinds for losses in run.curve("aux_losses"))


@pytest.mark.slow  # in tests/engine/test_model_loss.py it is fast
@pytest.mark.parametrize(
    ("ep", "backend"),
    [(1, "auto"), (1, "triton"), (2, "auto")],
)
def test_overlapped_communication_changes_nothing(runs, script_runs, reference, ep, backend):
    """The default with GPUs."""
    expected = reference("dmoe")
    others = {"EVAL_INTERVAL": 3, "EVAL_ITERS": 1, "SAVE_INTERVAL": 3, "EXPERT_BACKEND": backend}
    others["TRAIN_ITERS"] = 6  # of the schedule of 20, which DECAY_ITERS says
    # The kernels ask at their import whether they are interpreted.
    starts = script_runs if backend == "triton" else runs
    run = starts.succeed("run", GPUS_PER_NODE=2, EP=ep, OVERLAP="true", **others, **KINDS["dmoe"])
    assert run.curve("iteration") == list(range(1, 7))
    for name in (*TOLERANCES, "params_norm"):
        assert deviation(run, expected, name) <= 1e-5, name
    assert len(run.records("valid")) == 2
