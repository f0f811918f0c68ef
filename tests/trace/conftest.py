"""Places of traces."""

import pytest
from helpers_trace import SUFFIXES


@pytest.fixture(params=SUFFIXES)
def path(request, tmp_path):
    """Of a trace that is a folder, or a file."""
    return tmp_path / f"run{request.param}"
