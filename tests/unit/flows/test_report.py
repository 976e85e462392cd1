from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from a3r.campaign import BASELINE_VALUES, CampaignState, SettingKind, TrialState, judge_hypothesis
from a3r.config import Budget, TrialConfig
from a3r.episode import Ending, EpisodeKind, Transcript, TranscriptTurn
from a3r.errors import NotFound, UsageError
from a3r.plan import (
    Brief,
    BriefKind,
    ClaimKind,
    Dimension,
    Estimate,
    Metric,
    Plan,
    PlannedHypothesis,
    SearchSpace,
)
from a3r.store import EpisodeSummary, Owner, Store
from flows.report import verify_report, write_report
from flows.report_sources import Sources, Style

NUM_UPDATES = 12
TREATMENT, CONTROL = {"trainer.lr": 1e-3}, {"trainer.lr": 1e-5}


def a_plan(kind: ClaimKind = ClaimKind.BETTER, brief_kind: BriefKind = BriefKind.RESEARCH) -> Plan:
    treatment, control = (TREATMENT, CONTROL)
    levels = (1e-3, 1e-5)
    space = SearchSpace(dimensions=(Dimension(path="trainer.lr", levels=levels),))
    if brief_kind is BriefKind.TRAIN:
        treatment, control = {"trainer.num_updates": NUM_UPDATES}, dict(BASELINE_VALUES)
        space = SearchSpace(settings=(treatment, control))
    question = "Does lr 1e-3 learn <faster> than 1e-5 | really?"
    return Plan(
        question=question,
        brief=Brief(text=question, kind=brief_kind, recipe="arithmetic", understood="sums of digits 0-9"),
        hypotheses=(
            PlannedHypothesis(
                statement="lr 1e-3 beats 1e-5 by at least 5 points",
                null="it does not",
                kind=kind,
                treatment={} if kind is ClaimKind.RANKING else treatment,
                control={} if kind is ClaimKind.RANKING else control,
                expectation="The larger step wins.",
            ),
        ),
        metric=Metric(temperature=0.6, num_tasks=64),
        space=space,
        seeds=(0, 1, 2),
        base=TrialConfig(),
        decision_rules=("Supported when the 95 % interval lies above 0.",),
        budget=Budget(wall_s=600),
        estimate=Estimate(trials=6, wall_s=300, basis="measured rates"),
        notes=("Nothing runs for ever: the default of 10 min is used.",),
    )


def transcript(answer: str) -> Transcript:
    ask = {"role": "user", "content": "7 + 5 = ? <b>only digits</b>"}
    reply = {"role": "assistant", "content": answer}
    return Transcript(turns=(TranscriptTurn(messages=(ask,), reply=reply, finish_reason="stop"),), output=answer)


def run_trial(store: Store, setting_id: str, *, seed: int, success: float, updates: int) -> str:
    noise = random.Random(f"{setting_id}{seed}")
    trial = store.open_trial(setting_id, seed=seed, config=TrialConfig(seed=seed))
    store.start_trial(trial.id, owner=Owner(1, 1.0))
    rows = [
        ("train/reward", step, success * step / max(updates, 1) + noise.gauss(0, 0.02))
        for step in range(1, updates + 1)
    ]
    final = {"success": success, "episodes": 64, "faults": seed, "temperature": 0.6}
    rows += [(f"eval/{name}", updates, value) for name, value in final.items()]
    rows += [("cost/wall_s", updates, 41.5), ("cost/turns", updates, 1200), ("cost/episodes", updates, 1100)]
    store.add_metrics(trial.id, rows)
    for index, (metric, answer) in enumerate([(1.0, "12"), (0.0, "99"), (None, "")]):
        store.add_episodes(
            trial.id,
            [
                EpisodeSummary(
                    episode_id=f"ep{index}",
                    task_id=f"hidden-{index}",
                    kind=EpisodeKind.EVAL,
                    step=updates,
                    ending=Ending.REWARDED if metric is not None else Ending.CLIENT_FAULT,
                    reward=None,
                    metric=metric,
                    turns=1,
                    transcript=transcript(answer) if answer else None,
                )
            ],
        )
    store.close_trial(trial.id, TrialState.FINISHED)
    return trial.id


