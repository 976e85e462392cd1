"""What a report shows, gathered from the record: settings, seeds, curves, verdicts, costs, limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from a3r.campaign import BASELINE_KEY, SettingKind, TrialState, VerdictKind
from a3r.episode import EpisodeKind, Message, TranscriptTurn
from a3r.plan import BriefKind, ClaimKind, PlannedHypothesis
from a3r.store import EpisodeSummary, ExperimentRecord, HypothesisRecord, SettingRecord, TrialRecord
from flows.report_figures import Bar, Line, comparison, curves
from flows.report_sources import Number, Sources, Style, computed, metric

_MAX_POINTS = 40
_MAX_TEXT = 4000

Sentence: TypeAlias = "tuple[str | Number, ...]"


@dataclass(frozen=True, slots=True)
class Measured:
    """A score with its interval, if it has one."""

    value: Number
    low: Number | None
    high: Number | None


@dataclass(frozen=True, slots=True)
class TrialView:
    id: Number
    seed: Number
    state: Number
    reason: Number | None
    attempts: Number
    success: Measured | None
    """Held-out score; its interval is that of one evaluation (Wilson)."""
    tasks: Number | None
    faults: Number | None
    temperature: Number | None


@dataclass(frozen=True, slots=True)
class SettingView:
    name: Number
    is_untrained: bool
    colour: int
    trials: tuple[TrialView, ...]
    success: Measured | None
    """Over finished seeds by Student's t; of an untrained policy, all evaluations pooled (Wilson)."""
    num_seeds: Number


@dataclass(frozen=True, slots=True)
class CurveTable:
    """A figure of curves and the very numbers it is drawn from."""

    title: str
    svg: str
    columns: tuple[Sentence, ...]
    rows: tuple[tuple[Number | None, ...], ...]
    """One row a step: the step itself, then one figure a column."""


@dataclass(frozen=True, slots=True)
class Speech:
    """One message of a transcript."""

    role: str
    text: str


@dataclass(frozen=True, slots=True)
class EpisodeView:
    caption: Sentence
    speeches: tuple[Speech, ...]


@dataclass(frozen=True, slots=True)
class ExperimentView:
    statement: Number
    null: Number
    expectation: Number | None
    answer: Number | None
    """Supported, refuted or inconclusive; None before it was judged."""
    headline: Sentence
    reason: Number | None
    settings: tuple[SettingView, ...]
    figures: tuple[CurveTable, ...]
    comparison: str
    episodes: tuple[EpisodeView, ...]


@dataclass(frozen=True, slots=True)
class Evidence:
    sources: Sources
    experiments: tuple[ExperimentView, ...]
    plan: tuple[tuple[str, tuple[Number, ...]], ...]
    programs: tuple[tuple[tuple[str, Number], ...], ...]
    costs: tuple[tuple[str, Number], ...]
    limits: tuple[Sentence, ...]
    unfinished: tuple[TrialView, ...]
    level: Number

    @property
    def campaign_id(self) -> str:
        return self.sources.campaign.id


def gather(sources: Sources) -> Evidence:
    """Everything that a report of a campaign shows, at any time of its life."""
    reader, campaign = sources.reader, sources.campaign
    experiments = {e.hypothesis_index: e for e in reader.experiments(campaign.id)}
    views = tuple(_experiment(sources, row, experiments.get(row.index)) for row in reader.hypotheses(campaign.id))
    trials = [trial for view in views for setting in view.settings for trial in setting.trials]
    return Evidence(
        sources=sources,
        experiments=views,
        plan=_plan(sources),
        programs=tuple(_program(sources, program.id) for program in reader.programs(campaign.id)),
        costs=_costs(sources),
        limits=_limits(sources, views),
        unfinished=tuple(t for t in trials if t.state.value in (TrialState.FAILED, TrialState.CANCELLED)),
        level=_level(sources),
    )


