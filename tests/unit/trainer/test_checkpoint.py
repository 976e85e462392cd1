from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from a3r.config import TrainerConfig
from a3r.episode import Group
from a3r.errors import EnvironmentNotReady, UsageError
from trainer.checkpoint import export_checkpoint, latest_checkpoint, load_checkpoint, save_checkpoint
from trainer.learner import Learner
from trainer.policy import Policy, load_policy, policy_weights

CONFIG = TrainerConfig(num_minibatches=2, lr=1e-2, kl_coef=0.1)
MakeGroup = Callable[..., Group]


def weights(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in policy_weights(policy.model).items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def batches(make_group: MakeGroup, count: int) -> list[list[Group]]:
    return [[make_group(f"{n}{name}", [1.0, 0.0], version=n) for name in "abc"] for n in range(count)]


@pytest.mark.parametrize("kind", ["policy_folder", "tied_folder"])
def test_training_that_continues_from_a_checkpoint_equals_training_that_never_stopped(
    kind: str, request: pytest.FixtureRequest, make_group: MakeGroup, tmp_path: Path
) -> None:
    folder = request.getfixturevalue(kind)
    work = batches(make_group, 4)
    whole = load_policy(folder, device="cpu")
    uninterrupted = Learner(whole, CONFIG, seed=3)
    for batch in work[:2]:
        uninterrupted.update(batch)
    saved = save_checkpoint(tmp_path / "ckpt", uninterrupted, consumed=["e1", "e2"])
    rest = [uninterrupted.update(batch).metrics["train/loss"] for batch in work[2:]]

    policy = load_policy(folder, device="cpu")
    resumed = Learner(policy, CONFIG, seed=3)
    assert load_checkpoint(saved, resumed) == ("e1", "e2")
    assert resumed.version == 2
    assert [resumed.update(batch).metrics["train/loss"] for batch in work[2:]] == rest
    assert same(weights(whole), weights(policy))


def test_the_random_state_continues_too(policy: Policy, tmp_path: Path) -> None:
    learner = Learner(policy, CONFIG, seed=0)
    saved = save_checkpoint(tmp_path, learner, consumed=[])
    drawn = torch.rand(3)
    load_checkpoint(saved, learner)
    assert torch.equal(torch.rand(3), drawn)


def test_the_newest_checkpoint_is_the_latest_and_none_is_overwritten(
    policy: Policy, make_group: MakeGroup, tmp_path: Path
) -> None:
    assert latest_checkpoint(tmp_path / "nowhere") is None
    learner = Learner(policy, CONFIG, seed=0)
    first = save_checkpoint(tmp_path, learner, consumed=[])
    again = save_checkpoint(tmp_path, learner, consumed=["x"])
    assert [first.name, again.name] == ["version-000000", "version-000000-1"]
    assert latest_checkpoint(tmp_path) == again
    learner.update(batches(make_group, 1)[0])
    newest = save_checkpoint(tmp_path, learner, consumed=["x"])
    assert latest_checkpoint(tmp_path) == newest


def damage_weights(checkpoint: Path) -> None:
    path = checkpoint / "policy" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def drop_learner(checkpoint: Path) -> None:
    (checkpoint / "learner.safetensors").unlink()


def tear_manifest(checkpoint: Path) -> None:
    path = checkpoint / "manifest.json"
    path.write_bytes(path.read_bytes()[:50])


def drop_manifest(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").unlink()


def other_format(checkpoint: Path) -> None:
    path = checkpoint / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": "theirs-9"}), encoding="utf-8")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (damage_weights, r"damaged: policy/model\.safetensors"),
        (drop_learner, r"missing or damaged: learner\.safetensors"),
        (tear_manifest, "torn or not ours"),
        (drop_manifest, "cannot be read"),
        (other_format, "theirs-9"),
    ],
)
def test_a_torn_or_foreign_checkpoint_is_refused_and_the_last_good_one_is_used(
    policy: Policy,
    make_group: MakeGroup,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Path], None],
    reason: str,
) -> None:
    learner = Learner(policy, CONFIG, seed=0)
    good = save_checkpoint(tmp_path, learner, consumed=[])
    learner.update(batches(make_group, 1)[0])
    torn = save_checkpoint(tmp_path, learner, consumed=["e"])
    damage(torn)
    before = weights(policy)
    with pytest.raises(EnvironmentNotReady, match=reason):
        load_checkpoint(torn, learner)
    assert same(before, weights(policy))
    with caplog.at_level(logging.WARNING, logger="trainer.checkpoint"):
        assert latest_checkpoint(tmp_path) == good
    assert torn.name in caplog.text


def test_what_a_crash_left_half_written_does_not_count(policy: Policy, tmp_path: Path) -> None:
    learner = Learner(policy, CONFIG, seed=0)
    saved = save_checkpoint(tmp_path, learner, consumed=[])
    shutil.copytree(saved / "policy", tmp_path / ".draft" / "policy")
    assert latest_checkpoint(tmp_path) == saved
    newer = save_checkpoint(tmp_path, learner, consumed=[])
    assert latest_checkpoint(tmp_path) == newer
    assert not (tmp_path / ".draft").exists()


@pytest.mark.parametrize(
    ("config", "seed", "differing"),
    [(CONFIG.updated({"lr": 1e-4}), 0, "lr"), (CONFIG, 1, "seed")],
)
def test_a_checkpoint_of_another_trial_is_refused(
    policy: Policy, tmp_path: Path, config: TrainerConfig, seed: int, differing: str
) -> None:
    saved = save_checkpoint(tmp_path, Learner(policy, CONFIG, seed=0), consumed=[])
    with pytest.raises(UsageError, match=f"differs in {differing}"):
        load_checkpoint(saved, Learner(policy, config, seed=seed))


def test_a_trial_may_continue_for_more_updates(policy: Policy, tmp_path: Path) -> None:
    saved = save_checkpoint(tmp_path, Learner(policy, CONFIG, seed=0), consumed=["e"])
    longer = CONFIG.updated({"num_updates": 999, "checkpoint_every": 5})
    assert load_checkpoint(saved, Learner(policy, longer, seed=0)) == ("e",)


def test_a_checkpoint_of_another_model_is_refused(policy: Policy, tied_folder: Path, tmp_path: Path) -> None:
    saved = save_checkpoint(tmp_path, Learner(policy, CONFIG, seed=0), consumed=[])
    other = Learner(load_policy(tied_folder, device="cpu"), CONFIG, seed=0)
    before = weights(other.policy)
    with pytest.raises(UsageError, match="another model"):
        load_checkpoint(saved, other)
    assert same(before, weights(other.policy))


def test_an_exported_checkpoint_is_a_model_folder_with_config_and_tokenizer(
    policy: Policy, make_group: MakeGroup, tmp_path: Path
) -> None:
    learner = Learner(policy, CONFIG, seed=0)
    learner.update(batches(make_group, 1)[0])
    saved = save_checkpoint(tmp_path / "ckpt", learner, consumed=[])
    for _ in range(2):
        export_checkpoint(saved, tmp_path / "out")
    exported = load_policy(tmp_path / "out", device="cpu")
    assert same(weights(policy), weights(exported))
    assert exported.tokenizer.encode("guess") == policy.tokenizer.encode("guess")