def begun(store: Store, plan: Plan) -> tuple[str, str]:
    campaign = store.create_campaign(plan, id="c-k3f9")
    store.set_campaign_state(campaign.id, CampaignState.APPROVED)
    store.set_campaign_state(campaign.id, CampaignState.RUNNING)
    store.set_hidden_tasks(campaign.id, seed=7, sha256="5e" * 32)
    program = store.add_program(
        campaign.id, sha256="ab" * 32, commit="c0ffee7", path="/p", coder="recipes", gates={"lint": "0 findings"}
    )
    return campaign.id, store.open_experiment(campaign.id, program_id=program.id).id


SCORES = {0: (0.81, 0.78, 0.84), 1: (0.31, 0.28, 0.36)}


def finished(store: Store, plan: Plan | None = None) -> str:
    """A campaign of two settings times three seeds and an untrained policy, judged and closed."""
    plan = plan or a_plan()
    campaign_id, experiment_id = begun(store, plan)
    baseline = store.open_setting(experiment_id, BASELINE_VALUES, kind=SettingKind.BASELINE)
    run_trial(store, baseline.id, seed=0, success=0.125, updates=0)
    for index, values in enumerate(plan.space.grid()):
        setting = store.open_setting(experiment_id, values, number=index)
        for seed, success in enumerate(SCORES[index]):
            run_trial(store, setting.id, seed=seed, success=success, updates=NUM_UPDATES)
    verdict = judge_hypothesis(plan.hypotheses[0], store.scores(experiment_id), metric=plan.metric)
    store.set_verdict(campaign_id, 0, verdict)
    store.set_campaign_state(campaign_id, CampaignState.FINISHED)
    return campaign_id


@pytest.fixture
def store() -> Iterator[Store]:
    store = Store("sqlite://")
    yield store
    store.close()


LINKS = {"mlflow": "http://127.0.0.1:5000/#/experiments/3", "report": "/somewhere/report.html"}


def test_every_figure_of_a_finished_report_is_borne_out_by_the_record(store: Store, tmp_path: Path) -> None:
    paths = write_report(store, finished(store), tmp_path / "report", links=LINKS)
    assert verify_report(store, paths.html) == []
    html, markdown = paths.html.read_text(), paths.markdown.read_text()
    for text in (html, markdown):
        assert "Yes: " in text
        assert "supported" in text.lower()
        assert "81.0 %" in text  # the treatment's mean: (0.81 + 0.78 + 0.84) / 3
        assert "+49.3 points" in text  # 0.81 - 0.31666...
        assert "a3r status c-k3f9" in text
        assert "c0ffee7" in text
        assert "5e" * 32 in text
        assert "http://127.0.0.1:5000/#/experiments/3" in text
        assert "/somewhere/report.html" not in text
        assert "7 + 5" in text
    # Welch: 3.69 degrees of freedom, t = 2.87, times sqrt(0.03**2 / 3 + 0.0404**2 / 3).
    assert "8.3 points either way" in markdown
    assert "<faster>" not in html
    assert "<b>only digits</b>" not in html
    assert html.count("<svg") == 2


def test_the_page_needs_nothing_from_elsewhere(store: Store, tmp_path: Path) -> None:
    html = write_report(store, finished(store), tmp_path).html.read_text()
    for word in ("<script", "<link", "src=", "@import", "url("):
        assert word not in html.replace("url(#", "")


@pytest.mark.parametrize("name", ["eval/success", "train/reward", "cost/turns", "eval/faults"])
def test_a_changed_metric_is_found_out(store: Store, tmp_path: Path, name: str) -> None:
    paths = write_report(store, finished(store), tmp_path)
    trial = store.trial("k3f9-0-1-2")
    point = store.series(trial.id, name)[-1]
    store.add_metrics(trial.id, [(name, point.step, point.value * 1.001 + 1e-6)])
    wrong = verify_report(store, paths.html)
    assert any(f"metric:{trial.id}/{name}@{point.step}" in mismatch.ref for mismatch in wrong)