def _level(sources: Sources) -> Number:
    return sources.cite(computed("level", []), label="confidence level", style=Style.LEVEL)


class ScoreStyles(NamedTuple):
    """How the plan's metric, differences of it, and sizes of differences are written."""

    score: Style
    change: Style
    span: Style


def score_styles(sources: Sources) -> ScoreStyles:
    """Per cent and points for fractions, plain numbers otherwise."""
    if sources.campaign.plan.metric.unit.startswith("fraction"):
        return ScoreStyles(Style.RATE, Style.POINTS, Style.SPAN)
    return ScoreStyles(Style.NUMBER, Style.NUMBER, Style.NUMBER)


def _score_name(sources: Sources) -> str:
    return f"eval/{sources.campaign.plan.metric.name}"


def _experiment(sources: Sources, row: HypothesisRecord, experiment: ExperimentRecord | None) -> ExperimentView:
    prefix = f"plan:hypotheses.{row.index}"
    settings = _settings(sources, experiment) if experiment else ()
    records = sources.reader.settings(experiment.id) if experiment else []
    return ExperimentView(
        statement=sources.cite(f"{prefix}.statement", label="hypothesis", style=Style.TEXT),
        null=sources.cite(f"{prefix}.null", label="null hypothesis", style=Style.TEXT),
        expectation=sources.cite(f"{prefix}.expectation", label="expectation", style=Style.TEXT)
        if row.planned.expectation
        else None,
        answer=sources.cite(f"verdict:{row.index}/kind", label="verdict", style=Style.TEXT)
        if row.verdict and experiment
        else None,
        headline=_headline(sources, row, records) if row.verdict and experiment else ("No verdict yet.",),
        reason=sources.cite(f"verdict:{row.index}/reason", label="why this verdict", style=Style.TEXT)
        if row.verdict and experiment
        else None,
        settings=settings,
        figures=_figures(sources, settings, records),
        comparison=_comparison(settings, sources.campaign.plan.metric.name),
        episodes=_episodes(sources, settings),
    )


def _settings(sources: Sources, experiment: ExperimentRecord) -> tuple[SettingView, ...]:
    views = [
        _setting(sources, record, colour=index) for index, record in enumerate(sources.reader.settings(experiment.id))
    ]
    sign = -1.0 if sources.campaign.plan.metric.direction == "maximise" else 1.0
    return tuple(sorted(views, key=lambda view: (view.is_untrained, view.success is None, sign * _score(view))))


def _score(view: SettingView) -> float:
    return float(view.success.value.value) if view.success else 0.0


def _setting(sources: Sources, record: SettingRecord, *, colour: int) -> SettingView:
    trials = sources.reader.trials(record.id)
    name = sources.cite(f"record:{record.id}/key", label="setting", style=Style.KEY)
    is_untrained = record.kind is SettingKind.BASELINE or record.key == BASELINE_KEY
    finished = [trial for trial in trials if trial.state is TrialState.FINISHED]
    scores = [ref for trial in finished for ref in _score_refs(sources, trial)]
    return SettingView(
        name=name,
        is_untrained=is_untrained,
        colour=colour,
        trials=tuple(_trial(sources, trial, name.text) for trial in trials),
        success=_pooled(sources, finished, name.text) if is_untrained else _over_seeds(sources, scores, name.text),
        num_seeds=sources.cite(computed("count", scores), label=f"{name.text}: finished seeds", style=Style.COUNT),
    )


def _score_refs(sources: Sources, trial: TrialRecord) -> list[str]:
    """The reference of a trial's last score; none before it was measured."""
    steps = sources.steps(trial.id, _score_name(sources))
    return [metric(trial.id, _score_name(sources), steps[-1])] if steps else []


