"""Trained policies of the record: check, export, talk to."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from a3r.campaign import TrialState
from a3r.config import TrialConfig
from a3r.errors import NotFound, UsageError
from a3r.store.records import TrialRecord
from a3r.store.store import Store
from a3r.swarm import ClaimedEpisode
from flows.lab import Lab
from flows.model_folder import SMALL, check_model
from flows.record import named_campaign, open_store
from flows.swarm_pool import SwarmPool, start_server


@dataclass(frozen=True, slots=True)
class Exported:
    """A policy that was written to a folder."""

    folder: Path
    trial_id: str
    version: int


def export_policy(source: str, *, to: Path) -> Exported:
    """Write the trained policy of a trial, or of a campaign's best trial, as a Hugging Face folder.

    Raises NotFound when there is none, UsageError when `to` holds something already.
    """
    from trainer.checkpoint import export_checkpoint

    if to.exists() and any(to.iterdir()):
        raise UsageError(f"The folder {to} is not empty", next_step="name a new one")
    with open_store() as store:
        trial = _trained(store, source)
    return Exported(
        folder=export_checkpoint(_checkpoint(trial), to),
        trial_id=trial.id,
        version=trial.config.trainer.num_updates,
    )


@asynccontextmanager
async def open_conversation(
    source: str, *, temperature: float, max_tokens: int
) -> AsyncIterator[Callable[[str], Awaitable[str]]]:
    """A conversation with a policy (`small`, a campaign, a trial or a folder) through a gateway of its own."""
    with tempfile.TemporaryDirectory(prefix="a3r-chat-") as scratch:
        model = _model_of(source, scratch=Path(scratch))
        pool = SwarmPool(Path(scratch) / "swarm")
        server = await start_server({"model": model}, folder=pool.folder / "swarm-0")
        idle = TrialConfig(model=model).updated({"trainer.num_updates": 0})
        try:
            async with server.trial("chat", config=idle, folder=Path(scratch) / "trial"):
                # A client's own key may call the model outside any episode; nothing of it is trained on.
                line = ClaimedEpisode(
                    id="chat", api_key=server.client_key, base_url=f"{server.url}/v1", task_id="chat", policy=model
                )
                messages: list[dict[str, object]] = []

                async def say(text: str) -> str:
                    messages.append({"role": "user", "content": text})
                    reply = await asyncio.to_thread(line.chat, messages, temperature=temperature, max_tokens=max_tokens)
                    messages.append({"role": "assistant", "content": reply})
                    return reply

                yield say
        finally:
            pool.close()


def _model_of(source: str, *, scratch: Path) -> str:
    if source == SMALL:
        return SMALL
    if Path(source).is_dir():
        check_model(source)
        return str(Path(source).absolute())
    return str(export_policy(source, to=scratch / "policy").folder)


def _trained(store: Store, source: str) -> TrialRecord:
    """The trial that is named, or the campaign's finished trained trial with the highest held-out success."""
    if source.startswith("t-"):
        return store.trial(source)
    campaign = named_campaign(store, source)
    finished = [
        trial
        for trial in store.campaign_trials(campaign.id, (TrialState.FINISHED,))
        if trial.config.trainer.num_updates > 0
    ]
    if not finished:
        raise NotFound(
            f"Campaign {campaign.id} has no trained policy yet", next_step=f"watch it with a3r attach {campaign.id}"
        )
    return max(finished, key=lambda trial: store.series(trial.id, "eval/success")[-1].value)


def _checkpoint(trial: TrialRecord) -> Path:
    from trainer.checkpoint import latest_checkpoint

    campaigns = Lab.locate().home / "campaigns"
    for folder in sorted(campaigns.glob(f"*/trials/{trial.id}-*"), reverse=True):
        if checkpoint := latest_checkpoint(folder / "checkpoints"):
            return checkpoint
    raise NotFound(
        f"There is no checkpoint of trial {trial.id}",
        why="it trained nothing, or its files were removed",
        next_step="name a trial that finished its updates",
    )