def test_a_metric_that_turns_the_verdict_turns_up_as_a_wrong_verdict(store: Store, tmp_path: Path) -> None:
    paths = write_report(store, finished(store), tmp_path)
    for seed in range(3):
        store.add_metrics(f"t-k3f9-0-1-{seed}", [("eval/success", NUM_UPDATES, 0.1 + seed / 100)])
    wrong = {mismatch.ref for mismatch in verify_report(store, paths.html)}
    assert {"verdict:0/kind", "verdict:0/reason"} <= wrong


def test_an_edited_page_is_found_out(store: Store, tmp_path: Path) -> None:
    paths = write_report(store, finished(store), tmp_path)
    html = paths.html.read_text()
    paths.html.write_text(html.replace(">81.0 %<", ">91.0 %<", 1))
    assert [(m.shown, m.recorded) for m in verify_report(store, paths.html)] == [("91.0 %", "81.0 %")]
    paths.html.write_text(html.replace("</main>", "<p>It reached 99.9 % in the end.</p></main>"))
    assert [(m.ref, m.shown) for m in verify_report(store, paths.html)] == [("", "It reached 99.9 % in the end.")]


def test_every_figure_of_the_markdown_is_among_its_sources(store: Store, tmp_path: Path) -> None:
    campaign_id = finished(store)
    body, _, appendix = write_report(store, campaign_id, tmp_path).markdown.read_text().partition("## Sources")
    rows = [line.split(" | ") for line in appendix.splitlines() if line.endswith("` |")]
    assert len(rows) > 40
    sources = Sources(store, campaign_id)
    for row in rows:
        assert row[1] in body
        ref = row[2].strip("|` ")
        assert any(style.write(sources.value(ref)) == row[1] for style in Style), row


def test_the_untrained_policy_has_wilsons_interval(store: Store, tmp_path: Path) -> None:
    # 8 of 64: Wilson's 95 % interval is 0.0647 to 0.2277.
    markdown = write_report(store, finished(store), tmp_path).markdown.read_text()
    row = next(line for line in markdown.splitlines() if line.startswith("| **untrained"))
    assert "**12.5 %** | 6.5 % to 22.8 %" in row


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (a_plan(ClaimKind.EQUIVALENT), "differ by more than the margin"),
        (a_plan(ClaimKind.RANKING), "is the best setting tried"),
        (a_plan(brief_kind=BriefKind.TRAIN), "the trained policy beats the untrained policy"),
    ],
)
def test_each_kind_of_question_gets_a_plain_answer(store: Store, tmp_path: Path, plan: Plan, words: str) -> None:
    paths = write_report(store, _with_plan(store, plan), tmp_path)
    assert words in paths.markdown.read_text()
    assert verify_report(store, paths.html) == []


def _with_plan(store: Store, plan: Plan) -> str:
    if plan.brief.kind is BriefKind.RESEARCH:
        return finished(store, plan)
    campaign_id, experiment_id = begun(store, plan)
    for values, scores, kind in (
        (BASELINE_VALUES, (0.1, 0.12, 0.11), SettingKind.BASELINE),
        ({"trainer.num_updates": NUM_UPDATES}, SCORES[0], SettingKind.PLANNED),
    ):
        setting = store.open_setting(experiment_id, values, kind=kind)
        for seed, success in enumerate(scores):
            run_trial(store, setting.id, seed=seed, success=success, updates=NUM_UPDATES)
    verdict = judge_hypothesis(plan.hypotheses[0], store.scores(experiment_id), metric=plan.metric)
    store.set_verdict(campaign_id, 0, verdict)
    store.set_campaign_state(campaign_id, CampaignState.FINISHED)
    return campaign_id


