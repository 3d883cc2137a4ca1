"""A run of this package as a row, and read again."""

import csv
import io
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.whole_runs import SMALL
from moe_exp.config import Config, load_config
from moe_exp.config.presets import PRESETS
from moe_exp.planner.costs.flops import flops_per_iteration
from moe_exp.planner.costs.job import PlannedJob
from moe_exp.planner.costs.params import checkpoint_bytes, rank_parameters
from moe_exp.planner.hardware import load_hardware
from moe_exp.planner.measured import FREE, job_of_row, read_runs, row_of_job
from moe_exp.planner.prediction import predict

HARDWARE = load_hardware("A100-80GB")
# What a dense model does not have.
PREFIXES = ("moe_", "router_", "shared_expert", "num_router")
OF_MOE = {name for name in Config.model_fields if name.startswith(PREFIXES)} | {"num_experts", "topk"}

FLAGS = dict.fromkeys(
    ("use_moe", "distributed_optimizer", "tie_embeddings", "add_bias_linear", "qk_norm", "qkv_bias",
     "multi_latent_attention"), (False, True),
)  # fmt: skip
OPTIONAL = FLAGS | {
    "mbsz": (1, 2), "gbsz": (512, 1024), "dtype": ("fp32", "bf16", "fp16"),
    "recompute": ("none", "moe_act", "selective", "full"), "normalization": ("RMSNorm", "LayerNorm"),
    "activation": ("swiglu", "clamped_swiglu", "geglu", "gelu", "squared_relu"), "moe_type": ("moe", "dmoe"),
    "capacity_factor": (0.0, 1.25), "shared_expert_size": (0, 1024), "head_dim": (64,),
    "moe_ffn_hidden_size": (0, 640), "num_experts": (1, 16), "topk": (1, 2), "first_k_dense": (0, 1),
    "moe_layer_freq": ("1", "2"), "expert_backend": ("auto", "loop"), "overlap": ("auto", "true"),
    "dropout": (0.1,), "lr": (1e-5,), "run_name": ("x, y",), "first_stage_layers": (0, 3),
    "mtp_num_layers": (0, 2),
}  # fmt: skip
settings = st.fixed_dictionaries(
    {
        "preset": st.sampled_from(sorted(PRESETS)),
        "nnodes": st.sampled_from([1, 2]),
        "gpus_per_node": st.just(64),
        "vpp": st.sampled_from(["none", 2]),
        **dict.fromkeys(("tp", "pp", "cp", "ep", "etp"), st.sampled_from([1, 2, 4])),
    },
    optional={name: st.sampled_from(values) for name, values in OPTIONAL.items()},
)


def through_a_file(row: dict[str, str]) -> dict[str, str]:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(row))
    writer.writeheader()
    writer.writerow(row)
    return next(csv.DictReader(text.getvalue().splitlines()))


@given(settings, st.sampled_from(["allocated", "rss", "nvidia-smi"]))
def test_a_job_written_and_read_is_the_same(chosen, measured_by):
    job = replace(PlannedJob.of(load_config(chosen, {})), measured_by=measured_by)
    again = job_of_row(through_a_file(row_of_job(job, "A100-80GB")))
    irrelevant = FREE | (set() if job.config.use_moe else OF_MOE)
    for name in set(Config.model_fields) - irrelevant:
        assert getattr(again.config, name) == getattr(job.config, name), name
    if sum(job.stage_layers) == job.config.num_layers:
        assert replace(again, config=job.config) == job
        assert predict(again, HARDWARE) == predict(job, HARDWARE)
    assert again.config.world_size == job.config.world_size
    assert again.num_microbatches == job.num_microbatches
    assert flops_per_iteration(again.config) == flops_per_iteration(job.config)
    assert checkpoint_bytes(again.config) == checkpoint_bytes(job.config)
    assert rank_parameters(again.config) == rank_parameters(job.config)


def test_settings_that_cost_nothing_are_no_columns():
    job = PlannedJob.of(load_config(SMALL | {"gpus_per_node": 2, "ep": 2, "run_name": "x"}, {}))
    columns = set(row_of_job(job, "A100-80GB"))
    settings = {"gpus_per_node", "tp", "pp", "ep", "cp", "topk", "recompute", "z_loss_coeff"}
    settings |= {"expert_backend", "cross_entropy", "main_params"}
    # rows without the last three are of other programs, which fused neither experts nor the loss
    assert columns & set(Config.model_fields) == settings
    assert set(Config.model_fields) >= FREE


def write(path, **cells):
    config = load_config({"preset": "reference", "gpus_per_node": 8, "ep": 4}, {})
    row = row_of_job(PlannedJob.of(config), "A100-80GB")
    row |= {"row_id": "mine", "mem_gb": "33.3", "sec_per_it": "0.5"} | cells
    with path.open("w") as file:
        writer = csv.DictWriter(file, list(row))
        writer.writeheader()
        writer.writerow(row)
    return path


