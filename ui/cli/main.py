"""The `a3r` command: parses, shows, and turns every error raised on purpose into one line and an exit code.

Exit codes: 0 done, 1 a fault of ours, 2 usage, 3 approval needed or declined, 4 plan or program rejected,
5 environment not ready, 6 budget exhausted with a partial report, 7 inconclusive, 9 not found,
130 detached by Ctrl-C while the campaign goes on.
"""

from __future__ import annotations

import sys

from cyclopts import App, CycloptsError

from a3r.errors import A3RError, UsageError
from ui.cli import campaigns, models, research, services, swarm

app = App(
    name="a3r",
    help="One sentence to a finished piece of reinforcement-learning research on LLM agents.",
    help_format="plaintext",
    version_flags=[],
)
app.command(research.research)
app.command(research.train)
app.command(campaigns.status)
app.command(campaigns.ls)
app.command(campaigns.report)
app.command(campaigns.episodes)
app.command(campaigns.attach)
app.command(campaigns.cancel)
app.command(campaigns.resume)
app.command(services.up)
app.command(services.down)
app.command(services.doctor)
app.command(models.app)
app.command(swarm.app)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: list[str]) -> int:
    """Run one command line; returns its exit code and lets no traceback of ours out."""
    try:
        code = app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        return _fail(UsageError(str(error), next_step="see `a3r --help`"))
    except A3RError as error:
        return _fail(error)
    except KeyboardInterrupt:
        sys.stderr.write("\nInterrupted.\n")
        return 130
    return code if isinstance(code, int) else 0


def _fail(error: A3RError) -> int:
    sys.stderr.write(f"a3r: {error}\n")
    return error.exit_code


if __name__ == "__main__":
    main()
