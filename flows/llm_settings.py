"""How a campaign's process reaches the LLM that the person who ordered it had configured.

The runner was started earlier and perhaps by somebody with another environment. So the settings travel in a file
of the campaign that only its owner can read, and that goes when the campaign is over. They never enter the record.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

NAMES = ("OPENAI_BASE_URL", "OPENAI_API_KEY", "A3R_CODER_MODEL")
_FILE = "llm.json"


def keep_llm_settings(folder: Path, environment: Mapping[str, str]) -> None:
    """Write the LLM settings of an environment into a campaign's folder, readable by the owner only."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _FILE
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump({name: environment[name] for name in NAMES if name in environment}, file)


def llm_settings(folder: Path) -> dict[str, str]:
    """The campaign's LLM settings, or this process' own where none were kept."""
    path = folder / _FILE
    if path.exists():
        return json.loads(path.read_text())
    return {name: os.environ[name] for name in NAMES if name in os.environ}


def forget_llm_settings(folder: Path) -> None:
    """Remove them. Harmless when there are none."""
    (folder / _FILE).unlink(missing_ok=True)
