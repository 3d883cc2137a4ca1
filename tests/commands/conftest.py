import pytest

from helpers.whole_runs import SETTINGS


@pytest.fixture
def no_settings(monkeypatch):
    """An environment without settings."""
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
