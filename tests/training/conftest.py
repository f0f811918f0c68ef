import pytest

from gtrace.training import device
from gtrace.training.unmodified import ScriptOptions, ScriptTraining


@pytest.fixture
def on_cpu(monkeypatch):
    """Tensors of the CPU stay tensors."""
    monkeypatch.setattr(device, "DEVICES", {"cpu"})


@pytest.fixture
def training(tmp_path):
    """Starts the hooks of ``gtrace train`` in this process, with what they say, and takes them out at the end."""
    started = []

    def start(codec="qsgdinf:bits=3", **options):
        said = []
        one = ScriptTraining(ScriptOptions(codec=codec, **{"log": str(tmp_path / "log.jsonl")} | options), said.append)
        one.start()
        started.append(one)
        return one, said

    yield start
    for one in started:
        one.finish()
