"""Claim episodes, play them with any agent, end them with a reward.

```python
client = SwarmClient()                                  # A3R_SWARM_URL and A3R_SWARM_KEY
with client.episode("task-7") as episode:
    answer = episode.chat([{"role": "user", "content": "Is 7 prime? Answer yes or no."}])
    episode.end(1.0 if answer == "yes" else 0.0)
```

`SwarmClient.rollout` keeps many episodes in flight. An agent of any framework takes `episode.base_url` and
`episode.api_key` instead of calling `chat`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from a3r.episode import Ending, EpisodeKind, Message, Observation, Task, Transcript
from a3r.errors import EnvironmentNotReady, InfrastructureFault, Refused, UsageError
from a3r.swarm.http import Address, Connections

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

    from openai import AsyncOpenAI, OpenAI

    from a3r.swarm.rollout import Tally
    from a3r.swarm.wire import Status


T = TypeVar("T")
PATIENCE_S = 60.0
"""How long a call waits for a server that is away, before it fails."""
_NUM_ASYNC_CALLS = 64


class Channel(Protocol):
    """Where an episode's actions go: the environment itself, or a pipe to whoever runs it."""

    def step(self, action: str) -> Observation: ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an episode was worth: its reward, and the parts that the reward is the sum of."""

    reward: float
    components: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, value: Outcome | float) -> Outcome:
        return value if isinstance(value, Outcome) else cls(float(value))


class ClaimedEpisode:
    """One attempt at a task. Its key opens this episode and nothing else."""

    def __init__(
        self,
        *,
        id: str,
        api_key: str,
        base_url: str,
        task_id: str,
        kind: EpisodeKind = EpisodeKind.TRAIN,
        policy: str = "",
        socket: str | None = None,
        environment: Channel | None = None,
    ) -> None:
        """`base_url` ends with `/v1`; `chat` goes through the Unix socket `socket` instead, where one is given."""
        self.id = id
        self.api_key = api_key
        self.base_url = base_url
        self.task_id = task_id
        self.kind = kind
        self.policy = policy
        self._environment = environment
        self._connections = Connections(Address(base_url.removesuffix("/v1"), socket_path=socket))
        self._threads: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._has_ended = False

    @property
    def has_ended(self) -> bool:
        """Whether this client ended or aborted it."""
        return self._has_ended

    def chat(self, messages: Sequence[Message], **parameters: Any) -> str:
        """Text of the policy's reply; empty when it consists of tool calls. `parameters` as in the OpenAI API.

        Raises Refused when the server declines, InfrastructureFault when it cannot be reached.
        """
        return self.complete(messages, **parameters)["choices"][0]["message"]["content"] or ""

    def complete(self, messages: Sequence[Message], **parameters: Any) -> dict[str, Any]:
        """The whole OpenAI chat completion. Raises as `chat` does, and UsageError for `stream`."""
        if parameters.get("stream"):
            raise UsageError("chat and complete do not stream", next_step="use episode.openai() to stream")
        body = {"messages": list(messages), **parameters}
        if self.policy:
            body.setdefault("model", self.policy)
        return self._call("POST", "/v1/chat/completions", body)

    async def achat(self, messages: Sequence[Message], **parameters: Any) -> str:
        """`chat` without blocking the event loop; calls of one episode may overlap."""
        import asyncio

        def call() -> str:
            return self.chat(messages, **parameters)

        return await asyncio.get_running_loop().run_in_executor(self._executor(), call)

    def openai(self) -> OpenAI:
        """A client of the `openai` package for this episode. Raises EnvironmentNotReady without the package."""
        return _openai_package().OpenAI(base_url=self.base_url, api_key=self.api_key)

    def async_openai(self) -> AsyncOpenAI:
        """The asynchronous twin of `openai`."""
        return _openai_package().AsyncOpenAI(base_url=self.base_url, api_key=self.api_key)

    def transcript(self) -> Transcript:
        """What was said so far, as the gateway recorded it."""
        return Transcript.from_json(self._call("GET", f"/swarm/episodes/{self.id}/transcript"))

    def step(self, action: str) -> Observation:
        """The environment's answer to an action. Raises UsageError when the episode has no environment."""
        if self._environment is None:
            raise UsageError(
                f"The episode {self.id} has no environment",
                why="the program offers none for its tasks",
                next_step="add `environment(task)` to the program, or answer without steps",
            )
        return self._environment.step(action)

    def end(self, outcome: Outcome | float) -> None:
        """Report the reward. Raises Refused when the episode has ended with another one or expired."""
        outcome = Outcome.of(outcome)
        body = {"reward": outcome.reward, "components": dict(outcome.components)}
        self._call("POST", f"/swarm/episodes/{self.id}/end", body)
        self._has_ended = True
        self._connections.close()

    def abort(self, reason: str = "", *, ending: Ending = Ending.ABORTED) -> None:
        """Give the episode up; another one takes its place. Harmless when it has ended already."""
        self._call("POST", f"/swarm/episodes/{self.id}/abort", {"ending": ending, "reason": reason[:2000]})
        self._has_ended = True
        self._connections.close()

    def heartbeat(self) -> None:
        """Keep the episode although it calls nothing. `SwarmClient.episode` does this by itself."""
        self._call("POST", f"/swarm/episodes/{self.id}/heartbeat", {})

    def _call(self, method: str, path: str, body: object = None) -> Any:
        return self._connections.call(method, path, key=self.api_key, body=body, patience_s=PATIENCE_S)

    def _executor(self) -> ThreadPoolExecutor:
        from concurrent.futures import ThreadPoolExecutor

        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(_NUM_ASYNC_CALLS, thread_name_prefix="a3r-achat")
            return self._threads


