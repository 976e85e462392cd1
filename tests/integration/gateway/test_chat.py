"""The OpenAI face over a real server: plain, streamed, tools, limits, pins, retries."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from a3r.episode import EpisodeKind
from a3r.errors import EnvironmentNotReady, Refused
from a3r.swarm.client import ClaimedEpisode
from gateway.engines.scripted import ScriptedEngine
from gateway.history import read_turns
from gateway.keys import Role
from gateway.recorder import ForkReason
from gateway.serving import bind

USER = {"role": "user", "content": "Find the key."}
LOOK = {
    "type": "function",
    "function": {"name": "look", "description": "look", "parameters": {"type": "object", "properties": {}}},
}


async def post(swarm, key: str, *, retry: int = 0, **fields) -> httpx.Response:
    body = {"model": "small", "messages": [USER], **fields}
    headers = {"authorization": f"Bearer {key}", "x-stainless-retry-count": str(retry)}
    async with httpx.AsyncClient(base_url=swarm.url, headers=headers, timeout=20) as client:
        return await client.post("/v1/chat/completions", json=body)


async def claimed(swarm, *, kind: EpisodeKind = EpisodeKind.TRAIN, **options) -> ClaimedEpisode:
    return await asyncio.to_thread(swarm.client().claim, "task", kind=kind, **options)


async def test_the_openai_package_gets_a_reply(start, make_trial):
    swarm = await start(make_trial())
    episode = await claimed(swarm)
    reply = await episode.async_openai().chat.completions.create(model="small", messages=[USER], logprobs=True)
    assert reply.choices[0].message.content == "hello world"
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == len(reply.choices[0].logprobs.content)
    turns = read_turns(swarm.ledger.path, episode.id)
    assert [entry.logprob for entry in reply.choices[0].logprobs.content] == list(turns[0].logprobs)


async def test_the_openai_package_streams_tokens_as_they_are_sampled(start, make_trial, workshop):
    engine = workshop.engine("hello world and then", delay_s=0.02)
    swarm = await start(make_trial(), engine=engine)
    episode = await claimed(swarm)
    stream = await episode.async_openai().chat.completions.create(
        model="small", messages=[USER], stream=True, stream_options={"include_usage": True}
    )
    loop = asyncio.get_running_loop()
    arrived, text, finish, usage = [], "", None, None
    async for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            arrived.append(loop.time())
            text += chunk.choices[0].delta.content
        if chunk.choices and chunk.choices[0].finish_reason:
            finish = chunk.choices[0].finish_reason
            assert len(read_turns(swarm.ledger.path, episode.id)) == 1, "the last event comes after the commit"
        usage = chunk.usage or usage
    assert (text, finish) == ("hello world and then", "stop")
    assert arrived[-1] - arrived[0] > 0.03
    assert usage.completion_tokens > 2


async def test_hermes_tool_calls_are_parsed_and_streamed(start, make_trial, workshop):
    text = 'I look.\n<tool_call>\n{"name": "look", "arguments": {"at": "desk"}}\n</tool_call>'
    swarm = await start(make_trial(max_reply_tokens=200), engine=workshop.engine(text))
    episode = await claimed(swarm)
    client = episode.async_openai()
    plain = await client.chat.completions.create(model="small", messages=[USER], tools=[LOOK])
    message = plain.choices[0].message
    assert plain.choices[0].finish_reason == "tool_calls"
    assert message.content == "I look."
    assert json.loads(message.tool_calls[0].function.arguments) == {"at": "desk"}
    assert message.tool_calls[0].id == "call_0_0"

    history = [USER, message.model_dump(), {"role": "tool", "tool_call_id": "call_0_0", "content": "a key"}]
    await client.chat.completions.create(model="small", messages=history, tools=[LOOK])
    turns = read_turns(swarm.ledger.path, episode.id)
    assert turns[1].prompt_ids[: len(turns[0].prompt_ids + turns[0].sampled_ids)] == (
        turns[0].prompt_ids + turns[0].sampled_ids
    )
    assert turns[1].fork_reason is None

    stream = await client.chat.completions.create(model="small", messages=[USER], tools=[LOOK], stream=True)
    content, calls = "", []
    async for chunk in stream:
        content += chunk.choices[0].delta.content or ""
        calls += chunk.choices[0].delta.tool_calls or []
    assert content == "I look."
    assert [call.function.name for call in calls] == ["look"]


async def test_a_malformed_tool_call_stays_text(start, make_trial, workshop):
    swarm = await start(make_trial(max_reply_tokens=200), engine=workshop.engine("<tool_call>{oops}</tool_call>"))
    reply = (await post(swarm, (await claimed(swarm)).api_key, tools=[LOOK])).json()
    assert reply["choices"][0]["message"]["content"] == "<tool_call>{oops}</tool_call>"
    assert reply["choices"][0]["finish_reason"] == "stop"


async def test_n_replies_are_n_turns_with_seeds_of_their_own(start, make_trial, workshop, template):
    seeds = []

    def script(_prompt, sampling):
        seeds.append(sampling.seed)
        return [*template.encode(f"reply {len(seeds)}"), template.end_ids[0]]

    swarm = await start(make_trial(), engine=ScriptedEngine(script))
    episode = await claimed(swarm)
    reply = (await post(swarm, episode.api_key, n=3)).json()
    assert len({choice["message"]["content"] for choice in reply["choices"]}) == 3
    assert len(set(seeds)) == 3
    turns = read_turns(swarm.ledger.path, episode.id)
    assert [turn.fork_reason for turn in turns] == [None, None, None]
    assert [turn.index for turn in turns] == [0, 1, 2]


async def test_a_stop_string_cuts_reply_and_record_at_the_same_token(start, make_trial, workshop, template):
    swarm = await start(make_trial(), engine=workshop.engine("hello. world. more"))
    episode = await claimed(swarm)
    reply = (await post(swarm, episode.api_key, stop=["world"])).json()
    assert reply["choices"][0]["message"]["content"] == "hello. "
    assert reply["choices"][0]["finish_reason"] == "stop"
    (turn,) = read_turns(swarm.ledger.path, episode.id)
    assert template.decode(turn.sampled_ids) == "hello. world"
    assert len(turn.logprobs) == len(turn.sampled_ids)

    streamed = await episode.async_openai().chat.completions.create(
        model="small", messages=[USER], stop="world", stream=True
    )
    pieces = [chunk.choices[0].delta.content or "" async for chunk in streamed]
    assert "".join(pieces) == "hello. "


async def test_max_tokens_truncates(start, make_trial):
    swarm = await start(make_trial())
    reply = (await post(swarm, (await claimed(swarm)).api_key, max_tokens=1)).json()
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == 1


async def test_training_pins_the_distribution_and_says_so(start, make_trial, template):
    seen = []

    def script(_prompt, sampling):
        seen.append(sampling)
        return [template.end_ids[0]]

    swarm = await start(make_trial(temperature=0.7), engine=ScriptedEngine(script))
    episode = await claimed(swarm)
    reply = await post(swarm, episode.api_key, temperature=0.1, top_p=0.5, max_tokens=999, seed=3)
    assert reply.headers["x-a3r-pinned"] == "top_p, temperature, max_tokens, seed"
    assert (seen[0].temperature, seen[0].max_tokens) == (0.7, 32)
    assert (await post(swarm, episode.api_key, temperature=0.7, top_p=1)).headers.get("x-a3r-pinned") is None

    evaluated = await claimed(swarm, kind=EpisodeKind.EVAL, temperature=0.0)
    await post(swarm, evaluated.api_key, temperature=1.5, seed=5)
    assert (seen[-1].temperature, seen[-1].seed) == (0.0, 5)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"logit_bias": {"1": 5}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"suffix": "x"}, "suffix"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"temperature": 3}, "temperature"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "hello " * 700}]}, "context_length_exceeded"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "unsupported_content"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"top_logprobs": 4}, "top_logprobs"),
    ],
)
async def test_what_is_not_supported_is_refused_by_name(start, make_trial, fields, code):
    swarm = await start(make_trial())
    reply = await post(swarm, (await claimed(swarm)).api_key, **fields)
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == code
    assert swarm.engine.num_calls == 0


async def test_another_model_is_not_found(start, make_trial):
    swarm = await start(make_trial())
    reply = await post(swarm, (await claimed(swarm)).api_key, model="gpt-9")
    assert reply.status_code == 404


async def test_a_client_key_chats_outside_of_any_episode(start, make_trial, make_key):
    swarm = await start(make_trial())
    reply = await post(swarm, make_key(Role.CLIENT))
    assert reply.json()["choices"][0]["message"]["content"] == "hello world"
    refused = await post(swarm, make_key(Role.CLIENT), top_p=0.5)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "top_p")


async def test_a_retry_joins_the_call_it_repeats(start, make_trial, workshop):
    swarm = await start(make_trial(), engine=workshop.engine(delay_s=0.05))
    episode = await claimed(swarm)
    first = asyncio.create_task(post(swarm, episode.api_key))
    await asyncio.sleep(0.05)
    joined = await post(swarm, episode.api_key, retry=1)
    replayed = await post(swarm, episode.api_key, retry=2)
    assert (await first).json()["id"] == joined.json()["id"] == replayed.json()["id"]
    assert swarm.engine.num_calls == 1
    assert len(read_turns(swarm.ledger.path, episode.id)) == 1

    await post(swarm, episode.api_key)
    turns = read_turns(swarm.ledger.path, episode.id)
    assert [turn.fork_reason for turn in turns] == [None, ForkReason.BRANCH]


async def test_a_retry_after_a_failure_starts_anew(start, make_trial, template):
    swarm = await start(make_trial(), engine=ScriptedEngine.from_replies([]))
    episode = await claimed(swarm)
    assert (await post(swarm, episode.api_key)).json()["error"]["code"] == "engine_fault"
    assert (await post(swarm, episode.api_key, retry=1)).status_code == 502
    assert swarm.engine.num_calls == 2
    assert read_turns(swarm.ledger.path, episode.id) == ()


async def test_a_call_after_the_end_is_refused(start, make_trial, workshop):
    swarm = await start(make_trial(), engine=workshop.engine(delay_s=0.05))
    episode = await claimed(swarm)
    running = asyncio.create_task(post(swarm, episode.api_key))
    await asyncio.sleep(0.05)
    await asyncio.to_thread(episode.end, 1.0)
    for late in (await running, await post(swarm, episode.api_key)):
        assert (late.status_code, late.json()["error"]["code"]) == (409, "episode_ended")
    assert read_turns(swarm.ledger.path, episode.id) == ()
    assert swarm.engine.released == [episode.id]


async def test_the_unix_socket_serves_replies_and_nothing_else(start, make_trial):
    swarm = await start(make_trial())
    episode = await claimed(swarm)
    inside = ClaimedEpisode(
        id=episode.id, api_key=episode.api_key, base_url="http://gateway/v1", task_id="task", socket=str(swarm.socket)
    )
    assert await asyncio.to_thread(inside.chat, [USER]) == "hello world"
    with pytest.raises(Refused) as refused:
        await asyncio.to_thread(inside.end, 1.0)
    assert (refused.value.status, refused.value.code) == (403, "wrong_socket")


async def test_models_lists_the_policy(start, make_trial):
    swarm = await start(make_trial())
    episode = await claimed(swarm)
    assert [model.id async for model in episode.async_openai().models.list()] == ["small"]


async def test_sixty_four_connections_are_served_at_once(start, make_trial, workshop):
    swarm = await start(make_trial(group_size=64, batch_tasks=1), engine=workshop.engine(delay_s=0.01))
    episodes = [await claimed(swarm) for _ in range(64)]
    limits = httpx.Limits(max_connections=64)
    async with httpx.AsyncClient(base_url=swarm.url, timeout=20, limits=limits) as client:
        replies = await asyncio.gather(
            *(
                client.post(
                    "/v1/chat/completions",
                    json={"messages": [USER]},
                    headers={"authorization": f"Bearer {episode.api_key}"},
                )
                for episode in episodes
            )
        )
    assert {reply.status_code for reply in replies} == {200}
    assert all(len(read_turns(swarm.ledger.path, episode.id)) == 1 for episode in episodes)


async def test_a_taken_port_is_named(start, make_trial):
    swarm = await start(make_trial())
    port = int(swarm.url.rpartition(":")[2])
    with pytest.raises(EnvironmentNotReady, match=f"port {port}"):
        bind(host="127.0.0.1", port=port)