def _over_seeds(sources: Sources, scores: list[str], name: str) -> Measured | None:
    if not scores:
        return None
    style = score_styles(sources).score
    has_spread = len(scores) >= 2
    label = f"{name}: mean over seeds"
    return Measured(
        value=sources.cite(computed("mean", scores), label=label, style=style),
        low=sources.cite(computed("mean_low", scores), label=f"{label}, low end", style=style) if has_spread else None,
        high=sources.cite(computed("mean_high", scores), label=f"{label}, high end", style=style)
        if has_spread
        else None,
    )


def _pooled(sources: Sources, trials: Sequence[TrialRecord], name: str) -> Measured | None:
    """Mean over evaluations of one policy, with Wilson's interval where the metric is a success rate."""
    style = score_styles(sources).score
    scores = [ref for trial in trials for ref in _score_refs(sources, trial)]
    if not scores:
        return None
    whole = scores[0] if len(scores) == 1 else computed("mean", scores)
    value = sources.cite(whole, label=f"{name}: success", style=style)
    counts = [ref.replace(f"/{_score_name(sources)}@", "/eval/episodes@") for ref in scores]
    if style is not Style.RATE or not all(_is_known(sources, ref) for ref in counts):
        return Measured(value, None, None)
    return Measured(
        value=value,
        low=sources.cite(computed("success_low", scores, counts), label=f"{name}: success, low end", style=style),
        high=sources.cite(computed("success_high", scores, counts), label=f"{name}: success, high end", style=style),
    )


def _is_known(sources: Sources, ref: str) -> bool:
    trial_id, _, name_at_step = ref.removeprefix("metric:").partition("/")
    name, _, step = name_at_step.rpartition("@")
    return (name, int(step)) in sources.metrics(trial_id)


def _trial(sources: Sources, trial: TrialRecord, setting: str) -> TrialView:
    label = f"{setting}, seed {trial.seed}"
    return TrialView(
        id=sources.cite(f"record:{trial.id}/id", label=f"{label}: trial", style=Style.TEXT),
        seed=sources.cite(f"record:{trial.id}/seed", label=f"{label}: seed", style=Style.COUNT),
        state=sources.cite(f"record:{trial.id}/state", label=f"{label}: state", style=Style.TEXT),
        reason=sources.cite(f"record:{trial.id}/reason", label=f"{label}: reason", style=Style.TEXT)
        if trial.reason
        else None,
        attempts=sources.cite(f"record:{trial.id}/attempts", label=f"{label}: attempts", style=Style.COUNT),
        success=_pooled(sources, [trial], label),
        tasks=_last(sources, trial, "eval/episodes", label=f"{label}: hidden tasks", style=Style.COUNT),
        faults=_last(sources, trial, "eval/faults", label=f"{label}: faults on hidden tasks", style=Style.COUNT),
        temperature=_last(sources, trial, "eval/temperature", label=f"{label}: temperature"),
    )


def _last(sources: Sources, trial: TrialRecord, name: str, *, label: str, style: Style = Style.NUMBER) -> Number | None:
    steps = sources.steps(trial.id, name)
    return sources.cite(metric(trial.id, name, steps[-1]), label=label, style=style) if steps else None


def _headline(sources: Sources, row: HypothesisRecord, records: Sequence[SettingRecord]) -> Sentence:
    """The verdict in plain words, every figure cited."""
    judged = sources.judged(row.index)
    names = tuple(_name(sources, row.index, side) for side in ("treatment", "control"))
    if judged.effect is None:
        return ("Undecided: too little of the plan was finished to compare anything.",)
    measured = _effect(sources, row, records)
    minimum = sources.cite(
        f"plan:hypotheses.{row.index}.minimum_effect", label="minimum effect", style=score_styles(sources).span
    )
    opening = _opening(row.planned, judged.kind, names=names, minimum=minimum)
    return (*opening, *measured)


def _name(sources: Sources, index: int, side: str) -> str | Number:
    key = sources.value(f"verdict:{index}/{side}")
    if key == BASELINE_KEY:
        return "the untrained policy"
    if sources.campaign.kind is BriefKind.TRAIN:
        return "the trained policy"
    return sources.cite(f"verdict:{index}/{side}", label=f"{side} of the verdict", style=Style.KEY)


