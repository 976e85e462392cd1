"""Calls to a language model behind any OpenAI-compatible URL. The only importer of `openai`.

Retries are the client library's own: 408, 409, 429, 5xx and broken connections, with back-off, honouring
Retry-After up to two minutes. `deadline_s` bounds all tries and waits of one call together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import openai
from openai import AsyncOpenAI
from pydantic import AnyHttpUrl, BaseModel, Field, TypeAdapter, ValidationError

from a3r.episode import Message
from a3r.errors import CoderFault, EnvironmentNotReady

_NEXT = "check OPENAI_BASE_URL, OPENAI_API_KEY and A3R_CODER_MODEL, or use the offline coder (--coder recipes)"
_CHARACTERS_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer of the model. Where the endpoint reports no usage, tokens are counted as one for four characters."""

    text: str
    prompt_tokens: int
    completion_tokens: int

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


def _is_url(text: str) -> bool:
    try:
        TypeAdapter(AnyHttpUrl).validate_python(text)
    except ValidationError:
        return False
    return True


def _unobserved(_reply: Reply) -> None:
    """Default observer: the caller reads the tokens from the reply itself."""


@dataclass(frozen=True, slots=True)
class LLM:
    """Where and how to call one model. The key appears in no repr, message or log of ours."""

    api_key: str = field(repr=False)
    model: str
    base_url: str | None = None
    """None is OpenAI's own."""
    timeout_s: float = 120.0
    """Longest silence within one try."""
    max_retries: int = 4
    deadline_s: float = 900.0
    """Longest time for all tries of one call, waits included."""
    on_reply: Callable[[Reply], None] = _unobserved
    """Told of every reply that was paid for, usable or not."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], *, on_reply: Callable[[Reply], None] = _unobserved) -> LLM:
        """The model that OPENAI_API_KEY, A3R_CODER_MODEL and OPENAI_BASE_URL (optional) name.

        Raises EnvironmentNotReady that lists the missing ones.
        """
        missing = [name for name in ("OPENAI_API_KEY", "A3R_CODER_MODEL") if not environ.get(name)]
        if missing:
            raise EnvironmentNotReady(
                "No LLM coder is configured: " + " and ".join(missing) + " not set",
                why="writing a Program with a language model needs an OpenAI-compatible endpoint",
                next_step="set OPENAI_API_KEY and A3R_CODER_MODEL, and OPENAI_BASE_URL for an endpoint other than "
                "OpenAI's own, or use the offline coder (--coder recipes)",
            )
        key, url = environ["OPENAI_API_KEY"], environ.get("OPENAI_BASE_URL") or None
        if not (key.isascii() and key.isprintable()):
            raise EnvironmentNotReady("OPENAI_API_KEY holds a character that no key has", next_step="set it again")
        if url is not None and not _is_url(url):
            raise EnvironmentNotReady(
                f"OPENAI_BASE_URL {url!r} is no URL", next_step="set it like http://127.0.0.1:8000/v1"
            )
        return cls(
            api_key=key,
            model=environ["A3R_CODER_MODEL"],
            base_url=url,
            on_reply=on_reply,
        )

    async def complete(self, messages: Sequence[Message]) -> Reply:
        """The model's answer to `messages`.

        Raises EnvironmentNotReady when the endpoint refuses the key, the model or the URL; CoderFault when it
        stays out of reach, times out, or answers with something that is no chat completion.
        """
        client = AsyncOpenAI(
            api_key=self.api_key,
            base_url=self.base_url or "https://api.openai.com/v1",
            timeout=self.timeout_s,
            max_retries=self.max_retries,
        )
        try:
            async with client, asyncio.timeout(self.deadline_s):
                answer = await client.chat.completions.with_raw_response.create(
                    model=self.model,
                    messages=list(messages),  # pyright: ignore[reportArgumentType] - ours are the same JSON
                )
                reply = _reply(answer.text, messages)
        except (openai.OpenAIError, ValidationError, TimeoutError) as error:
            # `from None`: an endpoint's own message may repeat the key, and a logged cause would show it.
            raise self._fault(error) from None
        self.on_reply(reply)
        return reply

    def _fault(self, error: Exception) -> CoderFault | EnvironmentNotReady:
        why = self._scrubbed(str(error)) or type(error).__name__
        match error:
            case openai.AuthenticationError() | openai.PermissionDeniedError():
                return EnvironmentNotReady("The LLM endpoint refuses the key", why=why, next_step=_NEXT)
            case openai.NotFoundError():
                return EnvironmentNotReady(
                    f"The LLM endpoint knows no model {self.model!r} or no such URL", why=why, next_step=_NEXT
                )
            case openai.RateLimitError():
                return CoderFault(
                    f"The LLM endpoint kept refusing for too many requests ({self.max_retries + 1} tries)",
                    why=why,
                    next_step="wait, or raise the endpoint's limits",
                )
            case openai.APIStatusError():
                what = f"The LLM endpoint answered {error.status_code} to the last of its tries"
                return CoderFault(what, why=why, next_step=_NEXT)
            case openai.APITimeoutError() | TimeoutError():
                return CoderFault(
                    f"The LLM endpoint did not answer within {self.timeout_s:g} s a try",
                    why=why,
                    next_step="try again, or use a faster model",
                )
            case openai.APIConnectionError():
                return CoderFault("The LLM endpoint cannot be reached", why=why, next_step=_NEXT)
        return CoderFault("The LLM endpoint answered something that is no chat completion", why=why, next_step=_NEXT)

    def _scrubbed(self, text: str) -> str:
        return text.replace(self.api_key, "[key]")[:500]


class _Message(BaseModel):
    content: str | None = None


class _Choice(BaseModel):
    message: _Message


class _Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int


class _Completion(BaseModel):
    """What is read of a chat completion. The client library builds its own without validating it."""

    choices: list[_Choice] = Field(min_length=1)
    usage: _Usage | None = None


def _reply(body: str, messages: Sequence[Message]) -> Reply:
    completion = _Completion.model_validate_json(body)
    text = completion.choices[0].message.content or ""
    if completion.usage:
        return Reply(text, completion.usage.prompt_tokens, completion.usage.completion_tokens)
    sent = sum(len(str(message["content"])) for message in messages)
    return Reply(text, sent // _CHARACTERS_PER_TOKEN, len(text) // _CHARACTERS_PER_TOKEN)
