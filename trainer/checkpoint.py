"""Checkpoints: whole, verified folders from which training continues bit for bit.

```
<folder>/
  version-000012/          written under another name, synced, then renamed: it is whole or absent
    manifest.json          version, seed, config, consumed episode ids, and the SHA-256 of every other file
    learner.safetensors    optimiser moments, KL reference, random state
    policy/                the policy as a Hugging Face folder: weights, config, tokenizer
```

A checkpoint is never overwritten: a second one of the same version gets a suffix and is the newer one.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from torch import Tensor

from a3r.config import Config, TrainerConfig
from a3r.errors import EnvironmentNotReady, UsageError
from trainer.learner import Learner, LearnerState
from trainer.policy import export_policy, restore_weights

log = logging.getLogger(__name__)

_FORMAT = "a3r-checkpoint-1"
_MANIFEST = "manifest.json"
_LEARNER = "learner.safetensors"
_POLICY = "policy"
_DRAFT = ".draft"
"""Where a checkpoint is written before it counts; a leftover of a crash is thrown away."""
_NAME = re.compile(r"version-([0-9]{6,})(?:-([0-9]+))?")
_CONTINUABLE = {"num_updates", "checkpoint_every"}
"""Settings that may differ between a checkpoint and the learner that goes on from it."""


class Manifest(Config):
    """What a checkpoint says about itself."""

    format: str
    version: int
    """Updates behind the policy."""
    sequence: int
    num_skipped_in_a_row: int
    seed: int
    config: TrainerConfig
    consumed: tuple[str, ...]
    """Ids of every episode that an update behind this policy was given."""
    files: dict[str, str]
    """SHA-256 of every other file, by path."""


def save_checkpoint(folder: Path, learner: Learner, *, consumed: Iterable[str]) -> Path:
    """Write a checkpoint into `folder` and return its own folder. `consumed`: every episode id trained on so far.

    Atomic: after a crash at any instant the checkpoint is whole or absent.
    """
    folder.mkdir(parents=True, exist_ok=True)
    state = learner.state()
    draft = folder / _DRAFT
    if draft.exists():
        shutil.rmtree(draft)
    export_policy(learner.policy, draft / _POLICY)
    save_file(_tensors_of(state), draft / _LEARNER)
    manifest = Manifest(
        format=_FORMAT,
        version=state.version,
        sequence=state.sequence,
        num_skipped_in_a_row=state.num_skipped_in_a_row,
        seed=learner.seed,
        config=learner.config,
        consumed=tuple(consumed),
        files=_digests(draft),
    )
    (draft / _MANIFEST).write_text(manifest.model_dump_json(indent=1), encoding="utf-8")
    _sync(draft)
    checkpoint = draft.rename(_free_name(folder, version=state.version))
    _sync_one(folder)
    return checkpoint


def load_checkpoint(checkpoint: Path, learner: Learner) -> tuple[str, ...]:
    """Put the learner and its policy where the checkpoint was; the consumed episode ids that rule from here on.

    Raises EnvironmentNotReady when the checkpoint is torn and UsageError when it belongs to another model, seed or
    config. The learner is then unchanged.
    """
    manifest = _verified(checkpoint)
    _check_same_trial(manifest, learner, checkpoint=checkpoint)
    state = _state_from(manifest, load_file(checkpoint / _LEARNER))
    restore_weights(learner.policy, checkpoint / _POLICY)
    learner.restore(state)
    return manifest.consumed


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint in `folder`, or None. Torn and foreign ones are passed over with a warning."""
    if not folder.is_dir():
        return None
    dated = ((age, path) for path in folder.iterdir() if (age := _age_of(path)))
    for _, candidate in sorted(dated, reverse=True):
        try:
            _verified(candidate)
        except EnvironmentNotReady as error:
            log.warning("passing over a checkpoint: %s", error)
        else:
            return candidate
    return None


def export_checkpoint(checkpoint: Path, folder: Path) -> Path:
    """Copy the checkpoint's policy to `folder` as a Hugging Face folder with config and tokenizer.

    Raises EnvironmentNotReady when the checkpoint is torn.
    """
    _verified(checkpoint)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as draft:
        for path in sorted((checkpoint / _POLICY).iterdir()):
            Path(shutil.copy2(path, draft)).replace(folder / path.name)
    return folder


def _tensors_of(state: LearnerState) -> dict[str, Tensor]:
    groups: dict[str, Mapping[str, Tensor]] = {"optimizer": state.optimizer, "reference": state.reference or {}}
    tensors = {f"{group}:{name}": tensor for group, members in groups.items() for name, tensor in members.items()}
    return {name: tensor.detach().contiguous() for name, tensor in (tensors | {"torch_rng:": state.torch_rng}).items()}


def _state_from(manifest: Manifest, tensors: Mapping[str, Tensor]) -> LearnerState:
    groups: dict[str, dict[str, Tensor]] = {"optimizer": {}, "reference": {}, "torch_rng": {}}
    for key, tensor in tensors.items():
        group, _, name = key.partition(":")
        groups[group][name] = tensor
    return LearnerState(
        version=manifest.version,
        sequence=manifest.sequence,
        num_skipped_in_a_row=manifest.num_skipped_in_a_row,
        optimizer=groups["optimizer"],
        reference=groups["reference"] or None,
        torch_rng=groups["torch_rng"][""],
    )


def _verified(checkpoint: Path) -> Manifest:
    """The manifest of a whole checkpoint. Raises EnvironmentNotReady with the reason otherwise."""

    def refusal(why: str) -> EnvironmentNotReady:
        return EnvironmentNotReady(f"{checkpoint} is not a whole checkpoint", why=why)

    try:
        manifest = Manifest.model_validate_json((checkpoint / _MANIFEST).read_bytes())
    except OSError as error:
        raise refusal(f"its manifest cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise refusal(f"its manifest is torn or not ours: {error.errors()[0]['msg']}") from error
    if manifest.format != _FORMAT:
        raise refusal(f"its format is {manifest.format}, this is {_FORMAT}")
    found = _digests(checkpoint)
    wrong = sorted(name for name, digest in manifest.files.items() if found.get(name) != digest)
    if wrong:
        raise refusal(f"missing or damaged: {', '.join(wrong)}")
    return manifest


def _check_same_trial(manifest: Manifest, learner: Learner, *, checkpoint: Path) -> None:
    theirs, ours = manifest.config.model_dump(), learner.config.model_dump()
    differing = [name for name in ours if ours[name] != theirs[name] and name not in _CONTINUABLE]
    if manifest.seed != learner.seed:
        differing.append("seed")
    if differing:
        raise UsageError(
            f"{checkpoint} belongs to another trial",
            why=f"it differs in {', '.join(differing)}",
            next_step="continue with the settings it was written with",
        )


def _digests(folder: Path) -> dict[str, str]:
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != _MANIFEST)
    return {path.relative_to(folder).as_posix(): _digest(path) for path in paths}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _age_of(checkpoint: Path) -> tuple[int, int] | None:
    """Sort key of a checkpoint's folder name, newest last; None for anything else."""
    match = _NAME.fullmatch(checkpoint.name)
    return (int(match[1]), int(match[2] or 0)) if match else None


def _free_name(folder: Path, *, version: int) -> Path:
    attempt, path = 0, folder / f"version-{version:06d}"
    while path.exists():
        attempt += 1
        path = folder / f"version-{version:06d}-{attempt}"
    return path


def _sync(folder: Path) -> None:
    """Make every file and folder under `folder` durable, before a rename makes them count."""
    for path in [*folder.rglob("*"), folder]:
        _sync_one(path)


def _sync_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