class SwarmClient:
    """A sampling node: light, on any machine, with any agent. May be shared by threads."""

    def __init__(
        self,
        base_url: str | None = None,
        key: str | None = None,
        *,
        client_id: str | None = None,
    ) -> None:
        """Address and client key default to A3R_SWARM_URL and A3R_SWARM_KEY.

        Raises EnvironmentNotReady when one of them is missing.
        """
        url = base_url or os.environ.get("A3R_SWARM_URL")
        self._key = key or os.environ.get("A3R_SWARM_KEY") or ""
        if not url or not self._key:
            missing = "address" if not url else "key"
            raise EnvironmentNotReady(
                f"The swarm server's {missing} is not known",
                next_step="pass it to SwarmClient or set A3R_SWARM_URL and A3R_SWARM_KEY",
            )
        self.client_id = client_id or f"client-{os.getpid()}-{os.urandom(3).hex()}"
        self.address = Address(url)
        self._connections = Connections(self.address)
        self._pulse = _Pulse()

    def status(self, *, patience_s: float = 0.0) -> Status:
        """What the server is doing."""
        from a3r.swarm.wire import Status

        return Status.model_validate(
            self._connections.call("GET", "/swarm/status", key=self._key, patience_s=patience_s)
        )

    def claim(
        self,
        task_id: str,
        *,
        kind: EpisodeKind = EpisodeKind.TRAIN,
        claim_id: str | None = None,
        temperature: float | None = None,
        lease_s: float = 60.0,
        environment: Channel | None = None,
        patience_s: float = PATIENCE_S,
    ) -> ClaimedEpisode:
        """An episode for a task. The same `claim_id` again gives the same episode.

        Waits up to `patience_s` for a server that is away, updating or full. Raises Refused (`training_done`,
        `group_full`, `batch_full`, ...) or InfrastructureFault.
        """
        claim = {
            "client_id": self.client_id,
            "claim_id": claim_id or f"{self.client_id}-{os.urandom(8).hex()}",
            "task_id": task_id,
            "kind": kind,
            "temperature": temperature,
            "lease_s": lease_s,
        }
        claimed = self._connections.call("POST", "/swarm/claim", key=self._key, body=claim, patience_s=patience_s)
        return ClaimedEpisode(
            id=claimed["episode_id"],
            api_key=claimed["api_key"],
            base_url=f"{self.address.url}/v1",
            task_id=task_id,
            kind=kind,
            policy=claimed["policy"],
            environment=environment,
        )

    @contextmanager
    def episode(
        self,
        task_id: str,
        *,
        kind: EpisodeKind = EpisodeKind.TRAIN,
        claim_id: str | None = None,
        temperature: float | None = None,
        lease_s: float = 60.0,
        environment: Channel | None = None,
        patience_s: float = PATIENCE_S,
    ) -> Iterator[ClaimedEpisode]:
        """A claimed episode whose lease is kept while the block runs.

        An exception aborts it as a client fault and goes on. Leaving the block without `end` or `abort` aborts
        it too and raises UsageError. Raises as `claim` does.
        """
        episode = self.claim(
            task_id,
            kind=kind,
            claim_id=claim_id,
            temperature=temperature,
            lease_s=lease_s,
            environment=environment,
            patience_s=patience_s,
        )
        with self.attending(episode, lease_s=lease_s):
            yield episode

    @contextmanager
    def attending(self, episode: ClaimedEpisode, *, lease_s: float = 60.0) -> Iterator[None]:
        """Keep the lease of a claimed episode and see that it ends; see `episode`."""
        with self._pulse.keeping(episode, every_s=lease_s / 3):
            try:
                yield
            except BaseException as error:
                _give_up(episode, f"{type(error).__name__}: {error}")
                raise
            if not episode.has_ended:
                _give_up(episode, "the client left it without a reward")
                raise UsageError(
                    f"The episode {episode.id} was left without a reward", next_step="call episode.end(reward)"
                )

    def rollout(
        self,
        tasks: Iterable[Task],
        run: Callable[[Task, ClaimedEpisode], Outcome | float],
        *,
        concurrency: int = 16,
        kind: EpisodeKind = EpisodeKind.TRAIN,
        temperature: float | None = None,
        lease_s: float = 60.0,
        patience_s: float = 600.0,
    ) -> Tally:
        """Play tasks with `concurrency` episodes in flight, each `run` in a thread; see `a3r.swarm.rollout`."""
        from a3r.swarm.rollout import Rollout

        rollout = Rollout(self, run, kind=kind, temperature=temperature, lease_s=lease_s, patience_s=patience_s)
        return rollout.play(tasks, concurrency=concurrency)


