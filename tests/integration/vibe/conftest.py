"""The digit game of the unit tests, for having its Program written by a scripted model."""

from __future__ import annotations

from tests.unit.vibe.conftest import good_program, tools

__all__ = ["good_program", "tools"]
