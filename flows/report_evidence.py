"""What a report shows, gathered from the record: settings, seeds, episodes, plan, program, cost."""

from __future__ import annotations

from collections.abc import Sequence

from a3r.campaign import BASELINE_KEY, SettingKind, TrialState
from a3r.episode import EpisodeKind, Message, TranscriptTurn
from a3r.store import EpisodeSummary, ExperimentRecord, HypothesisRecord, SettingRecord, TrialRecord
from flows.report_curves import comparison_figure, curve_tables
from flows.report_measures import confidence_level, last_refs, mean_of_seeds, pooled_success, score_refs
from flows.report_sources import Number, Sources, Style, computed, metric
from flows.report_views import EpisodeView, Evidence, ExperimentView, Sentence, SettingView, Speech, TrialView
from flows.report_words import headline, limits_of

_MAX_TEXT = 4000


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
        limits=limits_of(sources, views),
        unfinished=tuple(t for t in trials if t.state.value in (TrialState.FAILED, TrialState.CANCELLED)),
        level=confidence_level(sources),
    )


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
        headline=headline(sources, row, records) if row.verdict and experiment else ("No verdict yet.",),
        reason=sources.cite(f"verdict:{row.index}/reason", label="why this verdict", style=Style.TEXT)
        if row.verdict and experiment
        else None,
        settings=settings,
        figures=curve_tables(sources, settings, records),
        comparison=comparison_figure(settings, sources.campaign.plan.metric.name),
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
    scores = [ref for trial in finished for ref in score_refs(sources, trial)]
    label = name.text
    return SettingView(
        name=name,
        is_untrained=is_untrained,
        colour=colour,
        trials=tuple(_trial(sources, trial, label) for trial in trials),
        success=pooled_success(sources, finished, name.text)
        if is_untrained
        else mean_of_seeds(sources, scores, name.text),
        num_seeds=sources.cite(computed("count", scores), label=f"{label}: finished seeds", style=Style.COUNT),
    )


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
        success=pooled_success(sources, [trial], label),
        tasks=_last(sources, trial, "eval/episodes", label=f"{label}: hidden tasks", style=Style.COUNT),
        faults=_last(sources, trial, "eval/faults", label=f"{label}: faults on hidden tasks", style=Style.COUNT),
        temperature=_last(sources, trial, "eval/temperature", label=f"{label}: temperature"),
    )


def _last(sources: Sources, trial: TrialRecord, name: str, *, label: str, style: Style = Style.NUMBER) -> Number | None:
    steps = sources.steps(trial.id, name)
    return sources.cite(metric(trial.id, name, steps[-1]), label=label, style=style) if steps else None


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
        refs = last_refs(sources, trials, name)
        if refs:
            rows.append((title, sources.cite(computed("sum", refs), label=title, style=style)))
    return tuple(rows)
