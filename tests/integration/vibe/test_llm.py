"""The LLM client against a scripted endpoint over real HTTP."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

import pytest

from a3r.errors import CoderFault, EnvironmentNotReady
from tests.fakes.llm_endpoint import KEY, Answer, Endpoint, refusal, scripted_endpoint
from vibe.llm import LLM, Reply

HELLO = [{"role": "user", "content": "hello"}]


def llm(endpoint: Endpoint, **changes: object) -> LLM:
    return replace(LLM(api_key=KEY, model="scripted", base_url=endpoint.base_url, timeout_s=5.0), **changes)


async def test_reply_brings_its_text_and_its_tokens():
    paid: list[Reply] = []
    with scripted_endpoint([Answer("hi")]) as endpoint:
        reply = await llm(endpoint, on_reply=paid.append).complete(HELLO)
    assert reply == Reply("hi", 100, 20)
    assert paid == [reply]
    assert endpoint.requests[0]["messages"] == HELLO
    assert endpoint.requests[0]["model"] == "scripted"


async def test_rate_limit_is_waited_out_as_the_endpoint_asks():
    with scripted_endpoint([refusal(429, "slow down", {"retry-after": "0.3"}), Answer("hi")]) as endpoint:
        start = time.monotonic()
        reply = await llm(endpoint).complete(HELLO)
    assert reply.text == "hi"
    assert time.monotonic() - start >= 0.3
    assert len(endpoint.requests) == 2


async def test_very_long_retry_after_is_not_waited_for():
    with (
        scripted_endpoint([refusal(429, "come back tomorrow", {"retry-after": "86400"})]) as endpoint,
        pytest.raises(CoderFault, match="too many requests"),
    ):
        await llm(endpoint).complete(HELLO)
    assert len(endpoint.requests) == 1


async def test_all_waits_together_are_bounded():
    with scripted_endpoint([refusal(503, "busy", {"retry-after": "60"})]) as endpoint:
        start = time.monotonic()
        with pytest.raises(CoderFault, match="did not answer"):
            await llm(endpoint, deadline_s=0.3).complete(HELLO)
    assert time.monotonic() - start < 5


async def test_server_errors_are_tried_again_and_then_named():
    with (
        scripted_endpoint([refusal(500, "boom", {"retry-after": "0.01"})]) as endpoint,
        pytest.raises(CoderFault, match=r"answered 500.*boom") as caught,
    ):
        await llm(endpoint, max_retries=2).complete(HELLO)
    assert len(endpoint.requests) == 3
    assert caught.value.next_step


async def test_one_server_error_does_not_end_it():
    with scripted_endpoint([refusal(500, "boom", {"retry-after": "0.01"}), Answer("hi")]) as endpoint:
        assert (await llm(endpoint).complete(HELLO)).text == "hi"


async def test_silence_is_a_coder_fault():
    with (
        scripted_endpoint([Answer("late", delay_s=0.6)]) as endpoint,
        pytest.raises(CoderFault, match=r"did not answer within 0.1 s"),
    ):
        await llm(endpoint, timeout_s=0.1, max_retries=0).complete(HELLO)


@pytest.mark.parametrize(
    "answer",
    [
        Answer(body="<html>gateway</html>", content_type="text/html"),
        Answer(body="{not json"),
        Answer(body="{}"),
        Answer(body='{"choices": []}'),
        Answer(body='{"choices": [{"index": 0}]}'),
        Answer(body='{"choices": "many"}'),
        Answer(body="[1, 2]"),
        Answer(body="null"),
    ],
)
async def test_what_is_no_chat_completion_is_a_coder_fault(answer: Answer):
    with scripted_endpoint([answer]) as endpoint, pytest.raises(CoderFault, match="no chat completion"):
        await llm(endpoint, max_retries=0).complete(HELLO)


async def test_empty_content_is_a_reply_that_was_paid_for():
    paid: list[Reply] = []
    with scripted_endpoint([Answer("")]) as endpoint:
        await llm(endpoint, on_reply=paid.append).complete(HELLO)
    assert paid == [Reply("", 100, 20)]


async def test_tokens_are_estimated_where_the_endpoint_reports_none():
    with scripted_endpoint([Answer("x" * 400, has_usage=False)]) as endpoint:
        reply = await llm(endpoint).complete([{"role": "user", "content": "y" * 800}])
    assert reply.completion_tokens == 100
    assert reply.prompt_tokens >= 200


async def test_wrong_key_is_refused_at_once_and_never_shown(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG)
    secret = "sk-this-is-secret"
    with (
        scripted_endpoint([Answer("hi")]) as endpoint,
        pytest.raises(EnvironmentNotReady, match="refuses the key") as caught,
    ):
        await llm(endpoint, api_key=secret).complete(HELLO)
    assert secret not in str(caught.value)
    assert caught.value.__cause__ is None
    assert secret not in caplog.text
    assert secret not in repr(llm(endpoint, api_key=secret))


async def test_unknown_model_is_an_environment_matter():
    with (
        scripted_endpoint([refusal(404, "no such model")]) as endpoint,
        pytest.raises(EnvironmentNotReady, match="knows no model 'scripted'"),
    ):
        await llm(endpoint).complete(HELLO)


async def test_unreachable_endpoint_is_a_coder_fault():
    with scripted_endpoint([Answer("hi")]) as endpoint:
        gone = llm(endpoint, max_retries=0)
    with pytest.raises(CoderFault, match="cannot be reached"):
        await gone.complete(HELLO)


def test_missing_configuration_is_named():
    with pytest.raises(EnvironmentNotReady, match=r"OPENAI_API_KEY and A3R_CODER_MODEL.*OPENAI_BASE_URL"):
        LLM.from_environment({})
    with pytest.raises(EnvironmentNotReady, match="configured: A3R_CODER_MODEL not set"):
        LLM.from_environment({"OPENAI_API_KEY": "k"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OPENAI_BASE_URL", "localhost:8000"),
        ("OPENAI_BASE_URL", "http://[::1"),
        ("OPENAI_BASE_URL", "http://127.0.0.1:99999/v1"),
        ("OPENAI_API_KEY", "k\u00e9y"),
        ("OPENAI_API_KEY", "key\n"),
    ],
)
def test_configuration_that_cannot_work_is_refused_by_name(name: str, value: str):
    environ = {"OPENAI_API_KEY": "k", "A3R_CODER_MODEL": "m", name: value}
    with pytest.raises(EnvironmentNotReady, match=name):
        LLM.from_environment(environ)


def test_configuration_comes_from_the_environment():
    environ = {"OPENAI_API_KEY": "k", "A3R_CODER_MODEL": "m", "OPENAI_BASE_URL": "http://127.0.0.1:1/v1"}
    configured = LLM.from_environment(environ)
    assert (configured.api_key, configured.model, configured.base_url) == ("k", "m", "http://127.0.0.1:1/v1")
