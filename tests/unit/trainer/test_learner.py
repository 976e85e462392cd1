from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain

import pytest
import torch
from torch import Tensor
from transformers.models.qwen2 import modeling_qwen2

from a3r.config import TrainerConfig
from a3r.episode import Episode, EpisodeKind, Group
from a3r.errors import EngineFault, IllegalTransition, UsageError
from a3r.sample import Sample
from trainer.learner import Learner
from trainer.policy import Policy, load_policy, policy_weights
from trainer.timeline import merge_turns, samples_from_group

CONFIG = TrainerConfig(num_minibatches=2, lr=1e-3)
MakeGroup = Callable[..., Group]


def weights(policy: Policy) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in policy_weights(policy.model).items()}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def samples_of(groups: Sequence[Group]) -> list[Sample]:
    return [
        sample
        for group in groups
        for sample in samples_from_group(group, [episode.reward - 0.4 for episode in group.episodes])
    ]


def unmerged(groups: Sequence[Group]) -> list[Sample]:
    """One row a turn: every prompt computed again."""
    rows = []
    for sample_group in groups:
        for episode in sample_group.episodes:
            for turn in episode.turns:
                rows += samples_of([Group(sample_group.task_id, (replace(episode, turns=(turn,)),))])
    return rows


def gradient_of(policy: Policy, samples: Sequence[Sample], config: TrainerConfig, *, micro_batch_tokens: int) -> Tensor:
    learner = Learner(policy, config, seed=0, micro_batch_tokens=micro_batch_tokens)
    learner.forward_backward(samples, sequence=1)
    grads = [parameter.grad for parameter in policy.model.parameters()]
    return torch.cat([grad.flatten().clone() for grad in grads if grad is not None])


def relative_gap(left: Tensor, right: Tensor) -> float:
    return ((left - right).abs().max() / left.abs().max()).item()