def _opening(
    planned: PlannedHypothesis, kind: VerdictKind, *, names: tuple[str | Number, ...], minimum: Number
) -> Sentence:
    treatment, control = names
    decided: dict[tuple[ClaimKind, VerdictKind], Sentence] = {
        (ClaimKind.BETTER, VerdictKind.SUPPORTED): ("Yes: ", treatment, " beats ", control, ". "),
        (ClaimKind.BETTER, VerdictKind.REFUTED): (
            *("No: ", treatment, " does not beat ", control),
            *(" by the minimum effect of ", minimum, ". "),
        ),
        (ClaimKind.EQUIVALENT, VerdictKind.SUPPORTED): (
            *("Yes: ", treatment, " and ", control, " differ by less than the margin of ", minimum, ". "),
        ),
        (ClaimKind.EQUIVALENT, VerdictKind.REFUTED): (
            *("No: ", treatment, " and ", control, " differ by more than the margin of ", minimum, ". "),
        ),
        (ClaimKind.RANKING, VerdictKind.SUPPORTED): (
            *("Yes: ", treatment, " is the best setting tried; the next best is ", control, ". "),
        ),
    }
    if planned.kind is ClaimKind.RANKING:
        undecided: Sentence = (
            *("Undecided: ", treatment, " has the highest mean, but not every other setting is told apart from it; "),
            *("the next best is ", control, ". "),
        )
    else:
        undecided = ("Undecided between ", treatment, " and ", control, ". ")
    return decided.get((planned.kind, kind), undecided)


def _effect(sources: Sources, row: HypothesisRecord, records: Sequence[SettingRecord]) -> Sentence:
    groups = _effect_groups(sources, row.index, records)
    style = score_styles(sources).change
    effect = sources.cite(computed("effect", *groups), label="difference of the verdict", style=style)
    if sources.judged(row.index).interval_low is None:
        return ("Measured difference: ", effect, ", without an interval.")
    low = sources.cite(computed("effect_low", *groups), label="difference, low end", style=style)
    high = sources.cite(computed("effect_high", *groups), label="difference, high end", style=style)
    return ("Measured difference: ", effect, "; ", _level(sources), " interval ", low, " to ", high, ".")


def _effect_groups(sources: Sources, index: int, records: Sequence[SettingRecord]) -> list[list[str]]:
    """Arguments of the functions of a difference: treatment, control, hidden tasks."""
    judged = sources.judged(index)
    sides = [_refs_of(sources, records, key) for key in (judged.treatment, judged.control)]
    if sources.campaign.plan.metric.direction == "minimise":
        sides.reverse()
    return [*sides, ["plan:metric.num_tasks"]]


def _refs_of(sources: Sources, records: Sequence[SettingRecord], key: str) -> list[str]:
    record = next(record for record in records if record.key == key)
    finished = [t for t in sources.reader.trials(record.id) if t.state is TrialState.FINISHED]
    return [ref for trial in finished for ref in _score_refs(sources, trial)]


def _figures(
    sources: Sources, settings: Sequence[SettingView], records: Sequence[SettingRecord]
) -> tuple[CurveTable, ...]:
    trials = {record.key: sources.reader.trials(record.id) for record in records}
    drawn: list[CurveTable] = []
    for name, title, least in (
        ("train/reward", "Training reward", 1),
        (_score_name(sources), "Held-out score during training", 2),
    ):
        shown = [
            (view, trial)
            for view in settings
            for trial in trials[str(view.name.value)]
            if len(sources.steps(trial.id, name)) >= least
        ]
        if shown:
            drawn.append(_curve_table(sources, shown, name, title))
    return tuple(drawn)


