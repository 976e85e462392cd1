"""`a3r model`: build the shipped policy, export a trained one, talk to one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from ui.cli.screen import Screen

app = App(name="model", help="Build, export and talk to policies.")


@app.command(name="build-small")
def build_small(*, out: Path, seed: int = 0, steps: int | None = None) -> int:
    """Rebuild the shipped small policy from its seed: bit-equal on one machine, equally good elsewhere.

    Parameters
    ----------
    out
        Folder to write the Hugging Face files to.
    seed
        Seed of the initial weights, the dialogues and their order.
    steps
        Warm-start steps; fewer for a quick look.
    """
    from flows.small_policy import build

    folder = out.expanduser().absolute()
    metrics = build(folder, seed=seed, steps=steps)
    sys.stdout.write(f"{folder}\n")
    sys.stderr.write("".join(f"{name} {value:.4g}\n" for name, value in metrics.items()))
    return 0


@app.command
def export(source: str, /, *, to: Path) -> int:
    """Write a trained policy as a Hugging Face folder that loads anywhere.

    Parameters
    ----------
    source
        A campaign id; its best trained policy is taken. Or a trial id.
    to
        Folder to write to; it must not exist or be empty.
    """
    from flows.policies import export_policy

    exported = export_policy(source, to=to.expanduser().absolute())
    sys.stdout.write(f"{exported.folder}\n")
    sys.stderr.write(f"Policy of trial {exported.trial_id}, version {exported.version}.\n")
    return 0


@app.command
def chat(
    source: str = "small",
    /,
    *,
    message: str | None = None,
    temperature: float = 0.6,
    max_tokens: int = 32,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Talk to a policy through a gateway of its own.

    Parameters
    ----------
    source
        `small`, a campaign or trial id, or a local Hugging Face folder.
    message
        Say this one thing and stop; without it, lines are read from standard input.
    temperature
        Sampling temperature; 0 is greedy.
    max_tokens
        Most tokens of a reply.
    """
    import asyncio

    from flows.policies import open_conversation

    screen = Screen(json_lines=json)

    async def talk() -> None:
        async with open_conversation(source, temperature=temperature, max_tokens=max_tokens) as say:
            if message is not None:
                _answer(screen, await say(message))
                return
            screen.note("Say something; an empty line or Ctrl-D ends.")
            while line := (await asyncio.to_thread(sys.stdin.readline)).strip():
                _answer(screen, await say(line))

    asyncio.run(talk())
    return 0


def _answer(screen: Screen, text: str) -> None:
    screen.emit("reply", text=text)
    if not screen.json_lines:
        sys.stdout.write(text + "\n")
