"""Warm start: supervised steps on the assistant's tokens of dialogues, before reinforcement learning."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Sequence

import torch

from a3r.episode import Message
from a3r.errors import EngineFault, UsageError
from a3r.sample import Sample
from trainer.batch import default_tokens, micro_batches
from trainer.policy import Policy, next_token_logits

_BATCHES_A_WINDOW = 8
"""Batches that are sorted by length together, so that rows of a batch are alike and little is padded."""


def warm_start(
    policy: Policy, dialogues: Sequence[list[Message]], *, steps: int, lr: float, batch_size: int, seed: int
) -> dict[str, float]:
    """Train the policy, in place, to say what the assistant says in `dialogues`.

    Each step is the token-mean cross entropy of `batch_size` dialogues, drawn without replacement until all were
    seen. AdamW (0.9, 0.95), gradient norm clipped at 1, linear warm-up over the first tenth and then linear decay to
    a tenth of `lr`. Deterministic in `seed`.

    Raises UsageError when the chat template does not fit the dialogues and EngineFault when the loss is not finite.
    """
    started = time.perf_counter()
    samples = encode_dialogues(policy, dialogues)
    if not samples:
        raise UsageError("There is nothing to warm-start on", why="no dialogue has an assistant message")
    parameters = list(policy.model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    losses: list[float] = []
    num_tokens = 0
    for step, rows in zip(range(steps), _batches(samples, batch_size=batch_size, seed=seed), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = lr * _schedule(step, steps=steps)
        losses.append(_accumulate(policy, rows))
        if not math.isfinite(losses[-1]):
            raise EngineFault(
                f"Warm start diverged at step {step}", why=f"the loss is {losses[-1]}", next_step="lower lr"
            )
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        num_tokens += sum(len(row.ids) for row in rows)
    seconds = time.perf_counter() - started
    metrics = {
        "warmstart/dialogues": float(len(samples)),
        "warmstart/steps": float(steps),
        "warmstart/seconds": seconds,
        "warmstart/tokens_per_s": num_tokens / seconds,
    }
    if losses:
        metrics |= {"warmstart/loss_first": losses[0], "warmstart/loss_last": losses[-1]}
    return metrics


def encode_dialogues(policy: Policy, dialogues: Sequence[list[Message]]) -> list[Sample]:
    """One row for each dialogue with an assistant message; the assistant's ids have mask 1, end token included.

    Ids are those that a server would see: each prompt is encoded up to the reply, and the reply after it. Raises
    UsageError when the template does not render a longer dialogue as a continuation of a shorter one, or closes a
    reply without an end token.
    """
    end_ids = _end_ids(policy)
    samples: list[Sample] = []
    for number, dialogue in enumerate(dialogues):
        segments = _segments(policy, dialogue)
        if not segments:
            continue
        encoded = policy.tokenizer([text for text, _ in segments], add_special_tokens=False)["input_ids"]
        ids: list[int] = []
        mask: list[int] = []
        for (text, is_reply), segment_ids in zip(segments, encoded, strict=True):
            num_trained = _reply_length(segment_ids, end_ids=end_ids, text=text) if is_reply else 0
            ids += segment_ids
            mask += [1] * num_trained + [0] * (len(segment_ids) - num_trained)
        samples.append(_sample(f"dialogue-{number}", ids, mask))
    return samples


def _segments(policy: Policy, dialogue: Sequence[Message]) -> list[tuple[str, bool]]:
    """The rendered dialogue up to its last reply, as (text, whether it is a reply) pieces in turn."""
    pieces: list[tuple[str, bool]] = []
    done = ""
    for index, message in enumerate(dialogue):
        if message["role"] != "assistant":
            continue
        prompt = _continued(done, _rendered(policy, dialogue[:index], for_reply=True))
        closed = _continued(done + prompt, _rendered(policy, dialogue[: index + 1], for_reply=False))
        pieces += [(prompt, False), (closed, True)]
        done += prompt + closed
    return pieces


def _rendered(policy: Policy, messages: Sequence[Message], *, for_reply: bool) -> str:
    return str(policy.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=for_reply))


def _continued(done: str, text: str) -> str:
    """What `text` adds to `done`. Raises UsageError when it does not begin with it."""
    if not text.startswith(done):
        raise UsageError(
            "The chat template rewrites earlier messages",
            why="a longer dialogue does not begin with the shorter one, so one row cannot hold it",
            next_step="use a template that keeps history as it was",
        )
    return text[len(done) :]


def _end_ids(policy: Policy) -> set[int]:
    configured = policy.model.generation_config.eos_token_id if policy.model.generation_config else None
    ids = [policy.tokenizer.eos_token_id, *(configured if isinstance(configured, list) else [configured])]
    return {token for token in ids if isinstance(token, int)}


def _reply_length(ids: Sequence[int], *, end_ids: set[int], text: str) -> int:
    """Tokens of the reply up to its end token; what the template adds behind it was never sampled."""
    for position in range(len(ids) - 1, -1, -1):
        if ids[position] in end_ids:
            return position + 1
    raise UsageError(
        "The chat template closes a reply without an end token",
        why=f"none of the tokenizer's end tokens is in {text[-60:]!r}",
        next_step="set eos_token to the token that ends a message",
    )


def _sample(name: str, ids: Sequence[int], mask: Sequence[int]) -> Sample:
    zeros = (0.0,) * len(ids)
    return Sample(
        episode_id=name, task_id=name, ids=tuple(ids), mask=tuple(mask), logprobs=zeros, advantages=zeros, version=0
    )


def _batches(samples: Sequence[Sample], *, batch_size: int, seed: int) -> Iterator[list[Sample]]:
    """Endless batches of `batch_size` rows of similar length, each row once before any a second time."""
    generator = random.Random(seed)
    waiting: list[Sample] = []
    while True:
        while len(waiting) < batch_size * _BATCHES_A_WINDOW:
            waiting += generator.sample(samples, k=len(samples))
        window, waiting = waiting[: batch_size * _BATCHES_A_WINDOW], waiting[batch_size * _BATCHES_A_WINDOW :]
        window.sort(key=lambda sample: len(sample.ids))
        batches = [window[start : start + batch_size] for start in range(0, len(window), batch_size)]
        generator.shuffle(batches)
        yield from batches


def _schedule(step: int, *, steps: int) -> float:
    warm_up = max(1, steps // 10)
    if step < warm_up:
        return (step + 1) / warm_up
    return 1.0 - 0.9 * (step - warm_up) / max(1, steps - warm_up)


def _accumulate(policy: Policy, rows: Sequence[Sample]) -> float:
    """Add the gradients of the rows' token-mean cross entropy, and return it in nats."""
    num_trained = sum(row.num_trained for row in rows)
    total = 0.0
    for batch in micro_batches(rows, max_tokens=default_tokens(policy.device), device=policy.device):
        logits = next_token_logits(policy.model, batch.inputs, batch.predecessors, temperature=1.0)
        loss = torch.nn.functional.cross_entropy(logits, batch.targets, reduction="sum") / num_trained
        loss.backward()
        total += loss.item()
    return total
