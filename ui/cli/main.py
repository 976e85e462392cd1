"""The `a3r` command: parses, shows, and turns every error raised on purpose into one line and an exit code.

Exit codes: 0 done, 1 a fault of ours, 2 usage, 3 approval needed or declined, 4 plan or program rejected,
5 environment not ready, 6 budget exhausted with a partial report, 7 inconclusive, 9 not found,
130 detached by Ctrl-C while the campaign goes on.
"""

from __future__ import annotations

import sys
from difflib import get_close_matches

from a3r.errors import A3RError, UsageError
from ui.cli.commands import ABOUT, COMMANDS, root_help


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: list[str]) -> int:
    """Run one command line; returns its exit code and lets no traceback of ours out."""
    if not arguments or arguments[0] in ("--help", "-h", "help"):
        sys.stdout.write(root_help())
        return 0
    try:
        if arguments[0] == "--version":
            return _version()
        return _dispatch(arguments)
    except A3RError as error:
        return _fail(error)
    except KeyboardInterrupt:
        sys.stderr.write("\nInterrupted.\n")
        return 130


def _dispatch(arguments: list[str]) -> int:
    """Load the one command that was asked for; the others would cost start-up time for nothing."""
    command = COMMANDS.get(arguments[0])
    if command is None:
        raise _unknown(arguments[0])
    from cyclopts import App, CycloptsError

    app = App(name="a3r", help=ABOUT, help_format="plaintext", version_flags=[])
    app.command(command.load(), name=command.name)
    try:
        code = app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        raise UsageError(str(error), next_step=f"see `a3r {command.name} --help`") from error
    return code if isinstance(code, int) else 0


def _unknown(name: str) -> UsageError:
    if name.startswith("-"):
        return UsageError(f"There is no option {name!r} before the command", next_step="see `a3r --help`")
    close = get_close_matches(name, COMMANDS, n=1)
    return UsageError(
        f"There is no command {name!r}", next_step=f"did you mean `a3r {close[0]}`?" if close else "see `a3r --help`"
    )


def _version() -> int:
    from importlib.metadata import version

    sys.stdout.write(f"a3r {version('a3r')}\n")
    return 0


def _fail(error: A3RError) -> int:
    sys.stderr.write(f"a3r: {error}\n")
    return error.exit_code


if __name__ == "__main__":
    main()
