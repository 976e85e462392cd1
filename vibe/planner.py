"""A research sentence over the recipes, turned into a Plan without a language model.

What is varied and claimed is read in `vibe.questions`; `vibe.sizing` fits it to the budget. All is settled
before any data exists, and a plan that cannot fit is refused before anything is spent.
"""

from __future__ import annotations

import math

from pydantic import JsonValue

from a3r.campaign import decision_rule
from a3r.config import Budget, TrialConfig
from a3r.errors import PlanRejected, UsageError
from a3r.plan import Brief, BriefKind, ClaimKind, Estimate, Metric, Plan, PlannedHypothesis, SearchSpace
from vibe import wording
from vibe.brief import names_a_task
from vibe.questions import Question, is_endless, read_question, setting_shown
from vibe.sizing import BUDGET_SHARE, MIN_UPDATES, Costs, Rates, Size, fitted, least_wall_s, most_updates, too_small

MINIMUM_EFFECT = 0.05
"""Smallest difference in the fraction of hidden tasks solved that is called one."""


def plan(text: str, *, brief: Brief, budget: Budget | None, base: TrialConfig, rates: Rates | None = None) -> Plan:
    """The plan that answers `text` within `budget` (None: what the sentence says, or the default).

    A training brief is no question: see `training_plan`. Raises PlanRejected when the question is none that
    settings can answer, or when not even the least of it fits the budget.
    """
    if base.trainer.num_updates == 0:
        raise PlanRejected("The base settings train nothing", next_step="set trainer.num_updates to 1 or more")
    if brief.kind == BriefKind.TRAIN:
        return training_plan(text, brief=brief, budget=budget, base=base, rates=rates)
    question = read_question(text, base=base)
    notes = list(question.notes)
    if not names_a_task(text):
        notes.append(f"No task was named: {brief.understood} is assumed.")
    settings = _settings(question, base=base, notes=notes)
    num_settings = len(settings) or None
    costs = Costs(rates or Rates(), base, _turns_per_episode(brief), _episodes_per_update(settings, base=base))
    granted = _budget(text, budget=budget, notes=notes, least_s=least_wall_s(num_settings, costs=costs))
    size = fitted(num_settings, costs=costs, budget=granted)
    base = base.updated({"trainer.num_updates": size.num_updates})
    space = _space(question, settings, size=size, notes=notes)
    return Plan(
        question=text,
        brief=brief,
        hypotheses=(_hypothesis(question, space=space),),
        metric=Metric(temperature=base.judge.eval_temperature, num_tasks=base.judge.eval_tasks),
        space=space,
        seeds=tuple(range(base.seed, base.seed + size.num_seeds)),
        base=base,
        decision_rules=_decision_rules(question, num_seeds=size.num_seeds),
        budget=granted,
        estimate=_estimate(size, costs),
        notes=tuple(notes),
    )


def training_plan(
    text: str, *, brief: Brief, budget: Budget | None, base: TrialConfig, rates: Rates | None = None
) -> Plan:
    """One policy, one seed, no search and no claim: as many updates as asked for and as fit the budget.

    Raises PlanRejected when not even the fewest useful updates fit.
    """
    notes: list[str] = []
    costs = Costs(rates or Rates(), base, _turns_per_episode(brief), base.trainer.batch_tasks * base.trainer.group_size)
    least = Size(num_settings=1, num_seeds=1, num_updates=min(MIN_UPDATES, base.trainer.num_updates))
    granted = _budget(text, budget=budget, notes=notes, least_s=costs.wall_s(least) / BUDGET_SHARE)
    size = Size(1, 1, most_updates(least, costs=costs, budget=granted))
    if costs.wall_s(size) > BUDGET_SHARE * granted.wall_s:
        raise too_small("The budget cannot hold a training run", least_s=costs.wall_s(least) / BUDGET_SHARE)
    return Plan(
        question=text,
        brief=brief,
        hypotheses=(),
        metric=Metric(temperature=base.judge.eval_temperature, num_tasks=base.judge.eval_tasks),
        space=SearchSpace(settings=({"trainer.num_updates": size.num_updates},)),
        seeds=(base.seed,),
        base=base.updated({"trainer.num_updates": size.num_updates}),
        decision_rules=(
            "One policy is trained with one seed; it and the untrained policy are measured on the same hidden tasks.",
            "One seed says nothing about another one, so no claim is made.",
        ),
        budget=granted,
        estimate=_estimate(size, costs),
        notes=tuple(notes),
    )


def _settings(question: Question, *, base: TrialConfig, notes: list[str]) -> list[dict[str, JsonValue]]:
    """The settings that the question fixes, each valid; none for a search or a training brief."""
    if question.factor is None:
        return []
    settings: list[dict[str, JsonValue]] = [{question.factor.path: level} for level in question.levels]
    if question.factor.path == "trainer.group_size":
        settings = _equal_episodes(settings, base=base, notes=notes)
    for setting in settings:
        _check(setting, base=base)
    return settings


def _episodes_per_update(settings: list[dict[str, JsonValue]], *, base: TrialConfig) -> int:
    trainers = [base.updated(setting).trainer for setting in settings] or [base.trainer]
    return max(trainer.batch_tasks * trainer.group_size for trainer in trainers)


