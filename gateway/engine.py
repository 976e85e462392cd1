"""The inference seam: token ids in, sampled ids with their logprobs out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from a3r.episode import FinishReason


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one completion is sampled. The recorded logprobs are those of this very distribution."""

    max_tokens: int
    temperature: float = 1.0
    """0 is greedy; its logprobs are those of temperature 1."""
    stop_ids: tuple[int, ...] = ()
    """Token ids that end the completion; the one sampled is kept as its last id."""
    seed: int | None = None
    """Makes this completion a function of prompt, weights and seed, whatever else is in flight."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What the engine sampled. `len(ids) == len(logprobs)`."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    version: int
    """Policy version of every token."""


class Engine(Protocol):
    """An inference engine. Errors inside it surface as `a3r.errors.EngineFault`."""

    @property
    def version(self) -> int:
        """Version of the weights that new calls will sample from."""
        ...

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        session: str = "",
        on_token: Callable[[int], None] | None = None,
    ) -> Completion:
        """Sample a completion. `session` names whose earlier keys and values may be reused (an episode);
        `on_token` is called on the event loop for each id as it is sampled."""
        ...

    async def release(self, session: str) -> None:
        """Forget cached keys and values of a session that will not call again."""
        ...

    async def pause(self) -> None:
        """Return once no call is being computed; later calls wait for `resume`."""
        ...

    async def resume(self) -> None:
        """Let waiting calls go on."""
        ...

    async def publish(self, version: int) -> None:
        """The policy's weights are now `version`: drop every cache of older ones. Called while paused."""
        ...

    async def close(self) -> None:
        """End the engine's thread or process; calls in flight fail with EngineFault."""
        ...
