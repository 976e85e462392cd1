"""The learner: groups of episodes in, a new policy version out."""

from __future__ import annotations

import copy
import math
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from a3r.config import TrainerConfig
from a3r.episode import Group
from a3r.errors import EngineFault, IllegalTransition, UsageError
from a3r.sample import Sample
from trainer.advantage import advantage_from, checked_advantages
from trainer.batch import MicroBatch, default_tokens, micro_batches
from trainer.loss import TrainedTokens, checked_loss, entropy_of, is_clipped, k3, loss_from
from trainer.metrics import GradientPass, OptimiserStep, episode_metrics, pass_metrics
from trainer.policy import Policy, copy_weights, logprobs_of, next_token_logits, policy_weights
from trainer.timeline import own_turns, samples_from_group

_SKIPS_IN_A_ROW = 3

Answer = TypeVar("Answer", GradientPass, OptimiserStep)


@dataclass(frozen=True, slots=True)
class Update:
    """What one update did. Every episode it was given is in exactly one of `consumed` and `filtered`."""

    version: int
    """Policy version after the update."""
    metrics: dict[str, float]
    """Finite numbers named `train/...`; what was not measured is absent. See `trainer/README.md`."""
    consumed: tuple[str, ...]
    filtered: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LearnerState:
    """All that a learner holds besides the policy's weights."""

    version: int
    sequence: int
    num_skipped_in_a_row: int
    optimizer: Mapping[str, Tensor]
    """AdamW moments and step counts, as `parameter/field`; empty before the first step."""
    reference: Mapping[str, Tensor] | None
    """Weights of the KL reference, where there is one."""
    torch_rng: Tensor
    """State of torch's CPU generator, for losses that draw from it."""


