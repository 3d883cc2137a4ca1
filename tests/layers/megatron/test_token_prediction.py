"""Multi-token prediction (MTP_NUM_LAYERS): the paper's formula, equal numbers in every layout."""

from datetime import datetime
from itertools import product

import pytest
import torch

from helpers.checkpoint.legs import start_job, write_data
from helpers.model_on_ranks import EOD, TINY, RandomTokens, _run, assembled_job, draw_vectors, run_models
from helpers.ranks import RankError, free_port, in_turn, run_jobs, run_on_ranks
from helpers.relative_error import relative_error
from moe_exp.checkpoint.state import Progress
from moe_exp.checkpoint.tools.reshape import Reshaping, reshape
from moe_exp.config import load_config
from moe_exp.engine import runtime
from moe_exp.engine.model import build_model, moe_layers
from moe_exp.layers.kernels import launch
from moe_exp.training import loop
from moe_exp.training.console import console_line
from moe_exp.training.interval import Interval
from moe_exp.training.metrics import curves
from moe_exp.training.microbatch import forward_step, read_microbatch

BASE = {"num_layers": 4, "seq_len": 64, "z_loss_coeff": 1e-3, "aux_loss_coeff": 0.01}
MTP = BASE | {"mtp_num_layers": 2, "mtp_loss_coeff": 0.4}
LAYOUTS = {
    2: [
        {},  # DP
        {"tp": 2, "cross_entropy": "triton"},
        {"ep": 2, "overlap": "true"},
        {"cp": 2, "document_mask": True, "eod_mask_loss": True},
        {"pp": 2, "recompute": "full"},
        {"pp": 2, "vpp": 2, "document_mask": True},
        {"pipeline_layers": "3,1", "pp": 2, "cross_entropy": "linear"},
    ],
    4: [{"tp": 2, "pp": 2, "etp": 2}, {"tp": 2, "cp": 2, "ep": 2}],
}


def in_torch(settings, port):
    """On a rank: a job of `run_models`, without kernels; test_model_loss.py has that of the loss."""
    launch.INTERPRETED = False
    return _run(settings, port)


def run_in_torch(num_ranks, jobs):
    return [assembled_job(ranks) for ranks in run_jobs(num_ranks, in_torch, [(job,) for job in jobs])]


@pytest.mark.parametrize(
    ("num_ranks", "chosen"),
    [
        (2, slice(1, None, 2)),
        pytest.param(2, slice(0, None, 2), marks=pytest.mark.slow),
        pytest.param(4, slice(None), marks=pytest.mark.slow),
    ],
)
def test_every_layout_computes_the_same(num_ranks, chosen):
    of_model = ("document_mask", "eod_mask_loss")
    layouts = LAYOUTS[num_ranks][chosen]
    kinds = [{name: layout[name] for name in of_model if name in layout} for layout in layouts]
    distinct = [kind for index, kind in enumerate(kinds) if kind not in kinds[:index]]
    alone = run_in_torch(1, [MTP | kind for kind in distinct])
    ours = run_in_torch(num_ranks, [MTP | layout for layout in layouts])
    for layout, kind, found in zip(layouts, kinds, ours, strict=True):
        one = alone[distinct.index(kind)]
        assert found.losses.shape == (8, 3)
        assert relative_error(found.losses, one.losses) < 1e-6, layout
        assert found.grad_norms == pytest.approx(one.grad_norms, rel=1e-5), layout
        assert found.gradients.keys() == one.gradients.keys()
        for name, gradient in one.gradients.items():
            assert relative_error(found.gradients[name], gradient) < 1e-5, (layout, name)


SHORT, WITHOUT = MTP | {"num_layers": 2, "seq_len": 16}, {"mtp_num_layers": 0}
SAVED = [{"ep": 2}, {"pp": 2}, {"tp": 2, "distributed_optimizer": True}]


def test_resume_under_another_layout(tmp_path):
    run_models(2, [SHORT | SAVED[1] | {"save": str(tmp_path), "save_after": 1}])
    (whole,) = run_models(1, [SHORT])
    (found,) = run_models(2, [SHORT | SAVED[0] | {"load": str(tmp_path), "iterations": 1}])
    assert relative_error(found.losses, whole.losses[4:]) < 1e-6
    assert found.grad_norms == pytest.approx(whole.grad_norms[1:], rel=1e-5)


