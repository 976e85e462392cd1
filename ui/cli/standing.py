"""Where a campaign stands, as rows of tables."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

from ui.cli.screen import duration, setting_text

if TYPE_CHECKING:
    from a3r.store.records import CampaignRecord
    from flows.record import Standing


def fact_rows(now: Standing) -> list[tuple[str, str]]:
    """The campaign's state, clock, program, verdicts and links."""
    campaign = now.campaign
    rows = [
        ("campaign", campaign.id),
        ("question", campaign.question),
        ("state", campaign.state.value + (f": {campaign.reason}" if campaign.reason else "")),
        ("elapsed", f"{duration(now.elapsed_s)} of {duration(campaign.plan.budget.wall_s)}"),
        ("trials", f"{sum(t.trial.state.is_over for t in now.trials)} of {now.num_planned_trials} done"),
    ]
    rows += [("program", f"{program.coder}, commit {program.commit[:10]}") for program in now.programs]
    for row in now.hypotheses:
        verdict = "not judged yet" if row.verdict is None else f"{row.verdict.kind}: {row.verdict.reason}"
        rows += [("hypothesis", row.planned.statement), ("verdict", verdict)]
    return rows + sorted(campaign.links.items())


def trial_rows(now: Standing) -> list[tuple[str, ...]]:
    """One row a trial."""
    return [
        (
            setting_text(t.setting.values),
            str(t.trial.seed),
            t.trial.state.value,
            f"{t.updates}/{t.trial.config.trainer.num_updates}",
            _number(t.reward),
            _number(t.success),
        )
        for t in now.trials
    ]


def campaign_row(campaign: CampaignRecord) -> tuple[str, str, str, str]:
    """One row of the list of campaigns."""
    ordered = datetime.fromtimestamp(campaign.created_at).strftime("%Y-%m-%d %H:%M")
    return campaign.id, campaign.state.value, ordered, campaign.question


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
