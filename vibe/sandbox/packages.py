"""Which installed files sandboxed code may import: the client SDK, what that needs, and what the brief allows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from importlib.util import cache_from_source
from pathlib import Path

import a3r
from a3r.errors import EnvironmentNotReady

SDK_REQUIREMENTS = ("httpx", "pydantic")
_SDK_FILES = ("__init__.py", "config.py", "episode.py", "errors.py")


@cache
def importable(packages: tuple[str, ...]) -> tuple[tuple[Path, str], ...]:
    """(file or folder, its path below a `site` folder) of everything that may be imported.

    Raises EnvironmentNotReady when one of `packages` is not installed.
    """
    missing = [name for name in packages if not _is_installed(name)]
    if missing:
        raise EnvironmentNotReady(
            f"The package {missing[0]} is not installed",
            why="the brief allows it to programs",
            next_step=f"pip install {missing[0]}",
        )
    exposed = dict(_sdk())
    for name in sorted(_closure((*SDK_REQUIREMENTS, *packages))):
        exposed |= dict(_top_level(distribution(name)))
    return tuple(exposed.items())


def _sdk() -> Iterator[tuple[Path, str]]:
    root = Path(a3r.__file__).parent
    for name in _SDK_FILES:
        yield from _module(root / name, f"a3r/{name}")
    yield root / "swarm", "a3r/swarm"


def _closure(names: tuple[str, ...]) -> set[str]:
    """Normalised names of the distributions and all that they require, as far as it is installed."""
    found: set[str] = set()
    waiting = [_normalised(name) for name in names]
    while waiting:
        name = waiting.pop()
        if name in found or not _is_installed(name):
            continue
        found.add(name)
        required = [line for line in distribution(name).requires or () if not re.search(r";.*\bextra\b", line)]
        waiting += [_normalised(match[0]) for line in required if (match := re.match(r"[\w.-]+", line))]
    return found


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _is_installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def _top_level(installed: Distribution) -> Iterator[tuple[Path, str]]:
    """What a distribution put right below site-packages: packages, modules, libraries and its metadata."""
    names = {file.parts[0] for file in installed.files or ()} - {"..", "__pycache__", "/"}
    for name in sorted(names):
        path = Path(str(installed.locate_file(name)))
        if path.suffix == ".py":
            yield from _module(path, name)
        elif path.suffix != ".pth" and path.exists():
            yield path, name


def _module(path: Path, name: str) -> Iterator[tuple[Path, str]]:
    """A single-file module with its compiled form, without which every start would compile it anew."""
    yield path, name
    compiled = Path(cache_from_source(str(path)))
    if compiled.exists():
        yield compiled, str(Path(name).parent / "__pycache__" / compiled.name)
