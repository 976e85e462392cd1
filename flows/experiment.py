"""One Experiment: a hypothesis, its settings times seeds, and the verdict. A Prefect flow of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from statistics import fmean

from prefect import flow
from pydantic import JsonValue

from a3r.campaign import BASELINE_VALUES, SettingKind, TrialState, judge_hypothesis
from a3r.config import TrialConfig
from a3r.errors import PlanRejected
from a3r.search import Search
from a3r.store.records import SettingRecord
from flows.desk import Desk
from flows.trial import trial


@flow(name="experiment", flow_run_name="{experiment_id}", validate_parameters=False)
async def experiment(campaign_id: str, experiment_id: str) -> None:
    """Measure the untrained policy, run every setting with every seed, judge the hypothesis."""
    with Desk.open(campaign_id) as desk:
        await measure_baseline(desk, experiment_id)
        await run_settings(desk, experiment_id)
        judge(desk, experiment_id)


async def measure_baseline(desk: Desk, experiment_id: str) -> None:
    """The untrained policy on the hidden tasks: what every gain is a gain over."""
    setting = desk.store.open_setting(experiment_id, BASELINE_VALUES, kind=SettingKind.BASELINE)
    await _run_seed(desk, setting, seed=desk.campaign.plan.seeds[0])


async def run_settings(desk: Desk, experiment_id: str) -> None:
    """Ask for settings, run their seeds, tell the mean.

    Levels are compared at equal numbers of seeds, seed after seed, so that a budget that ends early ends them all
    alike; sampled settings are run one by one, since each is proposed from what is known.
    """
    plan = desk.campaign.plan
    search = Search.open(
        desk.lab.search_path(desk.campaign_id),
        experiment_id,
        plan.space,
        seed=plan.base.seed,
        direction=plan.metric.direction,
    )
    if plan.space.is_grid:
        settings = [setting async for setting in _asked(desk, experiment_id, search)]
        for seed in plan.seeds:
            for setting in settings:
                await _run_seed(desk, setting, seed=seed)
        for setting in settings:
            _tell(desk, search, setting)
        return
    async for setting in _asked(desk, experiment_id, search):
        for seed in plan.seeds:
            await _run_seed(desk, setting, seed=seed)
        _tell(desk, search, setting)


async def _asked(desk: Desk, experiment_id: str, search: Search) -> AsyncIterator[SettingRecord]:
    while (proposed := search.ask()) is not None:
        yield desk.store.open_setting(experiment_id, proposed.values, number=proposed.number)


async def _run_seed(desk: Desk, setting: SettingRecord, *, seed: int) -> None:
    config = trial_config(desk.campaign.plan.base, setting.values, seed=seed)
    opened = desk.store.open_trial(setting.id, seed=seed, config=config)
    if not opened.state.is_over:
        await trial(desk.campaign_id, opened.id)


def trial_config(base: TrialConfig, values: Mapping[str, JsonValue], *, seed: int) -> TrialConfig:
    """All settings of one trial."""
    return base.updated({**values, "seed": seed})


def _tell(desk: Desk, search: Search, setting: SettingRecord) -> None:
    if setting.number is None:
        return
    trials = desk.store.trials(setting.id)
    scores = [_score(desk, row.id) for row in trials if row.state is TrialState.FINISHED]
    if scores:
        search.tell(setting.number, fmean(scores))
    else:
        search.fail(setting.number, "; ".join(row.reason for row in trials))


def _score(desk: Desk, trial_id: str) -> float:
    return desk.store.series(trial_id, "eval/success")[-1].value


def judge(desk: Desk, experiment_id: str) -> None:
    """Judge the experiment's hypothesis by the plan's rule, on what has finished so far."""
    plan = desk.campaign.plan
    row = next(row for row in desk.store.experiments(desk.campaign_id) if row.id == experiment_id)
    scores = desk.store.scores(experiment_id)
    if not scores:
        raise PlanRejected(
            "No trial finished", why="there is nothing to judge", next_step="read the faults: a3r status"
        )
    if plan.hypotheses:
        verdict = judge_hypothesis(plan.hypotheses[row.hypothesis_index], scores, metric=plan.metric)
        desk.store.set_verdict(desk.campaign_id, row.hypothesis_index, verdict)
