"""One chat call: from a validated request to replies whose turns are on disk.

Training samples at the trial's temperature and from the policy's own distribution; what a caller asks for beyond
that is pinned and said so. Every call of an episode has a seed of its own, so that a completion does not depend on
what else is in flight.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from secrets import token_hex
from typing import Protocol

from a3r.episode import EpisodeKind, FinishReason, Turn
from a3r.errors import Refused
from gateway.dialects.openai_chat import ChatRequest, Choice, reply_of
from gateway.engine import Completion, Engine, Sampling
from gateway.episodes import LiveEpisode
from gateway.ledger import Ledger, TurnValues
from gateway.recorder import Prompt, Recorder
from gateway.streaming import TextStream
from gateway.template import ChatTemplate


class Listener(Protocol):
    """Hears of a reply while it is being sampled."""

    def pinned(self, names: tuple[str, ...]) -> None:
        """These parameters are not what was asked for."""
        ...

    def text(self, choice: int, piece: str) -> None:
        """A piece of a choice's text, as soon as it is certain."""
        ...


@dataclass(frozen=True, slots=True)
class Answer:
    """What a call gives back."""

    request_id: str
    created: int
    choices: tuple[Choice, ...]
    num_prompt: int
    pinned: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds the calls of a trial."""

    policy: str
    seed: int
    max_reply_tokens: int
    max_model_tokens: int


class Caller:
    """Samples replies for episodes, which records them, and for callers outside of any episode."""

    def __init__(self, engine: Engine, *, template: ChatTemplate, ledger: Ledger, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._template = template
        self._ledger = ledger
        self._clock = clock

    async def chat(self, request: ChatRequest, *, limits: Limits, listener: Listener | None = None) -> Answer:
        """A reply outside of any episode: not recorded. Raises Refused or EngineFault."""
        if request.shaping:
            name = request.shaping[0]
            raise Refused(f"The parameter {name!r} is not supported", next_step="leave it out", status=400, code=name)
        _check_model(request, limits)
        prompt = Recorder(self._template).locate(request.messages, tools=request.tools, prefill=request.prefill)
        temperature = 1.0 if request.temperature is None else request.temperature
        sampling = self._sampling(request, prompt, limits=limits, temperature=temperature)
        seeds = [None if request.seed is None else request.seed + index for index in range(request.n)]
        completions = await self._sample(prompt, sampling, request=request, seeds=seeds, session="", listener=listener)
        choices = tuple(
            self._choice(completion, request=request, call_ids=f"call_{token_hex(4)}")[0] for completion in completions
        )
        return self._answer(choices, prompt=prompt, pinned=(), request_id=f"chatcmpl-{token_hex(12)}")

    async def episode_chat(
        self, request: ChatRequest, *, episode: LiveEpisode, limits: Limits, listener: Listener | None = None
    ) -> Answer:
        """A reply within an episode; when this returns, its turns are on disk.

        Raises Refused (400 for what cannot be served, 409 once the episode has ended), EngineFault or
        InfrastructureFault.
        """
        _check_model(request, limits)
        prompt = episode.recorder.locate(request.messages, tools=request.tools, prefill=request.prefill)
        request, pinned = _pinned(request, episode=episode, limits=limits)
        temperature = 1.0 if request.temperature is None else request.temperature
        sampling = self._sampling(request, prompt, limits=limits, temperature=temperature)
        seeds = [_seed(episode, limits=limits, request=request, choice=choice) for choice in range(request.n)]
        episode.num_calls += 1
        if listener is not None:
            listener.pinned(pinned)
        completions = await self._sample(
            prompt, sampling, request=request, seeds=seeds, session=episode.id, listener=listener
        )
        episode.require_open()
        choices, rows = [], []
        for completion in completions:
            choice, row = self._record(completion, request=request, prompt=prompt, episode=episode, sampling=sampling)
            choices.append(choice)
            rows.append(row)
        await self._ledger.add_turns(rows)
        request_id = f"chatcmpl-{episode.id}-{rows[0]['index']}"
        return self._answer(tuple(choices), prompt=prompt, pinned=pinned, request_id=request_id)

    def _sampling(self, request: ChatRequest, prompt: Prompt, *, limits: Limits, temperature: float) -> Sampling:
        room = limits.max_model_tokens - len(prompt.ids)
        if room < 1:
            raise Refused(
                f"The prompt has {len(prompt.ids)} tokens",
                why=f"the model takes {limits.max_model_tokens} in all, with at least one to answer",
                next_step="shorten the messages",
                status=400,
                code="context_length_exceeded",
            )
        wanted = limits.max_reply_tokens if request.max_tokens is None else request.max_tokens
        return Sampling(max_tokens=min(wanted, room), temperature=temperature, stop_ids=self._template.end_ids)

    async def _sample(
        self,
        prompt: Prompt,
        sampling: Sampling,
        *,
        request: ChatRequest,
        seeds: Sequence[int | None],
        session: str,
        listener: Listener | None,
    ) -> list[Completion]:
        async def one(choice: int, seed: int | None) -> Completion:
            stream = None if listener is None else TextStream(self._template, request=request)

            def on_token(token: int) -> None:
                if stream is not None and listener is not None and (piece := stream.push(token)):
                    listener.text(choice, piece)

            return await self._engine.generate(
                prompt.ids, replace(sampling, seed=seed), session=session, on_token=on_token if stream else None
            )

        if len(seeds) == 1:
            return [await one(0, seeds[0])]
        tasks = [asyncio.create_task(one(choice, seed)) for choice, seed in enumerate(seeds)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    def _record(
        self,
        completion: Completion,
        *,
        request: ChatRequest,
        prompt: Prompt,
        episode: LiveEpisode,
        sampling: Sampling,
    ) -> tuple[Choice, TurnValues]:
        index = len(episode.turns)
        choice, completion = self._choice(completion, request=request, call_ids=f"call_{index}")
        turn = Turn(
            episode_id=episode.id,
            index=index,
            prompt_ids=prompt.ids,
            sampled_ids=completion.ids,
            logprobs=completion.logprobs,
            finish_reason=choice.finish_reason,
            policy=episode.row.policy,
            version=completion.version,
            temperature=sampling.temperature,
            fork_reason=prompt.fork_reason,
            drift=prompt.drift,
        )
        row = episode.record(
            prompt,
            turn,
            messages=request.messages,
            reply=choice.reply,
            tools=request.tools,
            prefill=request.prefill,
        )
        return choice, row

    def _choice(self, completion: Completion, *, request: ChatRequest, call_ids: str) -> tuple[Choice, Completion]:
        """A completion as its caller sees it, and as it is recorded: cut behind a stop string, if one came up."""
        completion, text = cut_at_stop(completion, stops=request.stop, template=self._template)
        reply = reply_of(text, parses_tools=request.parses_tools, call_ids=call_ids)
        finish_reason = completion.finish_reason
        if "tool_calls" in reply and finish_reason is FinishReason.STOP:
            finish_reason = FinishReason.TOOL_CALLS
        tokens = tuple(self._template.decode([token]) for token in completion.ids) if request.logprobs else ()
        logprobs = completion.logprobs if request.logprobs else ()
        return Choice(reply, finish_reason, tokens, logprobs, len(completion.ids)), completion

    def _answer(
        self, choices: tuple[Choice, ...], *, prompt: Prompt, pinned: tuple[str, ...], request_id: str
    ) -> Answer:
        return Answer(
            request_id=request_id,
            created=int(self._clock()),
            choices=choices,
            num_prompt=len(prompt.ids),
            pinned=pinned,
        )


def cut_at_stop(completion: Completion, *, stops: Sequence[str], template: ChatTemplate) -> tuple[Completion, str]:
    """The completion up to the id that completed the first stop string, and its text before that string.

    A beginning of a sample is itself a sample of the policy, with the logprobs it had.
    """
    text = template.decode(template.without_end(completion.ids))
    places = [place for place in (text.find(stop) for stop in stops) if place >= 0]
    if not places:
        return completion, text
    low, high = 1, len(completion.ids)
    while low < high:
        middle = (low + high) // 2
        shown = template.decode(completion.ids[:middle])
        low, high = (low, middle) if any(stop in shown for stop in stops) else (middle + 1, high)
    cut = replace(
        completion,
        ids=completion.ids[:low],
        logprobs=completion.logprobs[:low],
        finish_reason=FinishReason.STOP,
    )
    return cut, text[: min(places)]


def _pinned(request: ChatRequest, *, episode: LiveEpisode, limits: Limits) -> tuple[ChatRequest, tuple[str, ...]]:
    """The request as the episode allows it, and the parameters that were asked for differently."""
    pinned = list(request.shaping)
    if episode.row.temperature is not None:
        if request.temperature not in (None, episode.row.temperature):
            pinned.append("temperature")
        request = replace(request, temperature=episode.row.temperature)
    if request.max_tokens is not None and request.max_tokens > limits.max_reply_tokens:
        pinned.append("max_tokens")
        request = replace(request, max_tokens=limits.max_reply_tokens)
    if episode.kind is EpisodeKind.TRAIN and request.seed is not None:
        # A seed that a framework sets for all its calls would make the samples of a group alike.
        pinned.append("seed")
        request = replace(request, seed=None)
    return request, tuple(pinned)


def _seed(episode: LiveEpisode, *, limits: Limits, request: ChatRequest, choice: int) -> int:
    if request.seed is not None:
        return request.seed + choice
    row = episode.row
    source = (limits.seed, row.kind, row.task_id, row.group_index, row.place, episode.num_calls, choice)
    return int.from_bytes(blake2b(repr(source).encode(), digest_size=8).digest()) >> 1


def _check_model(request: ChatRequest, limits: Limits) -> None:
    if request.model not in (None, limits.policy):
        raise Refused(
            f"There is no model {request.model!r} here",
            next_step=f"ask for {limits.policy!r}",
            status=404,
            code="model_not_found",
        )
