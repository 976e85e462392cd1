from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable

import pytest

from a3r.campaign import (
    BASELINE_KEY,
    CampaignState,
    EventKind,
    TrialState,
    Verdict,
    VerdictKind,
    check_campaign_move,
    check_trial_move,
    decision_rule,
    exit_code,
    judge_hypothesis,
    setting_key,
)
from a3r.errors import IllegalTransition, UsageError
from a3r.plan import BriefKind, ClaimKind, Metric, PlannedHypothesis

METRIC = Metric(temperature=0.6, num_tasks=256)
A, B, C = ({"trainer.lr": lr} for lr in (1e-3, 1e-4, 1e-5))
KEY_A, KEY_B, KEY_C = (setting_key(values) for values in (A, B, C))


def claim(kind: ClaimKind, minimum_effect: float = 0.05) -> PlannedHypothesis:
    pair = {} if kind is ClaimKind.RANKING else {"treatment": A, "control": B}
    return PlannedHypothesis(statement="s", null="n", kind=kind, minimum_effect=minimum_effect, **pair)


BETTER, EQUIVALENT, RANKING = (claim(kind) for kind in ClaimKind)


class TestStates:
    def test_a_campaign_runs_its_course(self) -> None:
        course = [CampaignState.PLANNED, CampaignState.APPROVED, CampaignState.RUNNING, CampaignState.PAUSED]
        course += [CampaignState.RUNNING, CampaignState.FAILED, CampaignState.RUNNING, CampaignState.FINISHED]
        for old, new in zip(course, course[1:], strict=False):
            check_campaign_move(old, new)

    @pytest.mark.parametrize("over", [CampaignState.FINISHED, CampaignState.CANCELLED, CampaignState.EXHAUSTED])
    def test_what_is_over_stays_so(self, over: CampaignState) -> None:
        assert over.is_over
        check_campaign_move(over, over)
        for state in CampaignState:
            if state is not over:
                with pytest.raises(IllegalTransition, match=f"{over} campaign cannot become {state}"):
                    check_campaign_move(over, state)

    def test_nothing_runs_without_approval(self) -> None:
        with pytest.raises(IllegalTransition, match="approved, cancelled"):
            check_campaign_move(CampaignState.PLANNED, CampaignState.RUNNING)

    def test_a_finished_trial_is_never_run_again(self) -> None:
        for state in set(TrialState) - {TrialState.FINISHED}:
            with pytest.raises(IllegalTransition):
                check_trial_move(TrialState.FINISHED, state)

    def test_a_failed_or_orphaned_trial_can_be_planned_again(self) -> None:
        check_trial_move(TrialState.FAILED, TrialState.PLANNED)
        check_trial_move(TrialState.RUNNING, TrialState.PLANNED)

    def test_only_people_steer(self) -> None:
        steering = {kind for kind in EventKind if kind.is_steering}
        assert steering == {EventKind.STEER, EventKind.PAUSE, EventKind.RESUME, EventKind.CANCEL}


class TestSettingKey:
    def test_it_does_not_depend_on_order_or_number_type(self) -> None:
        assert setting_key({"b": 1.0, "a": "x"}) == setting_key({"a": "x", "b": 1}) == 'a="x",b=1'

    def test_it_survives_json(self) -> None:
        values = {"trainer.lr": 3e-4, "trainer.kl_coef": 0.0, "trainer.advantage_scale_std": True, "x": None}
        assert setting_key(json.loads(json.dumps(values))) == setting_key(values)

    def test_different_values_get_different_keys(self) -> None:
        assert len({setting_key({"a": v}) for v in (1, True, "1", 1.5, None, [1], 0.1 + 0.2, 0.3)}) == 8

    def test_no_values_have_a_name_too(self) -> None:
        assert setting_key({}) == "as planned"


