import sys

import pytest

from gtrace.codecs import spec


@pytest.fixture
def registry(monkeypatch):
    """Codecs that a test registers, and modules of its plugins, are gone after it."""
    monkeypatch.setattr(spec, "_REGISTRY", dict(spec._REGISTRY))
    monkeypatch.setattr("gtrace.codecs.plugins._LOADED", {})
    modules = set(sys.modules)
    yield
    for name in {name for name in sys.modules if name.startswith("gtrace_plugin_")} - modules:
        del sys.modules[name]
