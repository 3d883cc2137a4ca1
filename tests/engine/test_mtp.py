"""Multi-token prediction (MTP_NUM_LAYERS): the paper's formula, equal losses and gradients in every layout."""

import pytest
import torch

from helpers.model_on_ranks import assembled_job, run_models
from helpers.relative_error import relative_error

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


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_layout_computes_the_same(num_ranks):
    of_model = ("document_mask", "eod_mask_loss")
    layouts = LAYOUTS[num_ranks]
    kinds = [MTP | {name: layout[name] for name in of_model if name in layout} for layout in layouts]
    alone = run_models(1, kinds)
    for layout, found, one in zip(
        layouts, run_models(num_ranks, [MTP | layout for layout in layouts]), alone, strict=True
    ):
        assert found.losses.shape == (8, 3)
        assert relative_error(found.losses, one.losses) < 1e-6, layout
        assert found.grad_norms == pytest.approx(one.grad_norms, rel=1e-5), layout
        assert found.gradients.keys() == one.gradients.keys()
        for name, gradient in one.gradients.items():
            assert relative_error(found.gradients[name], gradient) < 1e-5, (layout, name)


SAVED = [{"ep": 2}, {"pp": 2}, {"tp": 2, "distributed_optimizer": True}]


def test_resume_under_any_layout(tmp_path):
    saves = [MTP | layout | {"save": str(tmp_path / str(i)), "save_after": 1} for i, layout in enumerate(SAVED)]
    run_models(2, saves)
    (whole,) = run_models(1, [MTP])
    loads = [
        MTP | layout | {"load": str(tmp_path / str(i)), "iterations": 1}
        for i, layout in enumerate(SAVED[1:] + SAVED[:1])
    ]
    for found in run_models(2, loads):
        assert relative_error(found.losses, whole.losses[4:]) < 1e-6
        assert found.grad_norms == pytest.approx(whole.grad_norms[1:], rel=1e-5)