def test_columns_named_as_settings(tmp_path):
    cells = {"etp": "2", "vpp": "none", "moe_ffn_hidden_size": "640", "shared_expert_gate": "true"}
    (run,) = read_runs(write(tmp_path / "runs.csv", **cells, qk_norm=""))
    config = run.job.config
    assert (config.etp, config.vpp, config.moe_ffn_hidden_size) == (2, None, 640)
    assert config.shared_expert_gate and not config.qk_norm
    assert (run.memory_gib, run.seconds, run.job.sharding) == (33.3, 0.5, "distributed")


def test_bad_cells_of_settings_are_named_together(tmp_path):
    bad = {"cp": "0", "vpp": "two", "normalization": "layernorm", "shared_expert_size": "-1"}
    with pytest.raises(ValueError) as error:
        read_runs(write(tmp_path / "runs.csv", **bad))
    lines = str(error.value).splitlines()
    expected = {f"{tmp_path}/runs.csv, row mine, column {name}={value}" for name, value in bad.items()}
    assert {line.partition(":")[0] for line in lines} == expected and len(lines) == len(bad)
    assert all("Fix: correct the cell" in line for line in lines)


def test_a_file_that_is_no_text(tmp_path):
    path = tmp_path / "runs.csv"
    path.write_bytes(bytes(range(256)))
    with pytest.raises(ValueError, match=r"runs.csv: must be a UTF-8 CSV file .*\. Fix: "):
        read_runs(path)


def test_columns_of_other_programs(tmp_path):
    said = {
        "precision": "fp8_mx", "dispatcher": "hybridep", "recompute": "layernorm;moe_act", "ep_overlap": "1",
        "cuda_graph": "transformer_engine:attn;moe_router", "sharding": "fsdp", "num_mtp_layers": "1",
        "optimizer_dtypes": "main_grads=bf16;exp_avg=bf16;exp_avg_sq=bf16", "balance": "measured",
    }  # fmt: skip
    (run,) = read_runs(write(tmp_path / "runs.csv", **said))
    job, engine = run.job, run.job.engine
    assert (job.config.fp8, job.config.fp8_recipe, job.config.recompute) == ("e4m3", "mxfp8", "moe_act")
    assert job.config.num_layers == load_config({"preset": "reference"}, {}).num_layers + 1
    assert (engine.dispatcher, engine.recompute) == ("hybridep", {"layernorm"})
    assert engine.graphs == {"attn", "moe_router"}
    assert engine.overlaps_exchange and engine.shards_parameters and not engine.balanced
    assert (engine.gradient_bytes, engine.reduced_bytes, engine.state_bytes) == (2, 2, 8)
    assert predict(job, load_hardware("B200")).time.total > 0


@pytest.mark.parametrize(
    ("column", "value", "rule"),
    [
        ("pp", 10**20, "must be"),
        ("layers", 10**12, "must be"),
        ("heads", 10**6, "must not exceed hidden"),
        ("mem_gb", 1e300, "must be"),
        ("tp", "1e3", "must be"),
        ("sharding", "zero3", "must be one of distopt, fsdp"),
        ("recompute", "router", "must be a list of"),
        ("cuda_graph", "transformer_engine:head", "must be none"),
        ("cuda_graph", ":attn", "must be none"),
        ("num_mtp_layers", "1.5", "must be a whole number"),
        ("pipeline_layout", "Et*99999999|L", "must be like"),
        ("optimizer_dtypes", "bf16", "must be like"),
        ("optimizer_dtypes", "exp_avg=int8", "must be like"),
        ("precision", "fp6", "must be one of fp32"),
    ],
)
def test_bad_cells(tmp_path, column, value, rule):
    with pytest.raises(ValueError, match=re.escape(f"row mine, column {column}={value}: {rule}")):
        read_runs(write(tmp_path / "runs.csv", **{column: str(value)}))


@pytest.mark.parametrize("others", [{}, {"tp_overlap": "0"}])
def test_recompute_does_not_depend_on_other_columns(tmp_path, others):
    for text, recompute in {"moe": "selective", "selective;layernorm": "selective", "full": "full"}.items():
        (run,) = read_runs(write(tmp_path / "runs.csv", recompute=text, **others))
        assert run.job.config.recompute == recompute


def test_nvfp4_needs_a_device_that_has_it(tmp_path):
    (run,) = read_runs(write(tmp_path / "runs.csv", precision="nvfp4", gpu="H100-80GB"))
    with pytest.raises(ValueError, match=r"PRECISION=nvfp4: the device has no FP4 peak"):
        predict(run.job, run.hardware)
