"""Coders: a brief and feedback in, the files of a Program out.

```
RecipeCoder()        fills a shipped recipe; needs nothing else
OpenAICoder(llm=…)   asks a language model; repairs what a gate refused
ScriptedCoder(…)     hands out prepared drafts
```
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from a3r.episode import Message
from a3r.errors import CoderFault, PlanRejected
from a3r.plan import Brief
from vibe.gates import GateReport
from vibe.llm import LLM
from vibe.recipes.library import load_program, program_source, recipes
from vibe.source_gates import PROGRAM_FILE

_NUM_EXAMPLE_TASKS = 2
_PATH = r"[\w./-]+\.\w+"
_FENCE = re.compile(
    r"^(?P<ticks>`{3,}|~{3,})(?P<info>[^\n]*)\n(?P<body>.*?)^(?P=ticks)[ \t]*$", re.DOTALL | re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class Draft:
    """What a coder handed in. `note` is what it said beside the files, `tokens` what the call cost."""

    files: Mapping[str, str]
    note: str = ""
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class CodingRequest:
    """What is to be written; on a repair also the draft before and what the gates said about it."""

    brief: Brief
    previous: Draft | None = None
    reports: tuple[GateReport, ...] = ()
    attempt: int = 0
    """0 for the first draft, then the number of the repair."""


class Coder(Protocol):
    """Writes a Program. Raises CoderFault when it cannot answer at all; a poor answer is a Draft."""

    async def write(self, request: CodingRequest) -> Draft: ...


@dataclass(frozen=True, slots=True)
class RecipeCoder:
    """Fills the recipe that the brief names."""

    async def write(self, request: CodingRequest) -> Draft:
        if request.brief.recipe is None:
            raise PlanRejected("No shipped recipe covers this task", next_step="name one of: " + ", ".join(recipes()))
        source = program_source(request.brief.recipe, request.brief.parameters)
        return Draft(files={PROGRAM_FILE: source}, note=f"recipe {request.brief.recipe}")


@dataclass(frozen=True, slots=True)
class ScriptedCoder:
    """Hands out `drafts` in order: the first, then one for each repair."""

    drafts: tuple[Draft, ...]

    async def write(self, request: CodingRequest) -> Draft:
        if request.attempt >= len(self.drafts):
            raise CoderFault(f"The script holds {len(self.drafts)} draft(s) and no more")
        return self.drafts[request.attempt]


@dataclass(frozen=True, slots=True)
class OpenAICoder:
    """Has a language model write the Program. What judges the Program is never shown to it."""

    llm: LLM

    async def write(self, request: CodingRequest) -> Draft:
        """One call to the model.

        Raises PlanRejected for a brief without a recipe (nothing could judge the Program), CoderFault and
        EnvironmentNotReady as `LLM.complete` does. A reply without a file is a Draft without files.
        """
        reply = await self.llm.complete(coding_messages(request))
        files, note = files_in(reply.text)
        return Draft(files=files, note=note, tokens=reply.tokens)


def coding_messages(request: CodingRequest) -> list[Message]:
    """The dialogue that asks for a Program, or for its repair."""
    brief = request.brief
    if brief.recipe is None:
        raise PlanRejected(
            "Hidden tasks for it cannot be made yet",
            why="what judges a Program is made before and outside the coder, and no shipped recipe covers this task",
            next_step="name a task that a recipe covers: " + ", ".join(recipes()),
        )
    messages: list[Message] = [
        {"role": "system", "content": _prompt("system.md.j2", contract=_prompt("contract.md.j2"))},
        {"role": "user", "content": _prompt("brief.md.j2", brief=brief, **_task_form(brief), **_example(brief.recipe))},
    ]
    if request.previous is not None:
        messages.append({"role": "assistant", "content": _spoken(request.previous)})
        messages.append({"role": "user", "content": _prompt("repair.md.j2", reports=request.reports)})
    return messages


def _task_form(brief: Brief) -> dict[str, object]:
    """How tasks of this brief look. The examples are training tasks: even one of the exam's would no longer be
    hidden."""
    assert brief.recipe is not None
    tasks = load_program(brief.recipe, brief.parameters).tasks("train", 0)[:_NUM_EXAMPLE_TASKS]
    return {
        "example_tasks": [json.dumps(task.as_json()) for task in tasks],
        "rules": _prompt(f"rules/{brief.recipe}.md.j2"),
    }


def _example(recipe: str) -> dict[str, object]:
    """Another recipe's Program, to show the form without giving the answer away."""
    other = next(one for name, one in recipes().items() if name != recipe)
    return {"example_description": other.description, "example_source": program_source(other.name, {})}


def _spoken(draft: Draft) -> str:
    blocks = [f"```python path={path}\n{text.rstrip()}\n```" for path, text in draft.files.items()]
    return "\n\n".join([draft.note, *blocks] if draft.note else blocks) or "(an empty reply)"


def _prompt(name: str, **values: object) -> str:
    folder = Path(__file__).parent / "prompts"
    environment = Environment(loader=FileSystemLoader(folder), undefined=StrictUndefined, trim_blocks=True)
    return environment.get_template(name).render(values)


def files_in(text: str) -> tuple[dict[str, str], str]:
    """The files in a model's reply, by path, and the prose around them.

    A fence names its file (```python path=program.py, or program.py alone). Where none does, the longest Python
    fence, and else the longest unlabelled one, is `program.py`. A reply that is cut off may end within a fence:
    what it holds counts, and the gates will tell.
    """
    whole = text if _FENCE.search(text) or "```" not in text else text.rstrip() + "\n```"
    fences = [(match["info"].strip(), match["body"]) for match in _FENCE.finditer(whole)]
    note = _FENCE.sub("", whole).strip()
    named = {path: body for info, body in fences if (path := _named_path(info))}
    if named:
        return named, note
    python = [body for info, body in fences if info.lower().split()[:1] in (["python"], ["py"], ["python3"])]
    bodies = python or [body for info, body in fences if not info]
    return ({PROGRAM_FILE: max(bodies, key=len)} if bodies else {}), note


def _named_path(info: str) -> str | None:
    match = re.search(rf"(?:path|file|filename|title)\s*[=:]\s*[\"']?({_PATH})", info) or re.search(
        rf"(?:^|[\s:])({_PATH})$", info
    )
    return match[1] if match else None


def no_program(draft: Draft) -> CoderFault:
    """The fault of a coder whose last answer held no Program at all."""
    said = " ".join(draft.note.split())[:200]
    return CoderFault(
        f"The coder's answer holds no {PROGRAM_FILE}",
        why=f"it said: {said!r}" if said else "the answer is empty",
        next_step="try again, or use another model or the offline coder (--coder recipes)",
    )
