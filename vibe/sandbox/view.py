"""What a bubblewrap sandbox sees, as arguments of `bwrap`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import vibe
from vibe.sandbox.packages import importable
from vibe.sandbox.process import Exposure, Limits

WORKSPACE, SCRATCH, SITE, GATEWAY_SOCKET = "/workspace", "/tmp", "/site", "/run/gateway.sock"
GATEWAY_PORT = 8300
_SHARED_MEMORY_BYTES = 16 * 2**20
_ETC = Path(__file__).parent / "etc"
_INSIDE = {
    "PATH": "/usr/bin:/bin",
    "HOME": SCRATCH,
    "LANG": "C.UTF-8",
    "TZ": "UTC",
    "PYTHONPATH": SITE,
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    # Each arena reserves address space, of which there is a limit.
    "MALLOC_ARENA_MAX": "2",
    "A3R_WORKSPACE": WORKSPACE,
}
_PACKAGE_FOLDERS = tuple(
    f"{above}lib*/python3*/{name}" for above in ("", "local/") for name in ("site-packages", "dist-packages")
) + ("envs", "pkgs", "src", "local/src")


def interpreter() -> Path:
    """The base interpreter: a virtual environment's own one would need the whole environment."""
    base = Path(sys.base_exec_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")
    return base if base.exists() else Path(sys.executable).resolve()


def system_files() -> list[str]:
    """Read-only system files and the interpreter, without the packages and sources that lie among them."""
    trees = [Path("/usr")]
    prefix = Path(sys.base_prefix)
    if not prefix.is_relative_to("/usr"):
        trees.append(prefix)
    arguments = [part for tree in trees for part in ("--ro-bind", str(tree), str(tree))]
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        folder = Path("/", name)
        if folder.is_symlink():
            arguments += ["--symlink", str(folder.readlink()), str(folder)]
        elif folder.is_dir():
            arguments += ["--ro-bind", str(folder), str(folder)]
    for path in _hidden(trees):
        arguments += ["--tmpfs", str(path), "--remount-ro", str(path)]
    for file in sorted(_ETC.iterdir()):
        arguments += ["--ro-bind", str(file), f"/etc/{file.name}"]
    for name in ("ld.so.cache", "alternatives"):
        arguments += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    shared = ["--size", str(_SHARED_MEMORY_BYTES), "--tmpfs", "/dev/shm"]
    return [*arguments, "--proc", "/proc", "--dev", "/dev", *shared, "--remount-ro", "/dev"]


def _hidden(trees: Sequence[Path]) -> list[Path]:
    """Folders below what is exposed that hold installed packages, or this project itself."""
    packages = [path for tree in trees for pattern in _PACKAGE_FOLDERS for path in tree.glob(pattern) if path.is_dir()]
    ours = [Path(vibe.__file__).resolve().parents[1]]
    if sys.prefix != sys.base_prefix:
        ours.append(Path(sys.prefix))
    ours = [path for path in ours if any(path.is_relative_to(tree) for tree in trees)]
    outermost: list[Path] = []
    for path in sorted({path.resolve() for path in [*packages, *ours]}):
        if not any(path.is_relative_to(other) for other in outermost):
            outermost.append(path)
    return outermost


def importable_files(packages: tuple[str, ...]) -> Iterator[str]:
    """The client SDK and the allowed packages, each by itself."""
    for source, name in importable(packages):
        yield from ("--ro-bind", str(source), f"{SITE}/{name}")


def own_files(exposure: Exposure, limits: Limits) -> list[str]:
    """The workspace, the scratch folder, the gateway's socket and the environment; then the root is sealed."""
    arguments = ["--size", str(limits.file_bytes), "--tmpfs", SCRATCH]
    arguments += ["--bind" if exposure.workspace_is_writable else "--ro-bind", str(exposure.workspace), WORKSPACE]
    environment = dict(_INSIDE)
    if exposure.gateway_socket is not None:
        arguments += ["--ro-bind", str(exposure.gateway_socket), GATEWAY_SOCKET]
        environment |= {"A3R_GATEWAY_SOCKET": GATEWAY_SOCKET, "A3R_GATEWAY_PORT": str(GATEWAY_PORT)}
    for name, value in environment.items():
        arguments += ["--setenv", name, value]
    return [*arguments, "--remount-ro", "/", "--chdir", SCRATCH]
