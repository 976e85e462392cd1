"""The client SDK: claim an episode, run any agent against it, end it with a reward.

All that a Program may import of ours. Needs httpx and pydantic only.
"""

from a3r.episode import Episode, Message, Observation, Task, Transcript
from a3r.swarm.client import ClaimedEpisode, Outcome, SwarmClient
from a3r.swarm.program import Dialogue, Environment

__all__ = [
    "ClaimedEpisode",
    "Dialogue",
    "Environment",
    "Episode",
    "Message",
    "Observation",
    "Outcome",
    "SwarmClient",
    "Task",
    "Transcript",
]
