"""What training needs beyond gtrace's own dependencies."""

from __future__ import annotations

import importlib.util

from gtrace.errors import UsageError


def require_torch() -> None:
    """Check that PyTorch is there, without importing it.

    Raises:
        UsageError: it is not.
    """
    if importlib.util.find_spec("torch") is None:
        raise UsageError("training needs PyTorch, which is not installed: pip install 'gtrace[torch]'")
