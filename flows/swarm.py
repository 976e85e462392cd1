"""The swarm server: one process that serves a policy, keeps the books and trains it.

Composes gateway and trainer, which do not know one another: the policy's module is handed to the engine and
to the learner; whole groups walk from the gateway's pool to the learner; a new version is published while the
engine is paused. Imports no Prefect, MLflow or Optuna. `python -m flows.swarm FILE` serves what FILE describes.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
import uvloop
from pydantic import Field

from a3r.config import Config
from a3r.errors import A3RError, EnvironmentNotReady, Refused
from a3r.swarm.wire import Configure, EngineState
from flows.events import EventKind, EventLog
from flows.processes import ProcessIdentity
from gateway.app import GatewayApp, build_app
from gateway.desk import Options
from gateway.engines.hf import HFEngine
from gateway.gateway import Gateway
from gateway.keys import KeyRing, Role
from gateway.ledger import Ledger
from gateway.serving import serve
from gateway.template import ChatTemplate
from trainer.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from trainer.learner import Learner
from trainer.policy import Policy, load_policy, reset_policy, resolve_model

T = TypeVar("T")

KEY_LIFETIME_S = 30 * 86400.0


class ServerConfig(Config):
    """One swarm server."""

    model: str = "small"
    """`small` or the path of a local Hugging Face folder."""
    folder: str
    """Where the ledger, the secret, the socket and `server.json` lie."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=0, ge=0, le=65535)
    """TCP port; 0 takes a free one."""
    num_threads: int = Field(default=1, ge=1)
    """Threads torch computes with."""
    num_slots: int = Field(default=64, ge=1)
    """Calls that are computed at once."""
    max_length: int = Field(default=1024, ge=16)
    """Most tokens of prompt and reply together."""


@dataclass(frozen=True, slots=True)
class ServerRecord:
    """How a running server is reached: the content of `server.json`, readable by its owner only."""

    url: str
    socket: str
    pid: int
    started_at: float
    policy: str
    admin_key: str
    client_key: str


class Optimiser:
    """Trains one trial at a time on what the gateway gathers. Implements the gateway's Controller.

    A trial whose folder holds a checkpoint goes on from there; any other one starts from the base weights.
    """

    def __init__(self, gateway: Gateway, *, engine: HFEngine, policy: Policy) -> None:
        self._gateway = gateway
        self._engine = engine
        self._policy = policy
        self._computing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="learner")
        self._configured: Configure | None = None
        self._training: asyncio.Task[None] | None = None

    async def configure(self, configure: Configure) -> None:
        """Take the trial that is trained next. Raises Refused when this server holds another model or is busy."""
        if configure.config.model != self._gateway.policy:
            raise Refused(
                f"This server holds the model {self._gateway.policy!r}, not {configure.config.model!r}",
                next_step="start another server for that model",
                status=409,
                code="other_model",
            )
        if self._gateway.state is not EngineState.OFFLINE:
            raise Refused(
                f"The server trains {self._gateway.status().trial_id!r}",
                next_step="stop that trial first",
                status=409,
                code="busy",
            )
        self._configured = configure

    async def start(self) -> None:
        """Load the configured trial's weights, open it, and train it in the background."""
        trial = self._configured
        if trial is None:
            raise Refused(
                "There is nothing to start", next_step="configure a trial first", status=409, code="unconfigured"
            )
        self._gateway.boot()
        try:
            learner, consumed = await self._load(trial)
            await self._gateway.open_trial(trial, consumed=consumed)
        except A3RError:
            await self._gateway.close_trial()
            raise
        self._training = asyncio.create_task(
            self._train(trial, learner, list(consumed)), name=f"train {trial.trial_id}"
        )

    async def _load(self, trial: Configure) -> tuple[Learner, tuple[str, ...]]:
        """The trial's weights into the shared module, while the engine computes nothing."""
        await self._engine.pause()
        try:
            learner, consumed = await self._compute(partial(_load, trial, self._policy))
            await self._engine.publish(learner.version)
        finally:
            await self._engine.resume()
        return learner, consumed

    async def stop(self) -> None:
        """End the trial; episodes that run are stopped. Harmless when none runs."""
        await self.halt()
        self._configured = None
        await self._gateway.close_trial()

    async def halt(self) -> None:
        """Stop training without closing the trial, as before the end of a process that will resume it."""
        training, self._training = self._training, None
        if training is not None:
            training.cancel()
            await asyncio.wait([training])

    async def _train(self, trial: Configure, learner: Learner, consumed: list[str]) -> None:
        log = EventLog(Path(trial.folder) / "swarm.jsonl")
        try:
            await self._train_to_the_end(trial, learner, consumed, log=log)
        except A3RError as fault:
            log.write(EventKind.FAULT, boundary="engine", text=str(fault), ends_trial=True)
            self._gateway.fail_training(str(fault))
            if self._gateway.state is EngineState.WEIGHT_SYNCING:
                await self._gateway.abandon_update()
        finally:
            log.close()

    async def _train_to_the_end(
        self, trial: Configure, learner: Learner, consumed: list[str], *, log: EventLog
    ) -> None:
        """Gather a batch, take a step, publish the policy; repeat."""
        config = trial.config.trainer
        waited_since = time.monotonic()
        while learner.version < config.num_updates:
            groups = await self._gateway.next_batch()
            gathered_s = time.monotonic() - waited_since
            update = await self._compute(partial(learner.update, groups))
            consumed += (*update.consumed, *update.filtered)
            if _is_checkpoint_due(update.version, every=config.checkpoint_every, last=config.num_updates):
                async with self._gateway.exporting():
                    await self._compute(partial(save_checkpoint, checkpoints(trial), learner, consumed=consumed))
            waited_since = time.monotonic()
            await self._gateway.commit_update(update.version, consumed=update.consumed, filtered=update.filtered)
            log.metrics({**update.metrics, "train/gather_s": gathered_s}, step=update.version)

    async def _compute(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._computing, call)