class _Pulse:
    """One thread that sends the heartbeats of all episodes of a client."""

    def __init__(self) -> None:
        self._kept: dict[ClaimedEpisode, float] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    @contextmanager
    def keeping(self, episode: ClaimedEpisode, *, every_s: float) -> Iterator[None]:
        with self._changed:
            self._kept[episode] = every_s
            if self._thread is None:
                self._thread = threading.Thread(target=self._beat, name="a3r-pulse", daemon=True)
                self._thread.start()
            self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                del self._kept[episode]

    def _beat(self) -> None:
        import time

        due: dict[ClaimedEpisode, float] = {}
        while True:
            now = time.monotonic()
            with self._changed:
                due = {episode: due.get(episode, now + every_s) for episode, every_s in self._kept.items()}
                late = [episode for episode, at in due.items() if at <= now]
                if not late:
                    self._changed.wait(min(due.values()) - now if due else None)
                    continue
                due.update({episode: now + self._kept[episode] for episode in late})
            for episode in late:
                # Whoever plays the episode meets the same refusal or fault with its next call.
                with suppress(Refused, InfrastructureFault):
                    episode.heartbeat()


def _give_up(episode: ClaimedEpisode, reason: str) -> None:
    if episode.has_ended:
        return
    # The error that led here matters more than one of giving up; the lease ends the episode anyway.
    with suppress(Refused, InfrastructureFault):
        episode.abort(reason, ending=Ending.CLIENT_FAULT)


def _openai_package() -> Any:
    try:
        import openai
    except ImportError as error:
        raise EnvironmentNotReady(
            "The package openai is not installed here",
            why="it is an optional convenience of the client",
            next_step="pip install openai, or use episode.chat",
        ) from error
    return openai