class TestBetter:
    @pytest.mark.parametrize(
        ("treatment", "control", "kind"),
        [
            ([0.80, 0.82, 0.81], [0.20, 0.22, 0.21], VerdictKind.SUPPORTED),
            ([0.20, 0.22, 0.21], [0.80, 0.82, 0.81], VerdictKind.REFUTED),
            ([0.50, 0.51, 0.505], [0.50, 0.505, 0.51], VerdictKind.REFUTED),
            # Above 0, yet the effect of 0.03 does not reach the minimum: the whole interval lies below 0.05.
            ([0.530, 0.531, 0.529], [0.500, 0.501, 0.499], VerdictKind.REFUTED),
            # Above 0, effect 0.049, interval reaches beyond 0.05.
            ([0.549, 0.552, 0.546], [0.500, 0.503, 0.497], VerdictKind.INCONCLUSIVE),
            ([0.9, 0.1, 0.5], [0.4, 0.2, 0.3], VerdictKind.INCONCLUSIVE),
            ([0.9], [0.1, 0.1, 0.1], VerdictKind.INCONCLUSIVE),
            ([0.9], [0.1], VerdictKind.INCONCLUSIVE),
        ],
    )
    def test_the_rule_decides(self, treatment: list[float], control: list[float], kind: VerdictKind) -> None:
        verdict = judge_hypothesis(BETTER, {KEY_A: treatment, KEY_B: control}, metric=METRIC)
        assert verdict.kind is kind, verdict

    def test_the_verdict_says_what_it_compares(self) -> None:
        verdict = judge_hypothesis(BETTER, {KEY_A: [0.8, 0.82], KEY_B: [0.2, 0.22, 0.21]}, metric=METRIC)
        assert (verdict.treatment, verdict.control) == (KEY_A, KEY_B)
        assert (verdict.n_treatment, verdict.n_control) == (2, 3)
        assert verdict.effect == pytest.approx(0.6)
        assert verdict.interval_low is not None
        assert verdict.interval_high is not None
        assert verdict.interval_low < 0.6 < verdict.interval_high

    def test_a_side_without_finished_trials_is_inconclusive_by_name(self) -> None:
        for scores in ({KEY_A: [0.8, 0.9]}, {KEY_A: [0.8, 0.9], KEY_B: []}):
            verdict = judge_hypothesis(BETTER, scores, metric=METRIC)
            assert (verdict.kind, verdict.effect, verdict.n_control) == (VerdictKind.INCONCLUSIVE, None, 0)
            assert KEY_B in verdict.reason

    def test_a_metric_to_minimise_turns_the_sign(self) -> None:
        metric = METRIC.model_copy(update={"direction": "minimise"})
        verdict = judge_hypothesis(BETTER, {KEY_A: [0.2, 0.21, 0.22], KEY_B: [0.8, 0.81, 0.82]}, metric=metric)
        assert verdict.kind is VerdictKind.SUPPORTED
        assert verdict.effect == pytest.approx(0.6)

    def test_seeds_that_agree_by_chance_do_not_make_certainty(self) -> None:
        coarse = METRIC.model_copy(update={"num_tasks": 8})
        verdict = judge_hypothesis(BETTER, {KEY_A: [0.25, 0.25], KEY_B: [0.125, 0.125]}, metric=coarse)
        assert verdict.kind is VerdictKind.INCONCLUSIVE

    def test_a_verdict_survives_json(self) -> None:
        verdict = judge_hypothesis(RANKING, {KEY_A: [0.5, 0.6], KEY_B: [0.5, 0.61]}, metric=METRIC)
        assert Verdict.from_json(json.loads(json.dumps(verdict.as_json()))) == verdict


class TestEquivalent:
    @pytest.mark.parametrize(
        ("treatment", "control", "kind"),
        [
            ([0.50, 0.505, 0.51], [0.50, 0.505, 0.51], VerdictKind.SUPPORTED),
            ([0.80, 0.81, 0.82], [0.20, 0.21, 0.22], VerdictKind.REFUTED),
            ([0.20, 0.21, 0.22], [0.80, 0.81, 0.82], VerdictKind.REFUTED),
            ([0.4, 0.6, 0.5], [0.45, 0.55, 0.5], VerdictKind.INCONCLUSIVE),
            ([0.5], [0.5], VerdictKind.INCONCLUSIVE),
        ],
    )
    def test_the_rule_decides(self, treatment: list[float], control: list[float], kind: VerdictKind) -> None:
        verdict = judge_hypothesis(EQUIVALENT, {KEY_A: treatment, KEY_B: control}, metric=METRIC)
        assert verdict.kind is kind, verdict


class TestRanking:
    def test_a_clear_best_is_supported(self) -> None:
        scores = {KEY_A: [0.30, 0.31, 0.32], KEY_B: [0.90, 0.91, 0.92], KEY_C: [0.1, 0.11, 0.12]}
        verdict = judge_hypothesis(RANKING, scores, metric=METRIC)
        assert (verdict.kind, verdict.treatment, verdict.control) == (VerdictKind.SUPPORTED, KEY_B, KEY_A)
        assert verdict.tied == ()

    def test_a_tie_names_the_tied_set(self) -> None:
        scores = {KEY_A: [0.88, 0.93, 0.90], KEY_B: [0.90, 0.91, 0.92], KEY_C: [0.1, 0.11, 0.12]}
        verdict = judge_hypothesis(RANKING, scores, metric=METRIC)
        assert (verdict.kind, verdict.treatment, verdict.tied) == (VerdictKind.INCONCLUSIVE, KEY_B, (KEY_A,))
        assert KEY_A in verdict.reason
        assert KEY_C not in verdict.reason

    def test_the_untrained_policy_is_not_ranked(self) -> None:
        scores = {KEY_A: [0.3, 0.31], KEY_B: [0.9, 0.91], BASELINE_KEY: [0.9, 0.91]}
        assert judge_hypothesis(RANKING, scores, metric=METRIC).kind is VerdictKind.SUPPORTED

    def test_a_setting_with_one_seed_keeps_it_open(self) -> None:
        scores = {KEY_A: [0.3, 0.31], KEY_B: [0.9, 0.91], KEY_C: [0.1]}
        verdict = judge_hypothesis(RANKING, scores, metric=METRIC)
        assert (verdict.kind, verdict.tied) == (VerdictKind.INCONCLUSIVE, (KEY_C,))

    @pytest.mark.parametrize("scores", [{}, {KEY_A: [0.3, 0.4]}])
    def test_fewer_than_two_settings_are_inconclusive(self, scores: dict[str, list[float]]) -> None:
        verdict = judge_hypothesis(RANKING, scores, metric=METRIC)
        assert (verdict.kind, verdict.effect) == (VerdictKind.INCONCLUSIVE, None)