def _turns_per_episode(brief: Brief) -> int:
    """Calls of one episode at most: what the parameters say, or one for each of the two roles of signalling."""
    turns = brief.parameters.get("turns")
    if isinstance(turns, int):
        return turns
    return 2 if brief.recipe == "signalling" else 1


def _budget(text: str, *, budget: Budget | None, notes: list[str], least_s: float) -> Budget:
    """The given budget, or the sentence's, or the default one; what was assumed is noted."""
    if budget is not None:
        if is_endless(text):
            notes.append("Nothing runs for ever: the given budget ends it.")
        return budget
    said_s = wording.duration_s(wording.plain(text))
    if said_s is not None and said_s <= 0:
        raise too_small("A budget of zero allows nothing", least_s=least_s)
    if said_s is not None:
        notes.append(f"Budget taken from the sentence: {wording.duration_shown(said_s)}.")
        return Budget(wall_s=said_s)
    default = Budget()
    ending = "Nothing runs for ever: the" if is_endless(text) else "No budget was given: the"
    notes.append(f"{ending} default of {wording.duration_shown(default.wall_s)} is used.")
    return default


def _space(question: Question, settings: list[dict[str, JsonValue]], *, size: Size, notes: list[str]) -> SearchSpace:
    if settings:
        return SearchSpace(settings=tuple(settings))
    notes.append(
        f"{size.num_settings} settings are sampled. The best one's figure is the highest of {size.num_settings} and "
        "therefore somewhat too high; it is not confirmed on fresh seeds."
    )
    return SearchSpace(dimensions=question.dimensions, num_settings=size.num_settings)


def _equal_episodes(
    settings: list[dict[str, JsonValue]], *, base: TrialConfig, notes: list[str]
) -> list[dict[str, JsonValue]]:
    """Group sizes with the number of groups that keeps the episodes of an update equal."""
    sizes = [int(str(setting["trainer.group_size"])) for setting in settings]
    if min(sizes) < 2:
        raise PlanRejected("A group needs at least 2 episodes", next_step="name group sizes of 2 or more")
    multiple = math.lcm(*sizes)
    episodes = max(multiple, base.trainer.batch_tasks * base.trainer.group_size // multiple * multiple)
    notes.append(f"Held equal: {episodes} episodes per update, so larger groups mean fewer tasks in a batch.")
    return [{"trainer.group_size": size, "trainer.batch_tasks": episodes // size} for size in sizes]


def _check(setting: dict[str, JsonValue], *, base: TrialConfig) -> None:
    try:
        base.updated(setting)
    except UsageError as error:
        raise PlanRejected(
            f"{setting_shown(setting)} cannot be run", why=error.why or error.what, next_step="name another value"
        ) from error


def _hypothesis(question: Question, *, space: SearchSpace) -> PlannedHypothesis:
    if question.kind is ClaimKind.RANKING:
        return _ranking(question, space)
    treatment, control = space.grid()
    margin = f"{MINIMUM_EFFECT * 100:g} points"
    if question.kind is ClaimKind.EQUIVALENT:
        statement = f"{setting_shown(treatment)} and {setting_shown(control)} differ by less than {margin}"
        null = f"They differ by {margin} or more"
        expectation = question.expectation or "None: the question leaves it open."
    else:
        statement = f"{setting_shown(treatment)} beats {setting_shown(control)} by at least {margin}"
        null = f"It does not beat it by {margin}"
        expectation = "The treatment is better, as the question supposes."
    return PlannedHypothesis(
        statement=statement,
        null=null,
        kind=question.kind,
        treatment=treatment,
        control=control,
        minimum_effect=MINIMUM_EFFECT,
        expectation=expectation,
    )


def _ranking(question: Question, space: SearchSpace) -> PlannedHypothesis:
    among = "; ".join(map(setting_shown, space.grid())) if space.is_grid else f"{space.num_settings} sampled settings"
    return PlannedHypothesis(
        statement=f"One setting is best among {among}",
        null="No setting is distinguishable from every other one",
        kind=ClaimKind.RANKING,
        minimum_effect=MINIMUM_EFFECT,
        expectation=question.expectation or "Middle values do best: small steps learn little, large ones destroy.",
    )


def _decision_rules(question: Question, *, num_seeds: int) -> tuple[str, ...]:
    return (
        f"Every setting is trained with the same {num_seeds} seeds and measured on the same hidden tasks.",
        decision_rule(question.kind, minimum_effect=MINIMUM_EFFECT),
        "A trial that fails is left out by name; it never counts as zero.",
        "When the budget ends, what is finished is judged by the same rules.",
    )


def _estimate(size: Size, costs: Costs) -> Estimate:
    basis = (
        f"{size.num_settings} settings x {size.num_seeds} seeds, {size.num_updates} updates each, "
        f"{costs.turns} turn(s) an episode at {costs.rates.turn_s * 1000:g} ms; {costs.rates.basis}"
    )
    return Estimate(trials=size.num_trials, wall_s=round(costs.wall_s(size), 1), basis=basis)
