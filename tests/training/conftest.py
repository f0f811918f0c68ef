import pytest

from gtrace.training import device


@pytest.fixture
def on_cpu(monkeypatch):
    """Tensors of the CPU stay tensors."""
    monkeypatch.setattr(device, "DEVICES", {"cpu"})
