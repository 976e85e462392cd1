"""`make bench`: what the engine, the gateway and the command line cost on this machine.

Human lines first; last, one JSON line a measure: {"measure", "value", "unit", "goal", "ok"}.
"""

from __future__ import annotations

import asyncio
import json
import operator
import random
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from a3r.config import TrialConfig
from a3r.episode import EpisodeKind
from a3r.swarm import SwarmClient
from flows.swarm_pool import SwarmPool, WarmServer
from gateway.engine import Sampling
from gateway.engines.hf import HFEngine
from trainer.policy import load_policy, resolve_model

PROMPT_TOKENS, NEW_TOKENS, CONCURRENCY = 32, 32, 32
ROUNDS, ROUND_S = 5, 1.0
"""Rounds that count, after one that warms up; seconds of the engine in a round."""
HTTP_CLIENTS, HTTP_EPISODES, TURNS = 32, 192, 5
_COMPARISONS = {">=": operator.ge, "<=": operator.le}


@dataclass(frozen=True)
class Measure:
    """One figure beside what it should be."""

    measure: str
    value: float
    unit: str
    goal: str

    def line(self) -> str:
        comparison, bound = self.goal.split()
        ok = _COMPARISONS[comparison](self.value, float(bound))
        return json.dumps({**self.__dict__, "value": round(self.value, 2), "ok": ok})


async def engine_ratio() -> Measure:
    """Tokens/s of the engine at 32 calls at once over one-by-one `generate`, same model, one thread.

    The two take turns, and the best round of each counts: whatever else runs on the machine slows single rounds.
    """
    torch.set_num_threads(1)
    policy = load_policy(resolve_model("small"), device="cpu")
    choice = random.Random(0)
    prompts = [[choice.randrange(10, 300) for _ in range(PROMPT_TOKENS)] for _ in range(CONCURRENCY)]
    engine = HFEngine(policy.model, num_slots=CONCURRENCY)
    widths = (1, 8, CONCURRENCY)
    rates: dict[int, list[float]] = {width: [] for width in widths}
    alone: list[float] = []
    for _ in range(ROUNDS + 1):
        for width in widths:
            rates[width].append(await _engine_rate(engine, prompts[:width]))
        alone.append(_generate_rate(policy.model, prompts[:8]))
    await engine.close()
    for width in widths:
        say(f"engine, {width} at once: {max(rates[width][1:]):.0f} tokens/s")
    say(f"generate, one by one: {max(alone[1:]):.0f} tokens/s")
    return Measure("engine_vs_generate_32", max(rates[CONCURRENCY][1:]) / max(alone[1:]), "ratio", ">= 20")


async def _engine_rate(engine: HFEngine, prompts: list[list[int]]) -> float:
    sampling = Sampling(max_tokens=NEW_TOKENS)
    start, tokens = time.perf_counter(), 0
    while time.perf_counter() - start < ROUND_S:
        done = await asyncio.gather(*(engine.generate(prompt, sampling) for prompt in prompts))
        tokens += sum(len(completion.ids) for completion in done)
    return tokens / (time.perf_counter() - start)


def _generate_rate(model: torch.nn.Module, prompts: list[list[int]]) -> float:
    options = {"min_new_tokens": NEW_TOKENS, "max_new_tokens": NEW_TOKENS, "do_sample": True, "pad_token_id": 0}
    with torch.inference_mode():
        start = time.perf_counter()
        for prompt in prompts:
            model.generate(torch.tensor([prompt]), **options)
        return len(prompts) * NEW_TOKENS / (time.perf_counter() - start)


async def http_turns() -> Measure:
    """Turns/s of growing conversations of five turns through real HTTP, ledger on, clients in another process."""
    with tempfile.TemporaryDirectory(prefix="a3r-bench-") as folder:
        pool = SwarmPool(Path(folder))
        try:
            server = await pool.server("small")
            config = TrialConfig().updated({"trainer.num_updates": 0})
            async with server.trial("bench", config=config, folder=Path(folder) / "trial"):
                rate = await asyncio.to_thread(_rate_from_elsewhere, server)
        finally:
            pool.close()
    say(f"http, {HTTP_CLIENTS} episodes at once, {TURNS} turns each: {rate:.0f} turns/s")
    return Measure("http_turns_per_s", rate, "turns/s", ">= 300")


def _rate_from_elsewhere(server: WarmServer) -> float:
    with ProcessPoolExecutor(1) as elsewhere:
        return elsewhere.submit(play, server.url, server.client_key).result()


def play(url: str, key: str) -> float:
    """Play evaluation episodes and give turns/s; a first round warms up."""
    client = SwarmClient(url, key)
    from a3r.swarm import ClaimedEpisode, Task

    def run(task: Task, episode: ClaimedEpisode) -> float:
        messages = [{"role": "user", "content": f"Guess the number from 1 to 31. Game {task.id}."}]
        for _ in range(TURNS):
            reply = episode.chat(messages, max_tokens=4)
            messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "higher"}]
        return 0.0

    def round_of(name: str, num: int) -> float:
        tasks = [Task(id=f"{name}-{number}", public={}) for number in range(num)]
        start = time.perf_counter()
        client.rollout(tasks, run, concurrency=HTTP_CLIENTS, kind=EpisodeKind.EVAL)
        return num * TURNS / (time.perf_counter() - start)

    round_of("warm", HTTP_CLIENTS)
    return round_of("timed", HTTP_EPISODES)


def cli_help() -> Measure:
    """Median wall time of `a3r --help`."""
    command = [str(Path(sys.executable).with_name("a3r")), "--help"]
    times = []
    for _ in range(6):
        start = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        times.append((time.perf_counter() - start) * 1000)
    say("a3r --help: " + ", ".join(f"{ms:.0f}" for ms in times[1:]) + " ms")
    return Measure("cli_help_ms", statistics.median(times[1:]), "ms", "<= 300")


def say(text: str) -> None:
    """A line for people."""
    print(text, flush=True)


def main() -> None:
    """Run all measures, one after another."""
    measures = [cli_help(), asyncio.run(engine_ratio()), asyncio.run(http_turns())]
    for measure in measures:
        print(measure.line())


if __name__ == "__main__":
    main()
