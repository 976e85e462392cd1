"""Watching a campaign: what happened as lines, the trial that runs as a progress bar, the end as an answer."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from a3r.campaign import EventKind, TrialState, Verdict
from a3r.plan import BriefKind
from a3r.store.records import Event
from a3r.store.store import Store
from flows.record import Standing, TrialStanding, is_baseline, new_events, open_store, standing
from ui.cli.screen import Screen, duration, setting_text

_LOOK_EVERY_S = 0.5
_LINE_EVERY_UPDATES = 20


@dataclass
class _Bars:
    """One bar a trial on a terminal; off one, a line every so many updates."""

    screen: Screen
    progress: Progress | None
    tasks: dict[str, TaskID] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)

    def show(self, trial: TrialStanding) -> None:
        total = trial.trial.config.trainer.num_updates
        self.screen.emit(
            "progress",
            trial=trial.trial.id,
            setting=trial.setting.key,
            seed=trial.trial.seed,
            updates=trial.updates,
            of=total,
            reward=trial.reward,
        )
        if self.progress is not None:
            self._draw(trial, total=total)
        elif trial.updates >= self.lines.get(trial.trial.id, 0) + _LINE_EVERY_UPDATES:
            self.lines[trial.trial.id] = trial.updates
            self.screen.note(f"  {_name(trial)}  update {trial.updates}/{total}  {_reward(trial)}")

    def _draw(self, trial: TrialStanding, *, total: int) -> None:
        progress = self.progress
        if progress is None:
            return
        key = trial.trial.id
        if key not in self.tasks:
            self.tasks[key] = progress.add_task(_name(trial), total=max(total, 1), reward="")
        progress.update(self.tasks[key], completed=trial.updates, reward=_reward(trial))

    def end(self, trial: TrialStanding) -> None:
        if self.progress is not None and trial.trial.id in self.tasks:
            self.progress.remove_task(self.tasks.pop(trial.trial.id))


def follow(campaign_id: str, *, screen: Screen) -> int:
    """Show a campaign until it ends and return its exit code."""
    with open_store() as store, _bars(screen) as bars:
        seen, ended, shown = 0, set[str](), dict[str, int]()
        while True:
            now = standing(store, campaign_id)
            seen = _show_events(store, campaign_id, after=seen, screen=screen)
            for trial in now.trials:
                _show_trial(trial, bars=bars, ended=ended, shown=shown, screen=screen)
            if now.campaign.state.is_over and "report" in now.campaign.links:
                _show_events(store, campaign_id, after=seen, screen=screen)
                break
            time.sleep(_LOOK_EVERY_S)
    show_end(now, screen=screen)
    return now.exit_code


@contextmanager
def _bars(screen: Screen) -> Iterator[_Bars]:
    if not screen.is_live:
        yield _Bars(screen=screen, progress=None)
        return
    columns = (
        TextColumn("  {task.description}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("{task.fields[reward]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=screen.console, transient=True) as progress:
        yield _Bars(screen=screen, progress=progress)


def _show_events(store: Store, campaign_id: str, *, after: int, screen: Screen) -> int:
    for event in new_events(store, campaign_id, after=after):
        after = event.id
        screen.emit("event", event=event.kind.value, text=event.text, at=event.at, trial=event.trial_id)
        if not screen.json_lines and (line := _line(event)):
            screen.console.print(line, markup=False)
    return after


def _line(event: Event) -> str:
    if event.kind is EventKind.STATE:
        if event.trial_id is not None:
            return ""
        return f"campaign is {event.data['state']}" + (f": {event.text}" if event.text else "")
    if event.kind is EventKind.FAULT:
        return f"fault ({event.data['boundary']}): {event.text}"
    return event.text


def _show_trial(trial: TrialStanding, *, bars: _Bars, ended: set[str], shown: dict[str, int], screen: Screen) -> None:
    key = trial.trial.id
    if trial.trial.state is TrialState.RUNNING and shown.get(key) != trial.updates:
        shown[key] = trial.updates
        bars.show(trial)
    if trial.trial.state.is_over and key not in ended:
        ended.add(key)
        bars.end(trial)
        screen.emit("trial", trial=key, state=trial.trial.state.value, success=trial.success)
        if not screen.json_lines:
            screen.console.print(f"  {_name(trial)}  {_outcome(trial)}", markup=False)


def _name(trial: TrialStanding) -> str:
    setting = "untrained" if is_baseline(trial.setting) else setting_text(trial.setting.values)
    return f"{setting:<16} seed {trial.trial.seed}"


def _reward(trial: TrialStanding) -> str:
    return "" if trial.reward is None else f"reward {trial.reward:.3f}"


def _outcome(trial: TrialStanding) -> str:
    if trial.trial.state is not TrialState.FINISHED:
        return f"{trial.trial.state}: {trial.trial.reason}"
    took = (trial.trial.ended_at or 0) - (trial.trial.started_at or 0)
    parts = [_reward(trial), f"held-out success {trial.success:.3f}", duration(took)]
    return "  ".join(part for part in parts if part)


def show_end(now: Standing, *, screen: Screen) -> None:
    """The verdicts, where the report is, and what to try next."""
    links = now.campaign.links
    screen.emit(
        "end",
        campaign=now.campaign.id,
        state=now.campaign.state.value,
        verdicts=[row.verdict.as_json() for row in now.hypotheses if row.verdict],
        report=links.get("report"),
        exit_code=now.exit_code,
    )
    if screen.json_lines:
        return
    screen.console.print()
    for row in now.hypotheses:
        if row.verdict is not None:
            screen.console.print(
                f"{row.verdict.kind.value.upper()}: {row.planned.statement}", markup=False, style="bold"
            )
            screen.console.print(f"  {_effect(row.verdict)}{row.verdict.reason}", markup=False)
    screen.console.print(
        f"Campaign {now.campaign.id} {now.campaign.state} after {duration(now.elapsed_s)}.", markup=False
    )
    sys.stdout.write(f"report: {links['report']}\n")
    screen.console.print(f"next:   {_next(now)}", markup=False)


def _effect(verdict: Verdict) -> str:
    if verdict.effect is None or verdict.interval_low is None or verdict.interval_high is None:
        return ""
    return (
        f"difference {verdict.effect:+.3f}, 95 % interval {verdict.interval_low:+.3f} to {verdict.interval_high:+.3f}. "
    )


def _next(now: Standing) -> str:
    campaign_id = now.campaign.id
    if not any(t.trial.state is TrialState.FINISHED and t.updates for t in now.trials):
        return f"a3r status {campaign_id}"
    if now.campaign.kind is BriefKind.TRAIN:
        return f'a3r model chat {campaign_id} --message "…"   or   a3r model export {campaign_id} --to my_policy'
    return f'a3r episodes {campaign_id}   or   a3r model chat {campaign_id} --message "…"'
