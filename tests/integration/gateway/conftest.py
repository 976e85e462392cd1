from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from a3r.config import TrainerConfig, TrialConfig
from a3r.swarm import SwarmClient
from a3r.swarm.wire import Configure
from gateway.app import build_app
from gateway.desk import Options
from gateway.engines.scripted import ScriptedEngine
from gateway.gateway import Gateway
from gateway.keys import KeyRing, Role
from gateway.ledger import Ledger
from gateway.serving import serve
from gateway.template import ChatTemplate
from tests.fakes.chatml import chatml_tokenizer

SECRET = b"a secret of enough bytes"
FAR = 4e9


@pytest.fixture(scope="session")
def template() -> ChatTemplate:
    return ChatTemplate(chatml_tokenizer())


def trial(trial_id: str = "trial", **trainer: object) -> Configure:
    settings = {"num_updates": 2, "batch_tasks": 2, "group_size": 2, "max_reply_tokens": 32, **trainer}
    return Configure(trial_id=trial_id, config=TrialConfig(trainer=TrainerConfig(**settings)), folder="/nowhere")


def key(role: Role, *, expires_at: float = FAR) -> str:
    return KeyRing(SECRET).sign(role=role, subject="someone", expires_at=expires_at)


class FixedTrial:
    """A controller whose trial is open already."""

    async def configure(self, configure: Configure) -> None:
        raise AssertionError("not asked for")

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


@dataclass
class Swarm:
    """A gateway behind a real server."""

    gateway: Gateway
    engine: ScriptedEngine
    ledger: Ledger
    url: str
    socket: Path

    def client(self) -> SwarmClient:
        return SwarmClient(self.url, key(Role.CLIENT))


@pytest.fixture(scope="session")
def make_trial() -> Callable[..., Configure]:
    return trial


@pytest.fixture(scope="session")
def make_key() -> Callable[..., str]:
    return key


@dataclass
class Workshop:
    """Makes gateways over one ledger file."""

    folder: Path
    template: ChatTemplate

    def engine(self, text: str = "hello world", *, delay_s: float = 0.0, version: int = 0) -> ScriptedEngine:
        ids = [*self.template.encode(text), self.template.end_ids[0]]
        return ScriptedEngine(lambda _prompt, _sampling: ids, delay_s=delay_s, version=version)

    def ledger(self) -> Ledger:
        return Ledger(self.folder / "ledger.db")

    def gateway(self, engine: ScriptedEngine, ledger: Ledger, **options: object) -> Gateway:
        settings = replace(Options(policy="small", max_model_tokens=512, claim_wait_s=0.1, group_idle_s=0.1), **options)
        return Gateway(engine, template=self.template, ledger=ledger, keys=KeyRing(SECRET), options=settings)


@pytest.fixture
def workshop(tmp_path: Path, template: ChatTemplate) -> Workshop:
    return Workshop(tmp_path, template)


@pytest.fixture
async def start(workshop: Workshop) -> AsyncIterator[Callable[..., object]]:
    """Starts a server; all are ended with the test."""
    servers: list[tuple[asyncio.Task[None], Gateway, Ledger]] = []

    async def begin(configure: Configure, *, engine: ScriptedEngine | None = None, **options: object) -> Swarm:
        engine = engine or workshop.engine()
        ledger = workshop.ledger()
        gateway = workshop.gateway(engine, ledger, **options)
        await gateway.open_trial(configure)
        ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        socket = workshop.folder / "s"
        app = build_app(gateway, FixedTrial())
        serving = asyncio.create_task(serve(app, uds=socket, on_ready=ready.set_result))
        servers.append((serving, gateway, ledger))
        return Swarm(gateway, engine, ledger, f"http://127.0.0.1:{await ready}", socket)

    yield begin
    for serving, gateway, ledger in servers:
        serving.cancel()
        await asyncio.wait([serving])
        await gateway.close_trial()
        ledger.close()