class Learner:
    """Updates a policy in place.

    The weights it starts from are the KL reference, copied only when `kl_coef` is positive. Minibatch order is a
    function of seed and version, so that an update repeated after a crash is the same update.
    """

    def __init__(
        self, policy: Policy, config: TrainerConfig, *, seed: int, micro_batch_tokens: int | None = None
    ) -> None:
        self.policy = policy
        self.config = config
        self.seed = seed
        self._micro_batch_tokens = micro_batch_tokens or default_tokens(policy.device)
        self._loss = loss_from(config)
        self._advantage = advantage_from(config)
        self._reference = copy.deepcopy(policy.model).requires_grad_(False) if config.kl_coef > 0 else None
        self._optimizer = torch.optim.AdamW(
            policy.model.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=config.weight_decay, fused=True
        )
        self._version = 0
        self._sequence = 0
        self._answer: GradientPass | OptimiserStep | None = None
        self._num_skipped_in_a_row = 0

    @property
    def version(self) -> int:
        """Number of updates behind the policy's weights."""
        return self._version

    def update(self, groups: Sequence[Group]) -> Update:
        """Train on the groups whose rewards differ, in `num_minibatches` optimiser steps; the version rises by one.

        Raises UsageError when the groups do not fit the config, and EngineFault after three steps in a row without a
        finite loss and gradient.
        """
        started = time.perf_counter()
        self._check(groups)
        passes: list[GradientPass] = []
        steps: list[OptimiserStep] = []
        for minibatch in self._minibatches([group for group in groups if not group.has_equal_rewards]):
            if samples := self._samples(minibatch):
                passes.append(self.forward_backward(samples, sequence=self._sequence + 1))
                steps.append(self.optim_step(sequence=self._sequence + 1))
        metrics = episode_metrics(groups, version=self._version)
        metrics |= pass_metrics(passes, steps, seconds=time.perf_counter() - started)
        self._version += 1
        return Update(
            version=self._version,
            metrics=metrics,
            consumed=_episode_ids(group for group in groups if not group.has_equal_rewards),
            filtered=_episode_ids(group for group in groups if group.has_equal_rewards),
        )

    def forward_backward(self, samples: Sequence[Sample], *, sequence: int) -> GradientPass:
        """Set the gradients to those of the token-mean loss over `samples`, replacing earlier ones.

        Sequence numbers rise over calls of this and `optim_step`. Repeating the newest call does nothing and gives
        the same answer; an older number raises IllegalTransition.
        """
        if (repeated := self._repeated(sequence, GradientPass)) is not None:
            return repeated
        self._optimizer.zero_grad(set_to_none=True)
        num_trained = sum(sample.num_trained for sample in samples)
        batches = micro_batches(samples, max_tokens=self._micro_batch_tokens, device=self.policy.device)
        sums = [self._micro_pass(batch, num_trained=num_trained) for batch in batches]
        answer = GradientPass.from_sums(
            torch.stack(sums),
            num_trained=num_trained,
            num_rows=len(samples),
            num_tokens=sum(batch.num_tokens for batch in batches),
            has_reference=self._reference is not None,
        )
        return self._answered(sequence, answer)

    def optim_step(self, *, sequence: int) -> OptimiserStep:
        """Clip the gradients of the newest `forward_backward` and step; skip a step that is not finite.

        Idempotent by sequence number, as `forward_backward`. Raises IllegalTransition without fresh gradients and
        EngineFault when the third step in a row had to be skipped.
        """
        if (repeated := self._repeated(sequence, OptimiserStep)) is not None:
            return repeated
        if not isinstance(self._answer, GradientPass):
            raise IllegalTransition("There are no gradients to step on", next_step="call forward_backward first")
        norm = torch.nn.utils.clip_grad_norm_(self.policy.model.parameters(), self.config.max_grad_norm).item()
        is_skipped = not (math.isfinite(norm) and math.isfinite(self._answer.loss))
        if not is_skipped:
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._num_skipped_in_a_row = self._num_skipped_in_a_row + 1 if is_skipped else 0
        if self._num_skipped_in_a_row >= _SKIPS_IN_A_ROW:
            raise EngineFault(
                f"{_SKIPS_IN_A_ROW} optimiser steps in a row had no finite loss and gradient",
                why=f"the last loss was {self._answer.loss} and the gradient norm {norm}",
                next_step="lower trainer.lr or go back to the last checkpoint",
            )
        return self._answered(sequence, OptimiserStep(grad_norm=norm, is_skipped=is_skipped))

    def state(self) -> LearnerState:
        """Everything but the weights. Tensors are the live ones, not copies."""
        names: dict[Tensor, str] = {parameter: name for name, parameter in self.policy.model.named_parameters()}
        optimizer = {
            f"{names[parameter]}/{field}": tensor
            for parameter, fields in self._optimizer.state.items()
            for field, tensor in fields.items()
        }
        return LearnerState(
            version=self._version,
            sequence=self._sequence,
            num_skipped_in_a_row=self._num_skipped_in_a_row,
            optimizer=optimizer,
            reference=policy_weights(self._reference) if self._reference is not None else None,
            torch_rng=torch.get_rng_state(),
        )

    def restore(self, state: LearnerState) -> None:
        """Go on from `state`, which belongs to a learner of the same model. The weights are restored separately."""
        parameters: dict[str, Parameter] = dict(self.policy.model.named_parameters())
        moments: dict[Tensor, dict[str, Tensor]] = self._optimizer.state
        moments.clear()
        for key, tensor in state.optimizer.items():
            name, _, field = key.rpartition("/")
            parameter = parameters[name]
            moments[parameter][field] = tensor.clone().to(parameter.device)
        if self._reference is not None and state.reference is not None:
            copy_weights(self._reference, state.reference)
        self._version, self._sequence = state.version, state.sequence
        self._num_skipped_in_a_row = state.num_skipped_in_a_row
        self._answer = None
        torch.set_rng_state(state.torch_rng)

    def _check(self, groups: Sequence[Group]) -> None:
        if not groups:
            raise UsageError("An update needs at least one group")
        for turn in chain.from_iterable(own_turns(episode) for group in groups for episode in group.episodes):
            if turn.temperature != self.config.temperature:
                raise UsageError(
                    f"Episode {turn.episode_id} was sampled at temperature {turn.temperature}",
                    why=f"its logprobs are not those of the learner's temperature {self.config.temperature}",
                )

    def _minibatches(self, groups: Sequence[Group]) -> list[list[Group]]:
        """Whole groups in a seeded order, in at most `num_minibatches` near-equal parts."""
        order = list(groups)
        random.Random(f"{self.seed}:{self._version}").shuffle(order)
        num_parts = min(self.config.num_minibatches, len(order))
        bounds = [len(order) * part // num_parts for part in range(num_parts + 1)] if num_parts else [0]
        return [order[low:high] for low, high in zip(bounds, bounds[1:], strict=False)]

    def _samples(self, groups: Sequence[Group]) -> list[Sample]:
        return [
            sample
            for group in groups
            for sample in samples_from_group(group, checked_advantages(self._advantage, group, self.config))
        ]

    def _micro_pass(self, batch: MicroBatch, *, num_trained: int) -> Tensor:
        """Add the micro-batch's share to the gradients; its sums as in `GradientPass.from_sums`."""
        logits = next_token_logits(
            self.policy.model, batch.inputs, batch.predecessors, temperature=self.config.temperature
        )
        with torch.set_grad_enabled(self.config.entropy_coef > 0 or self.config.loss is not None):
            entropy = entropy_of(logits)
        tokens = TrainedTokens(
            logprobs=logprobs_of(logits, batch.targets),
            behaviour_logprobs=batch.behaviour_logprobs,
            advantages=batch.advantages,
            entropy=entropy,
            reference_logprobs=self._reference_logprobs(batch),
        )
        loss = checked_loss(self._loss, tokens, self.config).sum()
        (loss / num_trained).backward()
        return self._sums(tokens, loss, is_fresh=batch.versions == self._version)

    def _reference_logprobs(self, batch: MicroBatch) -> Tensor | None:
        if self._reference is None:
            return None
        with torch.no_grad():
            logits = next_token_logits(
                self._reference, batch.inputs, batch.predecessors, temperature=self.config.temperature
            )
            return logprobs_of(logits, batch.targets)

    @torch.no_grad()
    def _sums(self, tokens: TrainedTokens, loss: Tensor, *, is_fresh: Tensor) -> Tensor:
        reference = tokens.reference_logprobs
        gap = (tokens.logprobs - tokens.behaviour_logprobs).abs() * is_fresh
        return torch.stack(
            [
                loss,
                tokens.entropy.sum(),
                is_clipped(tokens, self.config).sum(),
                k3(tokens.behaviour_logprobs, tokens.logprobs).sum(),
                k3(tokens.logprobs, reference).sum() if reference is not None else torch.zeros_like(loss),
                is_fresh.sum(),
                gap.sum(),
                gap.max(),
            ]
        )

    def _repeated(self, sequence: int, kind: type[Answer]) -> Answer | None:
        """The remembered answer when `sequence` is the newest call again, None when it is a new call."""
        if sequence > self._sequence:
            return None
        if sequence == self._sequence and isinstance(self._answer, kind):
            return self._answer
        raise IllegalTransition(f"Call {sequence} is behind the learner, which is at {self._sequence}")

    def _answered(self, sequence: int, answer: Answer) -> Answer:
        self._sequence = sequence
        self._answer = answer
        return answer


def _episode_ids(groups: Iterable[Group]) -> tuple[str, ...]:
    return tuple(episode.id for group in groups for episode in group.episodes)
