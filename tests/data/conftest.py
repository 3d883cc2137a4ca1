"""A cluster that data jobs are submitted to."""

import os

import pytest

from helpers.slurm.cluster import Cluster


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """SLURM's programs are those of a stand-in, which runs the jobs for real."""
    cluster = Cluster(tmp_path / "queue")
    monkeypatch.setenv("PATH", f"{cluster.programs}:{os.environ['PATH']}")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    return cluster
