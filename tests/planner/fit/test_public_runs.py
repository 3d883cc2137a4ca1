"""The table of public runs: every row has a source and a layout that exists, and the TFLOP/s that were
published beside its tokens per second are those that the planner counts.
"""

from __future__ import annotations

import csv

import pytest

from moe_exp.config import Config, load_config
from moe_exp.planner.costs.flops import flops_per_iteration
from moe_exp.planner.hardware import PROFILES

ROWS = list(csv.DictReader((PROFILES / "public_runs.csv").read_text().splitlines()))
SETTINGS = {
    "layers": "num_layers", "hidden": "hidden_size", "heads": "num_heads", "kv_groups": "num_query_groups",
    "kv_channels": "head_dim", "ffn": "ffn_hidden_size", "seq": "seq_len", "vocab": "vocab_size",
    "mbs": "mbsz", "gbs": "gbsz", "experts": "num_experts",
} | {
    name: name
    for name in (
        "tp", "pp", "ep", "cp", "topk", "moe_ffn_hidden_size", "shared_expert_size", "first_k_dense",
        "multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim",
        "v_head_dim",
    )
}  # fmt: skip
# Published TFLOP/s by another rule, or of a part that the planner does not count.
OTHER_RULES = {
    "attention over a window": lambda row: bool(row["sliding_window"]),
    "tokens predicted ahead": lambda row: row["num_mtp_layers"] not in ("", "0"),
    "all scores of attention": lambda row: row["cluster"] in ("mcore-H100", "mcorellama-H100"),
    "no second source": lambda row: (
        "derived" in row["notes"] + row["assumed"] or not row["tokens_per_s_per_gpu"]
    ),
}


def number(row: dict[str, str], name: str) -> int:
    return int(row[name] or 0)


def config_of(row: dict[str, str]) -> Config:
    dense = {"num_experts": 1, "ep": 1}
    is_moe, is_latent = number(row, "experts") > 1, row["multi_latent_attention"] == "1"
    settings = {name: row[column] for column, name in SETTINGS.items() if row[column] not in ("", "0")}
    settings |= {} if is_moe else dense
    settings |= {"head_dim": "0", "qk_norm": "true"} if is_latent else {}
    per_node = min(8, number(row, "n_gpus"))
    settings |= {"gpus_per_node": per_node, "nnodes": number(row, "n_gpus") // per_node}
    return load_config(settings | {"activation": "swiglu", "use_moe": str(is_moe).lower()}, {})


def test_every_row_has_a_source_and_a_name_of_its_own():
    assert len({row["row_id"] for row in ROWS}) == len(ROWS) > 400
    assert all(row[name] for row in ROWS for name in ("repo", "path", "commit", "cluster", "model", "gpu"))


def test_layouts_exist_and_numbers_fit_each_other():
    for row in ROWS:
        dp, rest = divmod(
            number(row, "n_gpus"), number(row, "tp") * number(row, "pp") * (number(row, "cp") or 1)
        )
        assert rest == 0 and number(row, "gbs") % (number(row, "mbs") * dp) == 0, row["row_id"]
        assert number(row, "experts") < 2 or number(row, "experts") % number(row, "ep") == 0, row["row_id"]
        speed = number(row, "gbs") * number(row, "seq") / float(row["sec_per_it"]) / number(row, "n_gpus")
        published = float(row["tokens_per_s_per_gpu"] or speed)
        assert speed == pytest.approx(published, rel=0.01), row["row_id"]


def test_published_operations_are_those_of_the_planner():
    compared = [row for row in ROWS if not any(is_other(row) for is_other in OTHER_RULES.values())]
    assert len(compared) > 200 and len({row["model"] for row in compared}) >= 8
    errors = {}
    for row in compared:
        ours = flops_per_iteration(config_of(row)) / float(row["sec_per_it"]) / number(row, "n_gpus")
        errors[row["row_id"]] = ours / float(row["tflops_per_gpu"]) / 1e12 - 1
    assert {name: error for name, error in errors.items() if abs(error) > 0.025} == {}
    assert sum(abs(error) for error in errors.values()) / len(errors) < 0.005
