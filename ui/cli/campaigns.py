"""Commands on campaigns: watch, list, report, transcripts, cancel, resume."""

from __future__ import annotations

import sys
from typing import Annotated, Literal

from cyclopts import Parameter

from ui.cli.screen import Screen

Json = Annotated[bool, Parameter(name="--json", negative=())]


def watch(campaign_id: str, *, screen: Screen) -> int:
    """Show a campaign until it ends; Ctrl-C detaches. Returns the exit code of how it ended."""
    from ui.cli.progress import follow

    try:
        return follow(campaign_id, screen=screen)
    except KeyboardInterrupt:
        screen.detached(campaign_id)
        return 130


def attach(campaign: str = "last", /, *, json: Json = False) -> int:
    """Watch a campaign that runs.

    Parameters
    ----------
    campaign
        Its id or the beginning of it; the latest one by default.
    json
        One JSON object a line.
    """
    from flows.record import named_campaign, open_store

    with open_store() as store:
        found = named_campaign(store, campaign)
    return watch(found.id, screen=Screen(json_lines=json))


def status(campaign: str = "last", /, *, json: Json = False) -> int:
    """Show where a campaign stands: plan, trials, figures so far, verdict.

    Parameters
    ----------
    campaign
        Its id or the beginning of it; the latest one by default.
    json
        JSON instead of text.
    """
    from flows.record import named_campaign, open_store, standing
    from ui.cli.standing import fact_rows, trial_rows

    with open_store() as store:
        now = standing(store, named_campaign(store, campaign).id)
    screen = Screen(json_lines=json)
    screen.table(["what", "is"], fact_rows(now), kind="campaign")
    screen.table(["setting", "seed", "state", "updates", "reward", "held-out success"], trial_rows(now), kind="trial")
    return 0


def ls(*, json: Json = False) -> int:
    """List the campaigns of this lab, the latest first."""
    from flows.record import open_store
    from ui.cli.standing import campaign_row

    with open_store() as store:
        rows = [campaign_row(campaign) for campaign in store.campaigns()]
    Screen(json_lines=json).table(["campaign", "state", "ordered", "question"], rows, kind="campaign")
    return 0


def report(campaign: str = "last", /, *, format: Literal["path", "md"] = "path", json: Json = False) -> int:
    """Write the report of a campaign, whole or partial, and say where it is.

    Parameters
    ----------
    campaign
        Its id or the beginning of it; the latest one by default.
    format
        `path` prints where the files are, `md` prints the Markdown.
    json
        JSON instead of text.
    """
    from flows.record import open_store, render_report

    with open_store() as store:
        paths = render_report(store, campaign)
    Screen(json_lines=json).emit("report", html=paths.html, markdown=paths.markdown)
    if not json:
        sys.stdout.write(paths.markdown.read_text() if format == "md" else f"{paths.html}\n{paths.markdown}\n")
    return 0


def episodes(
    campaign: str = "last",
    /,
    *,
    order: Literal["best", "worst"] = "best",
    limit: int = 3,
    json: Json = False,
) -> int:
    """Show transcripts of hidden-task episodes.

    Parameters
    ----------
    campaign
        A campaign or trial id, or the beginning of it; the latest campaign by default.
    order
        Best or worst first.
    limit
        How many.
    json
        JSON instead of text.
    """
    from flows.record import open_store, transcripts
    from ui.cli.transcript import transcript_lines

    screen = Screen(json_lines=json)
    with open_store() as store:
        kept = transcripts(store, campaign, best=order == "best", limit=limit)
    if not kept:
        screen.note("No hidden-task episode was kept yet.")
    for shown in kept:
        screen.emit("episode", **shown.as_json())
        if not json:
            sys.stdout.write("\n".join(transcript_lines(shown)) + "\n\n")
    return 0


def cancel(campaign: str = "last", /, *, json: Json = False) -> int:
    """End a campaign: the trial that runs is cut, a partial report is written, records stay.

    Parameters
    ----------
    campaign
        Its id or the beginning of it; the latest one by default.
    json
        JSON instead of text.
    """
    from flows.record import open_store, request_cancel

    with open_store() as store:
        asked = request_cancel(store, campaign)
    screen = Screen(json_lines=json)
    screen.emit("cancel", campaign=asked.id, state=asked.state.value)
    ending = f"is {asked.state} already" if asked.state.is_over else "will end within seconds"
    screen.note(f"Campaign {asked.id} {ending}. What it recorded stays: a3r report {asked.id}")
    return 0


def resume(
    campaign: str = "last", /, *, detach: Annotated[bool, Parameter(negative=())] = False, json: Json = False
) -> int:
    """Go on with a campaign that was interrupted. No finished trial is repeated; harmless when it runs.

    Parameters
    ----------
    campaign
        Its id or the beginning of it; the latest one by default.
    detach
        Return at once.
    json
        One JSON object a line.
    """
    from flows.submission import resume_campaign

    screen = Screen(json_lines=json)
    campaign_id = resume_campaign(campaign, notify=screen.note)
    if detach:
        screen.detached(campaign_id)
        return 0
    return watch(campaign_id, screen=screen)