@pytest.mark.slow
def test_resume_under_any_layout(tmp_path):
    folders = [tmp_path / str(index) for index in range(len(SAVED))]
    saves = [
        SHORT | layout | {"save": str(folder), "save_after": 1}
        for layout, folder in zip(SAVED, folders, strict=True)
    ]
    run_models(2, saves)
    single, (source,) = tmp_path / "single", folders[0].glob("iter_*")
    reshape(source, single, Reshaping(layers="single", experts="single"))
    (whole,) = run_models(1, [SHORT])
    layouts = SAVED[1:] + SAVED[:1] + SAVED[:1]
    loads = [
        SHORT | layout | {"load": str(folder), "iterations": 1}
        for layout, folder in zip(layouts, [*folders, single], strict=True)
    ]
    for found in run_models(2, loads):
        assert relative_error(found.losses, whole.losses[4:]) < 1e-6
        assert found.grad_norms == pytest.approx(whole.grad_norms[1:], rel=1e-5)
    run_models(1, [SHORT | WITHOUT | {"save": str(tmp_path / "without")}])
    for changes, folder, rule in (
        ({}, folders[1], "MTP_NUM_LAYERS=0: .* has MTP_NUM_LAYERS=2. Fix: set MTP_NUM_LAYERS=2"),
        ({"mtp_num_layers": 1}, tmp_path / "without", "MTP_NUM_LAYERS=1: .* Fix: set MTP_NUM_LAYERS=0"),
    ):
        with pytest.raises(RankError, match=rule):
            run_models(1, [SHORT | WITHOUT | changes | {"load": str(folder)}])


