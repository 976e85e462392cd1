"""The checks that read a draft without running it."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import packages_distributions
from typing import TypeAlias

from vibe.workspace import file_faults

PROGRAM_FILE = "program.py"

_REQUIRED = {"tasks": ("split", "seed"), "run_episode": ("task_public", "episode"), "grade": ("task", "transcript")}
_OPTIONAL = {"environment": ("task",), "demonstrations": ("seed",)}
# The sandbox is what keeps a Program in; these only have uses that no agent or reward needs.
_UNWANTED_MODULES = frozenset({"ctypes", "multiprocessing", "pty", "runpy", "subprocess"})
_UNWANTED_CALLS = frozenset({"eval", "exec", "__import__"})


@dataclass(frozen=True, slots=True)
class Finding:
    """Verdict of one check, with one line of detail."""

    passed: bool
    detail: str


def passed(detail: str) -> Finding:
    """A check that found nothing wrong."""
    return Finding(passed=True, detail=detail)


def failed(detail: str) -> Finding:
    """A check that found `detail` wrong."""
    return Finding(passed=False, detail=detail)


SourceGate: TypeAlias = "Callable[[Mapping[str, str], Sequence[str]], Finding]"
"""Takes the draft's files and the allowed distributions."""


def files_are_there(files: Mapping[str, str], _allowed: Sequence[str]) -> Finding:
    """`program.py` is among the files, and every path stays in the workspace."""
    faults = file_faults(files)
    if PROGRAM_FILE not in files:
        faults.append(f"the draft holds no file {PROGRAM_FILE}")
    return failed("; ".join(faults)) if faults else passed(f"{len(files)} file(s)")


def source_parses(files: Mapping[str, str], _allowed: Sequence[str]) -> Finding:
    """Every Python file is Python."""
    for path, text in _python(files):
        try:
            ast.parse(text, filename=path)
        except (SyntaxError, ValueError, RecursionError) as error:
            return failed(f"{path} is not Python: {error}")
    return passed("valid Python")


def imports_are_allowed(files: Mapping[str, str], allowed: Sequence[str]) -> Finding:
    """Only the client SDK, the standard library, the draft's own modules and what the brief allows."""
    own = {path.split("/")[0].removesuffix(".py") for path in files}
    roots = own | _import_names(allowed) | (sys.stdlib_module_names - _UNWANTED_MODULES)
    faults = [
        f"{path}:{line} uses {name}"
        for path, text in _python(files)
        for line, name in _uses(ast.parse(text))
        if not _is_allowed(name, roots)
    ]
    if faults:
        return failed(
            "; ".join(faults) + ". Allowed: a3r.swarm, the standard library" + "".join(f", {a}" for a in allowed)
        )
    return passed("only allowed imports")


def _is_allowed(name: str, roots: set[str] | frozenset[str]) -> bool:
    if name.endswith("()"):
        return False
    return name == "a3r.swarm" or name.startswith("a3r.swarm.") or name.split(".")[0] in roots


def _uses(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Imported modules and unwanted calls, as (line, name)."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=0):
                # `from a3r import swarm` names the same module as `import a3r.swarm`.
                yield from ((node.lineno, f"a3r.{a.name}" if module == "a3r" else str(module)) for a in names)
            case ast.Call(func=ast.Name(id=name)) if name in _UNWANTED_CALLS:
                yield node.lineno, f"{name}()"


def _import_names(distributions: Sequence[str]) -> set[str]:
    """Top-level modules that `distributions` install, by their own name where they are not installed here."""
    if not distributions:
        return set()
    wanted = {_normal(name) for name in distributions}
    installed = {module for module, owners in packages_distributions().items() if wanted & set(map(_normal, owners))}
    return installed | {name.replace("-", "_") for name in wanted}


def _normal(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def contract_is_met(files: Mapping[str, str], _allowed: Sequence[str]) -> Finding:
    """The functions of `a3r.swarm.program` with their parameters, by name and order."""
    nodes = ast.parse(files[PROGRAM_FILE]).body
    defined = {node.name: node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    classes = {node.name for node in nodes if isinstance(node, ast.ClassDef)}
    faults = [f"{name}({', '.join(args)}) is missing" for name, args in _REQUIRED.items() if name not in defined]
    for name, args in (_REQUIRED | _OPTIONAL).items():
        if name in defined:
            faults += _signature_faults(defined[name], args)
        elif name in classes:
            faults.append(f"{name} must be a function")
    return failed("; ".join(faults)) if faults else passed("functions and parameters fit the contract")


def _signature_faults(node: ast.FunctionDef | ast.AsyncFunctionDef, expected: tuple[str, ...]) -> list[str]:
    positional = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
    required = positional[: len(positional) - len(node.args.defaults)]
    keyword_only = [
        a.arg for a, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if not default
    ]
    faults: list[str] = []
    if (
        [name.lstrip("_") for name in positional[: len(expected)]] != list(expected)
        or len(required) > len(expected)
        or keyword_only
    ):
        faults.append(f"{node.name} takes ({', '.join(positional + keyword_only)}), not ({', '.join(expected)})")
    if isinstance(node, ast.AsyncFunctionDef) and node.name != "run_episode":
        faults.append(f"{node.name} must not be async")
    return faults


def _python(files: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    return ((path, text) for path, text in files.items() if path.endswith(".py"))


SOURCE_GATES: tuple[tuple[str, SourceGate], ...] = (
    ("files", files_are_there),
    ("parses", source_parses),
    ("imports", imports_are_allowed),
    ("contract", contract_is_met),
)
"""Checks of the source, in order."""
