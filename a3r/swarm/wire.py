"""The swarm's control plane as typed bodies, shared by server and client.

| route | role | body -> reply |
|---|---|---|
| POST /swarm/configure | admin | Configure -> Status |
| POST /swarm/start | admin | - -> Status |
| POST /swarm/stop | admin | - -> Status |
| GET  /swarm/status | any | - -> Status |
| POST /swarm/claim | client | Claim -> Claimed |
| POST /swarm/episodes/{id}/heartbeat | its episode key | - -> Lease |
| GET  /swarm/episodes/{id}/transcript | its episode key | - -> {"turns": [...]} as in `Transcript.as_json` |
| POST /swarm/episodes/{id}/end | its episode key | End -> Ended |
| POST /swarm/episodes/{id}/abort | its episode key | Abort -> Ended |

Every refusal is `{"error": {"code", "message", "type": "refused"}}` with a fitting HTTP status; 429 and 503
carry Retry-After. The key goes into `Authorization: Bearer`.
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from a3r.config import Config, TrialConfig
from a3r.episode import Ending, EpisodeKind


class EngineState(StrEnum):
    """States of the swarm server's engine."""

    OFFLINE = "offline"
    """Not configured, or stopped. Holds no trial."""
    BOOTING = "booting"
    """Loading weights for a trial."""
    ROLLING = "rolling"
    """Serving claims and calls."""
    ROLLING_POST = "rolling_post"
    """A batch is ready: running episodes finish, no new training episode is claimed."""
    WEIGHT_SYNCING = "weight_syncing"
    """The policy is being updated; calls wait."""
    WEIGHT_EXPORTING = "weight_exporting"
    """A checkpoint is being written; calls wait."""


class Configure(Config):
    """What the server should train next."""

    trial_id: str = Field(min_length=1)
    """Name of the trial; episodes and events carry it."""
    config: TrialConfig
    """All settings of the trial."""
    folder: str
    """Absolute folder on the server's machine for events (`swarm.jsonl`) and checkpoints."""


class Status(Config):
    """What the server is doing."""

    state: EngineState
    trial_id: str | None
    policy: str
    """Name of the served policy, as `model` in requests."""
    version: int
    """Current policy version: the number of updates behind it."""
    num_updates: int
    """Updates the trial is configured for."""
    training_done: bool
    """Whether all updates are done; training claims are then refused with `training_done`."""
    group_size: int
    wanted_tasks: int
    """Further tasks whose groups the current batch still wants; a client may claim that many new tasks."""
    open_episodes: int
    accepted: int
    """Accepted training episodes of this trial."""
    failure: str | None = None
    """What stopped training, if anything did."""


class Claim(Config):
    """A client asks for an episode. The same `claim_id` again returns the same episode."""

    client_id: str = Field(min_length=1)
    claim_id: str = Field(min_length=1, max_length=200)
    task_id: str = Field(min_length=1, max_length=500)
    kind: EpisodeKind = EpisodeKind.TRAIN
    temperature: float | None = Field(None, ge=0, le=2)
    """Temperature of an eval episode's calls, pinned; training episodes use the trial's own."""
    lease_s: float = Field(60.0, gt=0, le=3600)
    """Time without a heartbeat or call after which the episode expires."""


class Claimed(Config):
    episode_id: str
    api_key: str
    """Signed, expires, opens this episode and nothing else."""
    policy: str
    version: int
    lease_s: float


class Lease(Config):
    lease_s: float


class End(Config):
    """Closes an episode with its reward. Repeating the same body is harmless; another body is refused."""

    reward: float = Field(allow_inf_nan=False)
    components: dict[str, float] = {}


class Abort(Config):
    ending: Ending = Ending.ABORTED
    """ABORTED, or CLIENT_FAULT when the program failed."""
    reason: str = Field("", max_length=2000)


class Ended(Config):
    ending: Ending