def _load(trial: Configure, policy: Policy) -> tuple[Learner, tuple[str, ...]]:
    """A learner where the trial's newest checkpoint left it, or at the start; and the episodes behind it."""
    reset_policy(policy)
    learner = Learner(policy, trial.config.trainer, seed=trial.config.seed)
    checkpoint = latest_checkpoint(checkpoints(trial))
    return learner, load_checkpoint(checkpoint, learner) if checkpoint else ()


def _is_checkpoint_due(version: int, *, every: int, last: int) -> bool:
    return version == last or (every > 0 and version % every == 0)


def checkpoints(trial: Configure) -> Path:
    """Folder of a trial's checkpoints."""
    return Path(trial.folder) / "checkpoints"


def _unannounced(_record: ServerRecord) -> None:
    """Default announcement: whoever waits for the server reads `server.json`."""


async def serve_swarm(
    config: ServerConfig,
    *,
    trial: Configure | None = None,
    announce: Callable[[ServerRecord], None] = _unannounced,
) -> None:
    """Load the policy and serve it until SIGTERM or SIGINT; `trial` is started at once where one is given.

    Raises EnvironmentNotReady when the model or the port cannot be had.
    """
    torch.set_num_threads(config.num_threads)
    # The engine's thread gives up the interpreter at every operation and would wait 5 ms each time to get it back.
    sys.setswitchinterval(2e-4)
    folder = Path(config.folder)
    folder.mkdir(parents=True, exist_ok=True)
    policy = load_policy(resolve_model(config.model))
    engine = HFEngine(policy.model, num_slots=config.num_slots, max_length=config.max_length)
    keys = KeyRing(_secret(folder / "secret"))
    with Ledger(folder / "ledger.db") as ledger, _socket_folder() as sockets:
        gateway = Gateway(
            engine,
            template=ChatTemplate(policy.tokenizer),
            ledger=ledger,
            keys=keys,
            options=Options(policy=config.model, max_model_tokens=config.max_length),
        )
        optimiser = Optimiser(gateway, engine=engine, policy=policy)
        if trial is not None:
            await optimiser.configure(trial)
            await optimiser.start()
        place = Place(host=config.host, socket=sockets / "gateway.sock", folder=folder, policy=config.model)
        await _serve_until_signal(
            build_app(gateway, optimiser), place=place, keys=keys, announce=announce, port=config.port
        )
        await optimiser.halt()
    await engine.close()


@dataclass(frozen=True, slots=True)
class Place:
    """Where a server listens and writes."""

    host: str
    socket: Path
    folder: Path
    policy: str


async def _serve_until_signal(
    app: GatewayApp, *, place: Place, keys: KeyRing, announce: Callable[[ServerRecord], None], port: int = 0
) -> None:
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)

    def on_ready(port: int) -> None:
        record = _record(place, port=port, keys=keys)
        _write_private(place.folder / "server.json", json.dumps(asdict(record)))
        announce(record)

    serving = asyncio.create_task(serve(app, host=place.host, port=port, uds=place.socket, on_ready=on_ready))
    waiting = asyncio.create_task(stopping.wait())
    await asyncio.wait([serving, waiting], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    serving.cancel()
    await asyncio.wait([serving])
    if not serving.cancelled() and (error := serving.exception()) is not None:
        raise error


def _record(place: Place, *, port: int, keys: KeyRing) -> ServerRecord:
    expires_at = time.time() + KEY_LIFETIME_S
    return ServerRecord(
        url=f"http://{place.host}:{port}",
        socket=str(place.socket),
        pid=os.getpid(),
        started_at=ProcessIdentity.current().started_at,
        policy=place.policy,
        admin_key=keys.sign(role=Role.ADMIN, subject="owner", expires_at=expires_at),
        client_key=keys.sign(role=Role.CLIENT, subject="owner", expires_at=expires_at),
    )


@contextmanager
def _socket_folder() -> Iterator[Path]:
    """A folder with a short path: a Unix socket's may have about 100 bytes."""
    with tempfile.TemporaryDirectory(prefix="a3r-") as folder:
        yield Path(folder)


def _secret(path: Path) -> bytes:
    """The server's signing secret, made at first use, so that keys outlive a restart."""
    if not path.exists():
        _write_private(path, secrets.token_hex(32))
    return bytes.fromhex(path.read_text())


def _write_private(path: Path, text: str) -> None:
    part = path.with_suffix(".part")
    part.unlink(missing_ok=True)
    descriptor = os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    part.replace(path)


def main(arguments: Sequence[str]) -> int:
    """Serve what the config file describes; an error that we raise on purpose is one line on stderr."""
    config = ServerConfig.model_validate_json(Path(arguments[0]).read_text())
    try:
        uvloop.run(serve_swarm(config))
    except A3RError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    except OSError as error:
        sys.stderr.write(f"{EnvironmentNotReady('The swarm server could not start', why=str(error))}\n")
        return EnvironmentNotReady.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