def _curve_table(
    sources: Sources, shown: Sequence[tuple[SettingView, TrialRecord]], name: str, title: str
) -> CurveTable:
    steps = _thinned(sorted({step for _, trial in shown for step in sources.steps(trial.id, name)}))
    columns: list[Sentence] = []
    cells: list[dict[int, Number]] = []
    lines: list[Line] = []
    for view in dict.fromkeys(view for view, _ in shown):
        trials = [trial for owner, trial in shown if owner == view]
        for trial in trials:
            seed = next(t.seed for t in view.trials if t.id.value == trial.id)
            columns.append((view.name, ", seed ", seed))
            cells.append(_curve(sources, [trial], name, steps, label=view.name.text))
            lines.append(_line(cells[-1], view.colour, is_mean=False))
        columns.append((view.name, ", mean"))
        cells.append(_curve(sources, trials, name, steps, label=view.name.text))
        lines.append(_line(cells[-1], view.colour, is_mean=True))
    step_refs = {step: _step_number(step, shown, sources, name) for step in steps}
    rows = tuple((step_refs[step], *(cell.get(step) for cell in cells)) for step in steps)
    return CurveTable(title, curves(lines, y_label=title.lower()), tuple(columns), rows)


def _step_number(step: int, shown: Sequence[tuple[SettingView, TrialRecord]], sources: Sources, name: str) -> Number:
    trial = next(trial for _, trial in shown if step in sources.steps(trial.id, name))
    return sources.cite(f"step:{trial.id}/{name}@{step}", label="policy updates", style=Style.COUNT)


def _curve(
    sources: Sources, trials: Sequence[TrialRecord], name: str, steps: Sequence[int], *, label: str
) -> dict[int, Number]:
    """Step to the metric of one trial, or to its mean over several."""
    points: dict[int, Number] = {}
    for step in steps:
        refs = [metric(t.id, name, step) for t in trials if (name, step) in sources.metrics(t.id)]
        if refs:
            ref = refs[0] if len(trials) == 1 else computed("mean", refs)
            points[step] = sources.cite(ref, label=f"{label}: {name} at update {step}")
    return points


def _line(points: dict[int, Number], colour: int, *, is_mean: bool) -> Line:
    return Line([(step, float(number.value)) for step, number in points.items()], colour, is_mean)