def _gaussian(noise: random.Random) -> float:
    return noise.gauss(0.5, 0.08)


def _few_tasks(noise: random.Random) -> float:
    return sum(noise.random() < 0.1 for _ in range(32)) / 32


class TestNoise:
    """Campaigns whose settings are all the same, so that every 'supported' is a false claim."""

    NUM_CAMPAIGNS = 2000

    @pytest.mark.parametrize("draw", [_gaussian, _few_tasks])
    @pytest.mark.parametrize("num_seeds", [2, 3, 5])
    @pytest.mark.parametrize("num_settings", [2, 4])
    def test_identical_settings_are_told_apart_in_at_most_5_of_100_campaigns(
        self, draw: Callable[[random.Random], float], num_seeds: int, num_settings: int
    ) -> None:
        noise = random.Random(20_000 + num_seeds)
        # A minimum effect next to nothing leaves all of the protection to the interval.
        hypotheses = [claim(kind, minimum_effect=1e-6) for kind in (ClaimKind.BETTER, ClaimKind.RANKING)]
        metric = METRIC.model_copy(update={"num_tasks": 32})
        keys = [KEY_A, KEY_B, KEY_C, "other"][:num_settings]
        claims: Counter[ClaimKind] = Counter()
        for _ in range(self.NUM_CAMPAIGNS):
            scores = {key: [draw(noise) for _ in range(num_seeds)] for key in keys}
            for hypothesis in hypotheses:
                verdict = judge_hypothesis(hypothesis, scores, metric=metric)
                claims[hypothesis.kind] += verdict.kind is VerdictKind.SUPPORTED
        assert max(claims.values()) / self.NUM_CAMPAIGNS <= 0.05, claims

    def test_a_large_effect_is_found_in_most_campaigns(self) -> None:
        noise = random.Random(3)
        found = 0
        for _ in range(200):
            scores = {
                KEY_A: [noise.gauss(0.7, 0.05) for _ in range(4)],
                KEY_B: [noise.gauss(0.4, 0.05) for _ in range(4)],
            }
            found += judge_hypothesis(BETTER, scores, metric=METRIC).kind is VerdictKind.SUPPORTED
        assert found >= 190


def test_the_rule_in_words_names_the_margin_of_the_plan() -> None:
    for kind in (ClaimKind.BETTER, ClaimKind.EQUIVALENT):
        assert "0.07" in decision_rule(kind, minimum_effect=0.07)
    assert "Holm" in decision_rule(ClaimKind.RANKING, minimum_effect=0.05)


class TestExitCode:
    @staticmethod
    def verdict(kind: VerdictKind) -> Verdict:
        return Verdict(kind, 0.1, 0.0, 0.2, 3, 3, "r", KEY_A, KEY_B)

    @pytest.mark.parametrize(
        ("state", "kind", "verdict", "code"),
        [
            (CampaignState.FINISHED, BriefKind.RESEARCH, VerdictKind.SUPPORTED, 0),
            (CampaignState.FINISHED, BriefKind.RESEARCH, VerdictKind.REFUTED, 0),
            (CampaignState.FINISHED, BriefKind.RESEARCH, VerdictKind.INCONCLUSIVE, 7),
            (CampaignState.FINISHED, BriefKind.TRAIN, VerdictKind.INCONCLUSIVE, 0),
            (CampaignState.EXHAUSTED, BriefKind.RESEARCH, VerdictKind.SUPPORTED, 6),
            (CampaignState.FAILED, BriefKind.RESEARCH, VerdictKind.SUPPORTED, 1),
            (CampaignState.CANCELLED, BriefKind.TRAIN, VerdictKind.SUPPORTED, 1),
        ],
    )
    def test_an_ended_campaign_has_its_code(
        self, state: CampaignState, kind: BriefKind, verdict: VerdictKind, code: int
    ) -> None:
        assert exit_code(state, kind=kind, verdicts=[self.verdict(verdict)]) == code

    def test_a_finished_question_without_a_verdict_is_not_answered(self) -> None:
        assert exit_code(CampaignState.FINISHED, kind=BriefKind.RESEARCH, verdicts=[]) == 7

    def test_a_running_campaign_has_none_yet(self) -> None:
        with pytest.raises(UsageError, match="not over"):
            exit_code(CampaignState.RUNNING, kind=BriefKind.RESEARCH, verdicts=[])
