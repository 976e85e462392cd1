"""Functions that a config names by import path."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from a3r.errors import UsageError


def function_at(path: str) -> Callable[..., Any]:
    """The function at `package.module:function`. Raises UsageError when there is none."""
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise UsageError(f"{path!r} is not an import path", next_step="write it like package.module:function")
    try:
        found = getattr(import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"Nothing can be imported from {path!r}", why=str(error)) from error
    if not callable(found):
        raise UsageError(f"The import path {path!r} does not name a function")
    return found