def _thinned(steps: list[int]) -> list[int]:
    """At most about forty steps, evenly, always with the last one."""
    stride = -(-len(steps) // _MAX_POINTS)
    return sorted({*steps[::stride], steps[-1]}) if steps else []


def _comparison(settings: Sequence[SettingView], name: str) -> str:
    bars = [
        Bar(
            name="untrained" if view.is_untrained else view.name.text,
            value=float(view.success.value.value),
            low=float(view.success.low.value) if view.success.low else None,
            high=float(view.success.high.value) if view.success.high else None,
            seeds=[float(t.success.value.value) for t in view.trials if t.success and t.state.value == "finished"],
            colour=view.colour,
        )
        for view in settings
        if view.success
    ]
    return comparison(bars, x_label=f"held-out {name}") if bars else ""


def _episodes(sources: Sources, settings: Sequence[SettingView]) -> tuple[EpisodeView, ...]:
    """The best and the worst kept hidden-task episode of the best setting's first finished seed."""
    for view in settings:
        for trial in view.trials:
            kept = [
                episode
                for episode in sources.episodes(str(trial.id.value))
                if episode.kind is EpisodeKind.EVAL and episode.metric is not None and episode.transcript is not None
            ]
            if kept and not view.is_untrained:
                ranked = sorted(kept, key=lambda e: (e.step, e.metric or 0.0, -e.turns))
                last = [e for e in ranked if e.step == ranked[-1].step]
                chosen = [("Best", last[-1])] + ([("Worst", last[0])] if len(last) > 1 else [])
                return tuple(_episode(sources, view, trial, episode, word=word) for word, episode in chosen)
    return ()


def _episode(
    sources: Sources, view: SettingView, trial: TrialView, episode: EpisodeSummary, *, word: str
) -> EpisodeView:
    assert episode.transcript is not None
    ref = f"episode:{trial.id.value}/{episode.episode_id}"
    score = sources.cite(f"{ref}/metric", label=f"{word.lower()} hidden task: score")
    task = sources.cite(f"{ref}/task", label=f"{word.lower()} hidden task", style=Style.TEXT)
    caption: Sentence = (
        f"{word} kept hidden task ",
        task,
        ": score ",
        score,
        " with ",
        view.name,
        ", seed ",
        trial.seed,
    )
    return EpisodeView(caption, _speeches(episode.transcript.turns))


def _speeches(turns: Sequence[TranscriptTurn]) -> tuple[Speech, ...]:
    """Messages of all turns in order; what a turn repeats of the one before is shown once."""
    said: list[Message] = []
    shown: list[Speech] = []
    for turn in turns:
        messages = list(turn.messages)
        fresh = messages[len(said) :] if messages[: len(said)] == said else messages
        shown += [_speech(message) for message in [*fresh, turn.reply]]
        said = [*messages, turn.reply]
    return tuple(shown)


def _speech(message: Message) -> Speech:
    content = message.get("content")
    text = content if isinstance(content, str) else "" if content is None else str(content)
    calls = message.get("tool_calls")
    if calls:
        text = f"{text}\n{calls}".strip()
    return Speech(str(message["role"]), text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + " [cut here]")


def _plan(sources: Sources) -> tuple[tuple[str, tuple[Number, ...]], ...]:
    """The plan as it was approved: name and its values."""
    plan = sources.campaign.plan

    def text(path: str) -> Number:
        return sources.cite(f"plan:{path}", label=path, style=Style.TEXT)

    def count(path: str, style: Style = Style.COUNT) -> Number:
        return sources.cite(f"plan:{path}", label=path, style=style)

    rows: list[tuple[str, tuple[Number, ...]]] = [("task", (text("brief.understood"),))]
    for index in range(len(plan.hypotheses)):
        minimum = count(f"hypotheses.{index}.minimum_effect", Style.NUMBER)
        rows.append(("minimum effect", (minimum,)))
    rows += [
        ("metric", (text("metric.name"), text("metric.unit"))),
        ("hidden tasks", (count("metric.num_tasks"),)),
        ("temperature", (count("metric.temperature", Style.NUMBER),)),
        ("seeds", tuple(count(f"seeds.{index}") for index in range(len(plan.seeds)))),
        ("model", (text("base.model"),)),
        ("updates", (count("base.trainer.num_updates"),)),
        ("tasks per update", (count("base.trainer.batch_tasks"),)),
        ("episodes per task", (count("base.trainer.group_size"),)),
        ("training temperature", (count("base.trainer.temperature", Style.NUMBER),)),
        ("budget, wall time", (count("budget.wall_s", Style.SECONDS),)),
    ]
    if plan.budget.trials is not None:
        rows.append(("budget, trials", (count("budget.trials"),)))
    rows += [("rule", (text(f"decision_rules.{index}"),)) for index in range(len(plan.decision_rules))]
    rows.append(("estimate", (count("estimate.trials"), count("estimate.wall_s", Style.SECONDS))))
    rows += [("note", (text(f"notes.{index}"),)) for index in range(len(plan.notes))]
    return tuple(rows)


def _program(sources: Sources, program_id: str) -> tuple[tuple[str, Number], ...]:
    program = sources.reader.program(program_id)
    names = ["coder", "attempts", "commit", "sha256", "path", *(f"gate {name}" for name in program.gates)]
    return tuple(
        (
            name,
            sources.cite(
                f"record:{program_id}/{name}",
                label=f"program {name}",
                style=Style.COUNT if name == "attempts" else Style.TEXT,
            ),
        )
        for name in names
        if name != "commit" or program.commit
    )


def _costs(sources: Sources) -> tuple[tuple[str, Number], ...]:
    trials = sources.reader.campaign_trials(sources.campaign.id)
    rows: list[tuple[str, Number]] = []
    if sources.campaign.ended_at is not None and sources.campaign.approved_at is not None:
        seconds = sources.cite(f"record:{sources.campaign.id}/seconds", label="wall time", style=Style.SECONDS)
        rows.append(("wall time, from approval to end", seconds))
    for name, title, style in (
        ("cost/wall_s", "wall time in trials, added up", Style.SECONDS),
        ("cost/cpu_s", "CPU time", Style.SECONDS),
        ("cost/episodes", "episodes", Style.COUNT),
        ("cost/turns", "turns", Style.COUNT),
        ("cost/tokens", "sampled tokens", Style.COUNT),
        ("cost/faults", "episodes lost to faults of the program", Style.COUNT),
    ):
        refs = _last_refs(sources, trials, name)
        if refs:
            rows.append((title, sources.cite(computed("sum", refs), label=title, style=style)))
    return tuple(rows)


def _last_refs(sources: Sources, trials: Sequence[TrialRecord], name: str) -> list[str]:
    known = [(trial.id, sources.steps(trial.id, name)) for trial in trials]
    return [metric(trial_id, name, steps[-1]) for trial_id, steps in known if steps]


def _limits(sources: Sources, experiments: Sequence[ExperimentView]) -> tuple[Sentence, ...]:
    """What this campaign cannot say, in sentences."""
    plan, campaign_id = sources.campaign.plan, sources.campaign.id
    seeds = sources.cite(
        computed("count", [f"plan:seeds.{i}" for i in range(len(plan.seeds))]), label="planned seeds", style=Style.COUNT
    )
    tasks = sources.cite("plan:metric.num_tasks", label="hidden tasks", style=Style.COUNT)
    temperature = sources.cite("plan:metric.temperature", label="temperature")
    done = sources.cite(f"record:{campaign_id}/trials_finished", label="finished trials", style=Style.COUNT)
    opened = sources.cite(f"record:{campaign_id}/trials", label="opened trials", style=Style.COUNT)
    limits: list[Sentence] = [
        ("Each setting has ", seeds, " planned seeds; ", done, " of ", opened, " opened trials finished."),
        (
            *("Scores come from ", tasks, " hidden tasks at temperature ", temperature),
            ", drawn by the same generator as the training tasks: other kinds of task were not tested.",
        ),
        ("One model and one program were used; everything that the plan holds equal was not varied.",),
        ("Concurrent trials are alike only statistically: run again, every figure moves within its noise.",),
    ]
    limits += [_noise(sources, row) for row in sources.reader.hypotheses(campaign_id) if _has_interval(sources, row)]
    if any(h.kind is ClaimKind.RANKING for h in plan.hypotheses):
        limits.append(("The best of several settings was picked by its score, so its own score is somewhat too high.",))
    faults = _last_refs(sources, sources.reader.campaign_trials(campaign_id), "eval/faults")
    if faults:
        total = sources.cite(computed("sum", faults), label="faults on hidden tasks", style=Style.COUNT)
        limits.append(("Hidden-task episodes that ended in a fault of the program and count as unsolved: ", total, "."))
    if not any(setting.success for view in experiments for setting in view.settings if setting.is_untrained):
        limits.append(("The untrained policy was not measured.",))
    return tuple(limits)


def _has_interval(sources: Sources, row: HypothesisRecord) -> bool:
    return row.verdict is not None and sources.judged(row.index).interval_low is not None


def _noise(sources: Sources, row: HypothesisRecord) -> Sentence:
    experiments = sources.reader.experiments(sources.campaign.id)
    experiment = next(e for e in experiments if e.hypothesis_index == row.index)
    groups = _effect_groups(sources, row.index, sources.reader.settings(experiment.id))
    half = sources.cite(computed("effect_half", *groups), label="half the interval", style=score_styles(sources).span)
    return ("With this noise and this many seeds the difference is known to within ", half, " either way.")
