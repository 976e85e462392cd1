"""Is there a model where a person says? Found out without loading anything heavy."""

from __future__ import annotations

from pathlib import Path

from a3r.errors import UsageError

SMALL = "small"


def check_model(model: str) -> None:
    """Raise UsageError unless `model` is `small` or a local Hugging Face folder. Loads nothing heavy."""
    if model == SMALL:
        return
    folder = Path(model)
    missing = [name for name in ("config.json", "tokenizer_config.json") if not (folder / name).is_file()]
    if not folder.is_dir() or missing:
        raise UsageError(
            f"There is no model in {folder}",
            why=f"{', '.join(missing)} missing" if folder.is_dir() else "the folder does not exist",
            next_step="name a local Hugging Face folder, or `small` for the shipped policy",
        )