class TestPartial:
    def test_a_campaign_that_has_only_a_plan_has_a_report(self, store: Store, tmp_path: Path) -> None:
        campaign = store.create_campaign(a_plan())
        paths = write_report(store, campaign.id, tmp_path)
        assert verify_report(store, paths.html) == []
        for text in (paths.html.read_text(), paths.markdown.read_text()):
            assert "partial" in text
            assert "No verdict yet" in text
            assert "No setting was opened yet" in text

    def test_a_running_campaign_shows_what_it_has(self, store: Store, tmp_path: Path) -> None:
        campaign_id, experiment_id = begun(store, a_plan())
        setting = store.open_setting(experiment_id, TREATMENT)
        run_trial(store, setting.id, seed=0, success=0.5, updates=3)
        running = store.open_trial(setting.id, seed=1, config=TrialConfig(seed=1))
        store.start_trial(running.id, owner=Owner(1, 1.0))
        store.add_metrics(running.id, [("train/reward", 1, 0.25)])
        paths = write_report(store, campaign_id, tmp_path)
        assert verify_report(store, paths.html) == []
        assert "50.0 %" in paths.markdown.read_text()
        assert "The untrained policy was not measured" in paths.html.read_text()

    def test_failed_trials_are_named_and_count_nowhere(self, store: Store, tmp_path: Path) -> None:
        campaign_id, experiment_id = begun(store, a_plan())
        for values in (TREATMENT, CONTROL):
            setting = store.open_setting(experiment_id, values)
            trial = store.open_trial(setting.id, seed=0, config=TrialConfig())
            store.start_trial(trial.id, owner=Owner(1, 1.0))
            store.close_trial(trial.id, TrialState.FAILED, reason="the engine ran out of 4 GB of memory")
        plan = a_plan()
        verdict = judge_hypothesis(plan.hypotheses[0], store.scores(experiment_id), metric=plan.metric)
        store.set_verdict(campaign_id, 0, verdict)
        store.set_campaign_state(campaign_id, CampaignState.EXHAUSTED, reason="wall time of 600 s is over")
        paths = write_report(store, campaign_id, tmp_path)
        assert verify_report(store, paths.html) == []
        for text in (paths.html.read_text(), paths.markdown.read_text()):
            assert "ran out of 4 GB" in text
            assert "Undecided" in text

    def test_one_seed_gives_a_difference_without_an_interval(self, store: Store, tmp_path: Path) -> None:
        campaign_id, experiment_id = begun(store, a_plan())
        for values, success in ((TREATMENT, 0.75), (CONTROL, 0.25)):
            setting = store.open_setting(experiment_id, values)
            run_trial(store, setting.id, seed=0, success=success, updates=2)
        plan = a_plan()
        verdict = judge_hypothesis(plan.hypotheses[0], store.scores(experiment_id), metric=plan.metric)
        store.set_verdict(campaign_id, 0, verdict)
        paths = write_report(store, campaign_id, tmp_path)
        assert verify_report(store, paths.html) == []
        assert "+50.0 points, without an interval" in paths.markdown.read_text()


def test_a_file_that_is_no_report_is_refused(store: Store, tmp_path: Path) -> None:
    (tmp_path / "x.html").write_text("<p>hello</p>")
    with pytest.raises(UsageError, match="no report"):
        verify_report(store, tmp_path / "x.html")


def test_an_unknown_campaign_has_no_report(store: Store, tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        write_report(store, "c-none", tmp_path)


@pytest.mark.parametrize(
    "ref",
    [
        "nonsense",
        "metric:t-k3f9-0-1-0/eval/success@x",
        "metric:t-k3f9-0-1-0/eval/success@999",
        "computed:eval(metric:t-k3f9-0-1-0/eval/success@12)",
        "computed:mean(plan:question)",
        "computed:mean(metric:t-k3f9-0-1-0/eval/success@12",
        "plan:nothing.here",
        "plan:metric",
        "record:x-1/key",
        "record:c-k3f9/nothing",
        "episode:t-k3f9-0-1-0/none/metric",
        "verdict:4/kind",
    ],
)
def test_a_reference_that_leads_nowhere_is_an_error_and_not_a_number(store: Store, ref: str) -> None:
    sources = Sources(store, finished(store))
    with pytest.raises((NotFound, UsageError)):
        sources.value(ref)
