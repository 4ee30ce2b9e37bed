import pytest


@pytest.fixture
def small_chunks(monkeypatch):
    """Seven images per part, so that a few images have several parts."""
    monkeypatch.setattr("progresvit.evaluation.parts.CHUNK", 7)