@contextmanager
def norms_and_positions_in_float64(model: torch.nn.Module) -> Iterator[None]:
    """Qwen2 computes RMSNorm and RoPE in float32 whatever its weights are; here they follow the weights."""

    def norm(self, hidden: Tensor) -> Tensor:
        return self.weight * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    def rope(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        dim = 2 * self.inv_freq.numel()
        exponents = torch.arange(0, dim, 2, dtype=torch.float64) / dim
        frequencies = 1.0 / (self.config.rope_parameters["rope_theta"] ** exponents)
        angles = torch.cat([position_ids[..., None].double() * frequencies] * 2, dim=-1)
        return angles.cos(), angles.sin()

    classes = {modeling_qwen2.Qwen2RMSNorm: norm, modeling_qwen2.Qwen2RotaryEmbedding: rope}
    originals = {kind: kind.forward for kind in classes}
    for kind, forward in classes.items():
        kind.forward = forward
    try:
        yield
    finally:
        for kind, forward in originals.items():
            kind.forward = forward


FULL = TrainerConfig(kl_coef=0.1, entropy_coef=0.05, temperature=0.8)


def three_groups(make_group: MakeGroup) -> list[Group]:
    return [
        make_group(name, [1.0, 0.0, 0.5], num_turns=turns, temperature=0.8, noise=0.3)
        for name, turns in [("a", 4), ("b", 1), ("c", 3)]
    ]


@pytest.mark.parametrize("micro_batch_tokens", [1, 64, 4096])
def test_gradient_does_not_depend_on_merging_or_on_the_cut_in_float32(
    policy: Policy, make_group: MakeGroup, micro_batch_tokens: int
) -> None:
    groups = three_groups(make_group)
    merged, single = samples_of(groups), unmerged(groups)
    assert len(merged) == 9
    assert len(single) == 24
    reference = gradient_of(policy, merged, FULL, micro_batch_tokens=4096)
    for rows in (merged, single):
        assert relative_gap(reference, gradient_of(policy, rows, FULL, micro_batch_tokens=micro_batch_tokens)) <= 5e-6


@pytest.mark.parametrize("micro_batch_tokens", [1, 64, 4096])
def test_gradient_does_not_depend_on_merging_or_on_the_cut_in_float64(
    policy: Policy, make_group: MakeGroup, micro_batch_tokens: int
) -> None:
    groups = three_groups(make_group)
    policy.model.double()
    with norms_and_positions_in_float64(policy.model):
        reference = gradient_of(policy, samples_of(groups), FULL, micro_batch_tokens=4096)
        for rows in (samples_of(groups), unmerged(groups)):
            gap = relative_gap(reference, gradient_of(policy, rows, FULL, micro_batch_tokens=micro_batch_tokens))
            assert gap <= 1e-12


def test_an_episodes_gradient_does_not_depend_on_its_number_of_rows(policy: Policy, make_group: MakeGroup) -> None:
    group = make_group("a", [1.0, 0.0], num_turns=3)
    (first, *_), (second, *_) = (episode.turns for episode in group.episodes)
    assert len(merge_turns(group.episodes[0].turns)) == 1
    merged = gradient_of(policy, samples_of([group]), CONFIG, micro_batch_tokens=4096)
    only_first_unmerged = unmerged([Group("a", group.episodes[:1])]) + samples_of([Group("a", group.episodes[1:])])
    assert len(only_first_unmerged) == 4
    assert relative_gap(merged, gradient_of(policy, only_first_unmerged, CONFIG, micro_batch_tokens=4096)) <= 5e-6


def test_context_tokens_carry_no_loss_kl_or_entropy_and_do_not_count(policy: Policy, make_group: MakeGroup) -> None:
    """The loss of one row, computed from whole-model logits at its sampled positions alone."""
    group = make_group("a", [1.0, 0.0], num_turns=2, temperature=0.8, noise=0.2)
    (sample,) = samples_of([Group("a", group.episodes[:1])])
    learner = Learner(policy, FULL, seed=0)
    report = learner.forward_backward([sample], sequence=1)
    with torch.no_grad():
        logprobs = torch.log_softmax(policy.model(torch.tensor([sample.ids])).logits[0] / 0.8, dim=-1)
    losses = []
    for t, trained in enumerate(sample.mask):
        if trained:
            row = logprobs[t - 1]
            ratio = math.exp(row[sample.ids[t]].item() - sample.logprobs[t])
            surrogate = min(ratio * sample.advantages[t], min(max(ratio, 0.8), 1.2) * sample.advantages[t])
            losses.append(-surrogate - 0.05 * -(row.exp() * row).sum().item())
    assert report.num_trained == len(losses)
    assert report.loss == pytest.approx(sum(losses) / len(losses), abs=1e-5)
    assert report.reference_kl == pytest.approx(0.0, abs=1e-9)


def test_an_update_raises_the_version_and_accounts_for_every_episode(policy: Policy, make_group: MakeGroup) -> None:
    before = weights(policy)
    groups = [make_group("a", [1.0, 0.0]), make_group("b", [1.0, 1.0]), make_group("c", [0.0, 1.0])]
    update = Learner(policy, CONFIG, seed=0).update(groups)
    assert update.version == 1
    assert update.consumed == ("a.0", "a.1", "c.0", "c.1")
    assert update.filtered == ("b.0", "b.1")
    assert not same(before, weights(policy))
    metrics = update.metrics
    assert all(map(math.isfinite, metrics.values()))
    assert metrics["train/reward"] == pytest.approx(4 / 6)
    assert metrics["train/episodes"] == 6
    assert metrics["train/rows"] == 4
    assert metrics["train/turns"] == 3
    assert metrics["train/filtered_groups"] == 1
    assert metrics["train/staleness_mean"] == 0
    sampled = [len(t.sampled_ids) for group in groups for episode in group.episodes for t in episode.turns]
    assert metrics["train/reply_tokens"] == pytest.approx(sum(sampled) / 6)
    assert {"train/loss", "train/entropy", "train/clip_fraction", "train/grad_norm", "train/seconds"} <= metrics.keys()
    assert "train/kl" not in metrics


def test_learner_and_sampler_agree_on_fresh_tokens(policy: Policy, make_group: MakeGroup) -> None:
    groups = [make_group(name, [1.0, 0.0], temperature=0.8) for name in "abcd"]
    metrics = Learner(policy, CONFIG.updated({"temperature": 0.8}), seed=0).update(groups).metrics
    assert 0 <= metrics["train/mismatch_mean"] <= metrics["train/mismatch_max"] <= 1e-5


def test_mismatch_counts_fresh_tokens_only(policy: Policy, make_group: MakeGroup) -> None:
    learner = Learner(policy, CONFIG.updated({"num_minibatches": 1}), seed=0)
    learner.update([make_group("a", [1.0, 0.0])])
    stale_only = learner.update([make_group("b", [1.0, 0.0], version=0)]).metrics
    assert "train/mismatch_max" not in stale_only
    assert stale_only["train/staleness_mean"] == 1
    off = learner.update([make_group("c", [1.0, 0.0], version=0, noise=5.0), make_group("d", [1.0, 0.0], version=2)])
    assert off.metrics["train/mismatch_max"] <= 1e-5
    assert off.metrics["train/staleness_mean"] == 1


def test_a_batch_of_equal_rewards_moves_the_version_but_not_the_weights(policy: Policy, make_group: MakeGroup) -> None:
    before = weights(policy)
    update = Learner(policy, CONFIG, seed=0).update([make_group("a", [1.0, 1.0]), make_group("b", [0.0, 0.0])])
    assert (update.version, update.consumed) == (1, ())
    assert update.filtered == ("a.0", "a.1", "b.0", "b.1")
    assert same(before, weights(policy))
    assert update.metrics["train/rows"] == 0
    assert "train/loss" not in update.metrics


def test_an_episode_without_turns_is_consumed_and_only_moves_the_baseline(
    policy: Policy, make_group: MakeGroup
) -> None:
    group = make_group("a", [1.0])
    silent = Episode("a.silent", "a", EpisodeKind.TRAIN, "tiny", 0.0, ())
    update = Learner(policy, CONFIG, seed=0).update([Group("a", (*group.episodes, silent))])
    assert update.consumed == ("a.0", "a.silent")
    assert update.metrics["train/rows"] == 1


def test_training_raises_the_reward_of_what_it_rewards(policy: Policy, make_group: MakeGroup) -> None:
    group = make_group("a", [1.0, 0.0], num_turns=1)
    learner = Learner(policy, TrainerConfig(lr=3e-3, num_minibatches=1), seed=0)
    good, bad = (samples_of([Group("a", (episode,))]) for episode in group.episodes)
    for version in range(3):
        turns_now = [replace(e, turns=tuple(replace(t, version=version) for t in e.turns)) for e in group.episodes]
        learner.update([Group("a", tuple(turns_now))])
    assert learner.forward_backward(good, sequence=100).behaviour_kl > 0

    def mean_logprob(samples: list[Sample]) -> float:
        ids = torch.tensor([samples[0].ids])
        logprobs = torch.log_softmax(policy.model(ids).logits[0], dim=-1)
        chosen = [logprobs[t - 1, samples[0].ids[t]].item() for t, m in enumerate(samples[0].mask) if m]
        return sum(chosen) / len(chosen)

    def behaviour(samples: list[Sample]) -> float:
        return sum(samples[0].logprobs) / samples[0].num_trained

    assert mean_logprob(good) > behaviour(good)
    assert mean_logprob(bad) < behaviour(bad)


def test_the_same_groups_and_state_give_bit_identical_weights(policy: Policy, make_group: MakeGroup) -> None:
    batches = [[make_group(f"{n}{name}", [1.0, 0.0, 0.0], version=n) for name in "abc"] for n in range(2)]
    runs = []
    for _ in range(2):
        fresh = load_policy(policy.folder, device="cpu")
        learner = Learner(fresh, FULL.updated({"temperature": 1.0, "lr": 1e-3}), seed=7)
        updates = [learner.update(batch) for batch in batches]
        metrics = [
            {
                name: value
                for name, value in update.metrics.items()
                if name not in ("train/seconds", "train/tokens_per_s")
            }
            for update in updates
        ]
        runs.append((weights(fresh), metrics))
    assert same(runs[0][0], runs[1][0])
    assert runs[0][1] == runs[1][1]


def test_minibatches_hold_whole_groups_in_an_order_that_seed_and_version_fix(
    policy: Policy, make_group: MakeGroup
) -> None:
    groups = [make_group(name, [1.0, 0.0], num_turns=1) for name in "abcdefg"]
    learner = Learner(policy, TrainerConfig(num_minibatches=3), seed=1)
    parts = learner._minibatches(groups)
    assert [len(part) for part in parts] == [2, 2, 3]
    assert sorted(group.task_id for group in chain.from_iterable(parts)) == list("abcdefg")
    assert learner._minibatches(groups) == parts
    assert Learner(policy, TrainerConfig(num_minibatches=3), seed=2)._minibatches(groups) != parts
    assert [len(part) for part in learner._minibatches(groups[:2])] == [1, 1]


def test_repeating_a_call_by_its_sequence_number_changes_nothing(policy: Policy, make_group: MakeGroup) -> None:
    samples = samples_of([make_group("a", [1.0, 0.0])])
    learner = Learner(policy, CONFIG, seed=0)
    first = learner.forward_backward(samples, sequence=1)
    gradient = [parameter.grad.clone() for parameter in policy.model.parameters() if parameter.grad is not None]
    assert learner.forward_backward(samples, sequence=1) == first
    again = [parameter.grad for parameter in policy.model.parameters() if parameter.grad is not None]
    assert all(torch.equal(left, right) for left, right in zip(gradient, again, strict=True))
    step = learner.optim_step(sequence=2)
    stepped = weights(policy)
    assert learner.optim_step(sequence=2) == step
    assert same(stepped, weights(policy))
    for call in (lambda: learner.forward_backward(samples, sequence=1), lambda: learner.optim_step(sequence=3)):
        with pytest.raises(IllegalTransition):
            call()
    assert same(stepped, weights(policy))


def test_steps_without_a_finite_gradient_are_skipped_and_the_third_in_a_row_is_a_fault(
    policy: Policy, make_group: MakeGroup
) -> None:
    before = weights(policy)
    broken = [make_group(name, [1.0, 0.0], noise=math.inf) for name in "ab"]
    learner = Learner(policy, CONFIG, seed=0)
    update = learner.update(broken)
    assert update.metrics["train/skipped_steps"] == 2
    assert all(map(math.isfinite, update.metrics.values()))
    assert same(before, weights(policy))
    with pytest.raises(EngineFault, match="in a row"):
        learner.update(broken)
    assert same(before, weights(policy))


def test_a_taken_step_ends_a_row_of_skipped_ones(policy: Policy, make_group: MakeGroup) -> None:
    learner = Learner(policy, CONFIG.updated({"num_minibatches": 1}), seed=0)
    for _ in range(2):
        learner.update([make_group("a", [1.0, 0.0], noise=math.inf)])
        learner.update([make_group("b", [1.0, 0.0], noise=math.inf)])
        learner.update([make_group("c", [1.0, 0.0])])
    assert learner.version == 6


def test_the_kl_reference_is_the_starting_policy_and_is_copied_only_when_it_counts(
    policy: Policy, make_group: MakeGroup
) -> None:
    assert Learner(policy, CONFIG, seed=0).state().reference is None
    learner = Learner(policy, CONFIG.updated({"kl_coef": 0.1, "lr": 1e-2}), seed=0)
    start = weights(policy)
    first = learner.update([make_group("a", [1.0, 0.0])])
    second = learner.update([make_group("b", [1.0, 0.0], version=1)])
    assert first.metrics["train/kl"] == pytest.approx(0.0, abs=1e-9)
    assert second.metrics["train/kl"] > 1e-6
    reference = learner.state().reference
    assert reference is not None
    assert same(start, dict(reference))


def test_an_episode_sampled_at_another_temperature_is_refused(policy: Policy, make_group: MakeGroup) -> None:
    with pytest.raises(UsageError, match=r"temperature 0\.5"):
        Learner(policy, CONFIG, seed=0).update([make_group("a", [1.0, 0.0], temperature=0.5)])


def test_an_update_without_groups_is_refused(policy: Policy) -> None:
    with pytest.raises(UsageError, match="at least one group"):
        Learner(policy, CONFIG, seed=0).update([])


def test_a_config_can_name_its_own_loss_and_advantage(
    policy: Policy, make_group: MakeGroup, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_rules.py").write_text(
        "def loss(tokens, config):\n    return -tokens.advantages * tokens.logprobs\n"
        "def advantage(group, config):\n    return [e.reward for e in group.episodes]\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    config = CONFIG.updated({"loss": "own_rules:loss", "advantage": "own_rules:advantage", "num_minibatches": 1})
    group = make_group("a", [1.0, 0.0])
    update = Learner(policy, config, seed=0).update([group])
    turns = group.episodes[0].turns
    num_all = sum(len(turn.sampled_ids) for episode in group.episodes for turn in episode.turns)
    expected = -sum(sum(turn.logprobs) for turn in turns) / num_all
    assert update.metrics["train/loss"] == pytest.approx(expected, abs=1e-5)
