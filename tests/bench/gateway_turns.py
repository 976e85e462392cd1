"""Turns a second through the gateway in process, with a scripted engine: parse, match, tokenise, record, commit.

Run `python -m tests.bench.gateway_turns`. Conversations of ten turns that grow; every turn is on disk
(`synchronous=FULL`) before its answer. CPU is of the whole process, the writer thread and the callers included.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path

import orjson
import uvloop

from a3r.config import TrainerConfig, TrialConfig
from a3r.episode import EpisodeKind
from a3r.swarm.wire import Claim, Configure, End
from gateway.desk import Options
from gateway.dialects import openai_chat
from gateway.engines.scripted import ScriptedEngine
from gateway.gateway import Gateway
from gateway.keys import KeyRing
from gateway.ledger import Ledger
from gateway.template import ChatTemplate
from tests.fakes.chatml import chatml_tokenizer

NUM_TURNS = 10


async def converse(gateway: Gateway, name: str) -> None:
    claim = Claim(client_id="bench", claim_id=name, task_id=name, kind=EpisodeKind.EVAL)
    claimed = await gateway.desk.claim(claim)
    claims = gateway.desk.verified(claimed.api_key)
    messages = [{"role": "system", "content": "You are careful."}, {"role": "user", "content": "Find the key. " * 4}]
    for turn in range(NUM_TURNS):
        body = orjson.dumps({"model": "small", "messages": messages})
        answer = await gateway.desk.chat(claims, openai_chat.parse(body), digest=body, retried=False)
        follow_up = {"role": "user", "content": f"and then? look at the bed, {name} {turn}"}
        messages += [answer.choices[0].reply, follow_up]
    await gateway.desk.end(claims, claimed.episode_id, End(reward=1.0))


async def main() -> None:
    template = ChatTemplate(chatml_tokenizer())
    reply = [*template.encode("hello world, look at the desk"), template.end_ids[0]]
    with tempfile.TemporaryDirectory() as folder, Ledger(Path(folder) / "ledger.db") as ledger:
        gateway = Gateway(
            ScriptedEngine(lambda _prompt, _sampling: reply),
            template=template,
            ledger=ledger,
            keys=KeyRing(b"sixteen bytes or more"),
            options=Options(policy="small", max_model_tokens=4096),
        )
        config = TrialConfig(trainer=TrainerConfig(max_reply_tokens=32))
        await gateway.open_trial(Configure(trial_id="bench", config=config, folder=folder))
        for concurrency, rounds in ((8, 1), (1, 20), (64, 5)):
            wall, cpu = time.perf_counter(), time.process_time()
            for index in range(rounds):
                names = (f"{concurrency}-{index}-{place}" for place in range(concurrency))
                await asyncio.gather(*(converse(gateway, name) for name in names))
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            turns = concurrency * rounds * NUM_TURNS
            print(f"{concurrency:3} at once: {turns / wall:6.0f} turns/s, {cpu / turns * 1e6:5.0f} us CPU a turn")
        await gateway.close_trial()


if __name__ == "__main__":
    uvloop.run(main())