def rms_norm(x, weight):
    return x / (x.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt() * weight


def by_the_formula(settings):
    """Sums of losses and numbers of tokens, [1+K] each, by the model and by the formula of the paper."""
    config = load_config(TINY | MTP | settings | {"gpus_per_node": 1}, {})
    rank = runtime.start(config)
    (model,) = build_model(config, rank)
    chunk, depth, stream = model.module, config.mtp_num_layers, RandomTokens(config.seq_len, 20)
    draw_vectors(chunk)
    batch = read_microbatch(config, rank, stream, 0, 0, eod_id=EOD)
    kept = []
    chunk.decoder.register_forward_hook(lambda module, given, output: kept.append(output))
    with torch.no_grad():
        output, loss_of = forward_step(iter([batch]), model)
        logged = loss_of(output)[1]["lm_loss"]
        tokens, size = stream.batch(0, config.mbsz), config.seq_len
        table, head = chunk.embedding.word_embeddings.weight, chunk.shared_embedding_or_output_weight()
        head = head if config.tie_embeddings else chunk.output_layer.weight
        documents = torch.cumsum(tokens == EOD, dim=1) - (tokens == EOD).long()
        options = {"rotary_pos_emb": chunk.rotary_pos_emb(size), "packed_seq_params": batch["documents"]}
        hidden, expected = kept[0], []
        for k, layer in enumerate([None, *chunk.mtp.layers]):
            ahead = torch.cat([tokens, torch.zeros(len(tokens), depth + 1, dtype=torch.long)], dim=1)
            if layer is not None:
                embedded = table[ahead[:, k : k + size]].transpose(0, 1)
                joined = [rms_norm(embedded, layer.enorm.weight), rms_norm(hidden, layer.hnorm.weight)]
                hidden = torch.cat(joined, dim=-1) @ layer.eh_proj.weight.t()
                hidden, _ = layer.transformer_layer(hidden, attention_mask=None, **options)
                hidden = rms_norm(hidden, layer.final_layernorm.weight)
            losses = []
            for row, position in product(range(len(tokens)), range(size - k)):
                near = documents[row, position] == documents[row, position + k]
                if not config.document_mask or (near and tokens[row, position + k] != EOD):
                    logits, label = head @ hidden[position, row], tokens[row, position + k + 1]
                    losses.append(logits.logsumexp(dim=0) - logits[label])
            expected.append((sum(losses).item(), len(losses)))
    runtime.stop()
    return logged.view(-1, 2).tolist(), expected


@pytest.mark.parametrize(
    "settings", [{}, {"document_mask": True, "eod_mask_loss": True, "tie_embeddings": True}]
)
def test_losses_are_the_formula_of_the_paper(settings):
    ((found, expected),) = run_on_ranks(1, by_the_formula, settings | {"mbsz": 2}, join=False)
    assert [count for _, count in found] == [count for _, count in expected]
    assert [total for total, _ in found] == pytest.approx([total for total, _ in expected], rel=1e-5)


def test_coefficient_0_leaves_the_main_model_as_it_is():
    plain = {
        "num_layers": 2,
        "aux_loss_type": "aux_loss,seq_aux_loss",
        "aux_loss_coeff": 0.1,
        "z_loss_coeff": 0.01,
        "router_bias_update_rate": 0.1,
        "clip_grad": 0.0,
    }
    without, of_0, of_1 = run_models(
        1, [plain | {"mtp_num_layers": n, "mtp_loss_coeff": c} for n, c in ((0, 0.3), (1, 0.0), (1, 1.0))]
    )
    assert torch.equal(of_0.losses[:, 0], without.losses)
    assert not torch.equal(of_1.losses[4:, 0], without.losses[4:])
    for name, gradient in of_0.gradients.items():
        right = without.gradients.get(name, torch.zeros(()))  # and the layers themselves do not train
        assert torch.equal(gradient, right.expand_as(gradient)), name
        assert not torch.equal(of_1.gradients[name], gradient) or not gradient.any(), name


def test_coefficient_by_iteration(tmp_path):
    one = MTP | {"num_layers": 2, "mtp_loss_coeff": "0.4:1,0.1"}
    saved = {"save": str(tmp_path), "save_after": 1}
    whole, constant = run_models(1, [one | saved, one | {"mtp_loss_coeff": 0.4}])
    assert whole.grad_norms[0] == constant.grad_norms[0]
    assert all(torch.equal(value, constant.gradients[name]) for name, value in whole.gradients.items())
    loads = [
        one | {"mtp_loss_coeff": coefficient, "load": str(tmp_path), "iterations": 1}
        for coefficient in ("0.4:1,0.1", 0.1, 0.4)
    ]
    resumed, later, earlier = run_models(1, loads)
    assert torch.equal(resumed.losses, whole.losses[4:])
    assert resumed.grad_norms[0] == later.grad_norms[0] == whole.grad_norms[1]
    assert earlier.grad_norms[0] == constant.grad_norms[1] != whole.grad_norms[1]


def first_record(settings, port):
    """Train record of an iteration, and the biases of all experts on this rank."""
    job = start_job(settings, port)
    interval, progress = Interval(job.config, job.runtime, job.trained.model), Progress()
    loop.train_step(job, progress, interval, count_zeros=False)
    facts = {"learning_rate": 0.0, "grad_norm": 1.0, "num_zeros": None, "loss_scale": 1.0}
    record, biases = interval.record(progress, **facts), dict(moe_layers(list(job.trained.model)))
    runtime.stop()
    return record, {layer: module.router.expert_bias.tolist() for layer, module in biases.items()}


def records(jobs):
    return in_turn(first_record, jobs)


def test_a_train_record_has_the_losses_and_the_experts(tmp_path):
    settings = {"train_data": str(write_data(tmp_path)), "run_dir": str(tmp_path / "run"), "gbsz": 8}
    settings |= {"mtp_num_layers": 2, "router_score": "sigmoid", "router_bias_update_rate": 0.1}
    jobs = {
        n: [(settings | layout | {"gpus_per_node": n}, free_port())]
        for n, layout in ((1, {}), (2, {"pp": 2}))
    }
    (((one, biases),),) = run_on_ranks(1, records, jobs[1], join=False)
    (first,), (last,) = run_on_ranks(2, records, jobs[2], join=False)
    assert one["mtp_loss"] == pytest.approx(sum(one["mtp_losses"]) / 2) and len(set(one["mtp_losses"])) == 2
    assert [layer["layer"] for layer in one["experts"]] == [1, 2, 3, 4, 5, 6]
    assert one["mtp_losses"] == pytest.approx(first[0]["mtp_losses"], rel=1e-6) == last[0]["mtp_losses"]
    assert [layer["tokens_per_expert"] for layer in one["experts"]] == [
        layer["tokens_per_expert"] for layer in last[0]["experts"]
    ]
    assert list(last[1]) == [2, 3, 4, 5] and biases == first[1] | last[1]
    assert all(len(set(bias)) > 1 for bias in biases.values())
    values = curves({"kind": "train", **one})
    assert [values["train/mtp_loss_1"], values["train/mtp_loss_2"]] == one["mtp_losses"]
    assert " mtp loss: " in console_line(one, 10, datetime(2026, 1, 1))
