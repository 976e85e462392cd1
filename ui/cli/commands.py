"""Every command: its name, where it is, and the line that the help shows for it.

Kept apart from the commands themselves, so that `a3r --help` imports nothing of them.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True, slots=True)
class Command:
    """One command, or a group of commands such as `a3r swarm`."""

    name: str
    module: str
    attribute: str
    summary: str

    def load(self) -> Any:
        """The function or cyclopts App behind the name."""
        return getattr(import_module(self.module), self.attribute)


SECTIONS: dict[str, tuple[Command, ...]] = {
    "Research": (
        Command("research", "ui.cli.research", "research", "Answer a research question with real training runs."),
        Command("train", "ui.cli.research", "train", "Train one policy for a task that is described in words."),
    ),
    "Campaigns": (
        Command("ls", "ui.cli.campaigns", "ls", "List the campaigns of this lab, the latest first."),
        Command("status", "ui.cli.campaigns", "status", "Show plan, trials, figures so far and verdict."),
        Command("attach", "ui.cli.campaigns", "attach", "Watch a campaign that runs."),
        Command("report", "ui.cli.campaigns", "report", "Write the report, whole or partial, and say where it is."),
        Command("episodes", "ui.cli.campaigns", "episodes", "Show transcripts of hidden-task episodes."),
        Command("cancel", "ui.cli.campaigns", "cancel", "End a campaign with a partial report; records stay."),
        Command("resume", "ui.cli.campaigns", "resume", "Go on with a campaign that was interrupted."),
    ),
    "Policies and servers": (
        Command("model", "ui.cli.models", "app", "Build, export and talk to policies."),
        Command("swarm", "ui.cli.swarm", "app", "Serve and train a policy for your own agent."),
        Command("up", "ui.cli.services", "up", "Start Prefect, MLflow and the campaign runner."),
        Command("down", "ui.cli.services", "down", "Stop the services; records stay."),
        Command("doctor", "ui.cli.services", "doctor", "Say what works here, what is missing and how to get it."),
    ),
}

COMMANDS = {command.name: command for section in SECTIONS.values() for command in section}

ABOUT = "One sentence to a finished piece of reinforcement-learning research on LLM agents."


def root_help() -> str:
    """What `a3r --help` prints."""
    lines = ["Usage: a3r COMMAND [ARGUMENTS]", "", ABOUT]
    for title, commands in SECTIONS.items():
        lines += ["", f"{title}:"]
        for command in commands:
            lines += textwrap.wrap(
                command.summary, width=88, initial_indent=f"  {command.name:<10}", subsequent_indent=" " * 12
            )
    lines += ["", "a3r COMMAND --help says more about one; a3r --version says which A3R this is."]
    return "\n".join(lines) + "\n"
