"""The contract of a Program: one file `program.py` that a coder (or a person) writes.

```python
from a3r.swarm import ClaimedEpisode, Observation, Task, Transcript

def tasks(split: str, seed: int) -> list[Task]: ...          # split is "train" or "validation"
def run_episode(task_public: dict, episode: ClaimedEpisode): ...   # plays; what it returns is transcript.output
def grade(task: Task, transcript: Transcript) -> dict[str, float]: ...   # reward components; the reward is their sum
def environment(task: Task) -> Environment: ...              # optional: answers episode.step(action)
def demonstrations(seed: int) -> list[list[Message]]: ...    # optional: dialogues for a warm start
```

`run_episode` may be async. It runs in one sandbox and sees `task.public` only. `grade` and `environment` run
in a second sandbox and see the whole task. Hidden tasks, their environment and the metric belong to an Exam,
which runs in the judge and which a Program never sees:

```python
def tasks(split: str, seed: int) -> list[Task]: ...          # split is "hidden"
def environment(task: Task) -> Environment: ...              # optional
def measure(task: Task, transcript: Transcript) -> float: ...  # the metric of one episode, 0 to 1
```
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeAlias

from a3r.episode import Json, Message, Observation, Task, Transcript


class Environment(Protocol):
    """The world of one episode. `step` takes the agent's action (text) and answers."""

    def step(self, action: str) -> Observation: ...


class Program(Protocol):
    """What every Program module offers; `environment` and `demonstrations` are optional."""

    def tasks(self, split: str, seed: int) -> list[Task]: ...

    def run_episode(self, task_public: Mapping[str, Json], episode: object) -> Json: ...

    def grade(self, task: Task, transcript: Transcript) -> dict[str, float]: ...


class Exam(Protocol):
    """Hidden tasks and the metric; see the module text."""

    def tasks(self, split: str, seed: int) -> list[Task]: ...

    def measure(self, task: Task, transcript: Transcript) -> float: ...


Dialogue: TypeAlias = list[Message]
