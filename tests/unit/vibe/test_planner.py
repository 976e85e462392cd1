"""Plans: what is varied, what is claimed, and how it is sized to the budget."""

from __future__ import annotations

import pytest

from a3r.config import Budget, TrialConfig
from a3r.errors import PlanRejected
from a3r.plan import BriefKind, ClaimKind, Plan
from vibe.brief import understand
from vibe.planner import plan
from vibe.sizing import BUDGET_SHARE, MIN_SEEDS, MIN_UPDATES, Rates

BASE = TrialConfig()
RATES = Rates(turn_s=0.004, update_s=0.4, fixed_s=30.0, basis="the rates of these tests")


def planned(text: str, *, budget: str | None = None, kind: BriefKind = BriefKind.RESEARCH, **more: object) -> Plan:
    granted = Budget.parse(budget) if budget else None
    return plan(text, brief=understand(text, kind=kind), budget=granted, base=BASE, **{"rates": RATES, **more})


def levels(p: Plan, path: str) -> list:
    return [setting[path] for setting in p.space.grid()]


def test_two_values_become_treatment_and_control():
    p = planned("Does a learning rate of 3e-4 train number guessing better than 1e-5?")
    (h,) = p.hypotheses
    assert h.kind is ClaimKind.BETTER
    assert (h.treatment, h.control) == ({"trainer.lr": 3e-4}, {"trainer.lr": 1e-5})
    assert p.space.grid() == [{"trainer.lr": 3e-4}, {"trainer.lr": 1e-5}]
    assert p.metric.temperature == BASE.judge.eval_temperature
    assert p.metric.num_tasks == BASE.judge.eval_tasks


def test_worse_turns_the_claim_round():
    (h,) = planned("Is a learning rate of 1e-5 worse than 3e-4?").hypotheses
    assert (h.treatment, h.control) == ({"trainer.lr": 3e-4}, {"trainer.lr": 1e-5})


def test_which_is_best_without_values_compares_at_least_three_on_a_log_scale():
    p = planned("Which learning rate is best for number guessing?")
    values = levels(p, "trainer.lr")
    assert p.hypotheses[0].kind is ClaimKind.RANKING
    assert len(values) >= 3
    assert max(values) / min(values) >= 100
    assert any("No values were named" in note for note in p.notes)


def test_which_one_counts_nothing():
    p = planned("Which one is best: a learning rate of 3e-4 or 1e-3?")
    assert levels(p, "trainer.lr") == [3e-4, 1e-3]


@pytest.mark.parametrize("text", ["Is a learning rate of 1e-3 or 1e-4 better?", "Compare learning rates 1e-3 vs 1e-4"])
def test_comparison_without_a_direction_ranks_both(text: str):
    p = planned(text)
    assert p.hypotheses[0].kind is ClaimKind.RANKING
    assert levels(p, "trainer.lr") == [1e-3, 1e-4]


def test_range_of_values_is_spread_on_a_log_scale():
    p = planned("Which learning rate between 1e-5 and 1e-2 is best?")
    assert levels(p, "trainer.lr") == [1e-5, 1e-4, 1e-3, 1e-2]
    assert levels(planned("Find the best group size from 4 to 32"), "trainer.group_size") == [4, 8, 16, 32]


@pytest.mark.parametrize(
    "text",
    [
        "Does lr=3e-4 beat lr=1e-5 on number guessing (1 to 31, 5 turns)?",
        "With 2 learning rates, is 3e-4 better than 1e-5? Use 5 seeds and 40 updates.",
        "Does a learning rate of 3e-4 train two-digit addition better than 1e-5 in ten minutes?",
    ],
)
def test_other_numbers_of_the_sentence_are_no_levels(text: str):
    assert levels(planned(text), "trainer.lr") == [3e-4, 1e-5]


def test_group_sizes_keep_the_episodes_of_an_update_equal():
    p = planned("Compare group sizes 4, 8 and 16 at the same number of episodes per update")
    assert levels(p, "trainer.group_size") == [4, 8, 16]
    episodes = {s["trainer.group_size"] * s["trainer.batch_tasks"] for s in p.space.grid()}
    assert episodes == {BASE.trainer.group_size * BASE.trainer.batch_tasks}
    assert any("Held equal: 128 episodes per update" in note for note in p.notes)
    assert any("number guessing" in note and "assumed" in note for note in p.notes)


def test_group_sizes_that_do_not_divide_each_other_still_get_equal_episodes():
    p = planned("Compare group sizes 6, 8 and 10")
    assert {s["trainer.group_size"] * s["trainer.batch_tasks"] for s in p.space.grid()} == {120}


def test_doubt_is_an_equivalence_question_with_a_margin():
    p = planned("Does a KL penalty change anything? I think not.")
    (h,) = p.hypotheses
    assert h.kind is ClaimKind.EQUIVALENT
    assert (h.treatment, h.control) == ({"trainer.kl_coef": 0.05}, {"trainer.kl_coef": 0.0})
    assert "5 points or more" in h.null
    assert "expected" in h.expectation


def test_a_switch_without_a_value_is_on_against_off():
    (h,) = planned("Does a KL penalty help?").hypotheses
    assert (h.kind, h.treatment["trainer.kl_coef"], h.control["trainer.kl_coef"]) == (ClaimKind.BETTER, 0.05, 0.0)
    (h,) = planned("Is Dr. GRPO better?").hypotheses
    assert (h.treatment, h.control) == ({"trainer.advantage_scale_std": False}, {"trainer.advantage_scale_std": True})


def test_one_value_is_compared_with_the_usual_one():
    (h,) = planned("Does a learning rate of 1e-3 help?").hypotheses
    assert (h.treatment, h.control) == ({"trainer.lr": 1e-3}, {"trainer.lr": BASE.trainer.lr})


def test_best_settings_are_searched_by_sampling():
    p = planned("Find the best settings you can in half an hour, I don't care how")
    assert not p.space.is_grid
    lr = next(d for d in p.space.dimensions if d.path == "trainer.lr")
    assert lr.log
    assert lr.low is not None
    assert p.space.num_settings is not None
    assert p.space.num_settings * len(p.seeds) == p.estimate.trials
    assert p.budget.wall_s == 1800
    assert any("not confirmed on fresh seeds" in note for note in p.notes)


def test_training_is_one_policy_with_one_seed_and_no_claim():
    p = planned("Teach it to guess a number between 1 and 15", kind=BriefKind.TRAIN)
    assert p.hypotheses == ()
    assert p.space.grid() == [{"trainer.num_updates": p.base.trainer.num_updates}]
    assert p.seeds == (p.base.seed,)


def test_run_forever_gets_the_default_budget_and_is_told_so():
    p = planned("Run forever")
    assert p.budget == Budget()
    assert any("Nothing runs for ever" in note for note in p.notes)


def test_budget_of_the_sentence_is_used_and_the_given_one_wins():
    text = "Which learning rate is best for arithmetic? Budget 20 minutes."
    assert planned(text).budget.wall_s == 1200
    assert planned(text, budget="wall=1h").budget.wall_s == 3600


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Is it worth using LoRA instead of full fine-tuning here? rank 4, 16, 32. Budget 20 minutes.", "LoRA"),
        ("How many turns does the agent need? Give me the best trade-off between success and time", "turns"),
        ("Reproduce: bigger models always learn more from RL", "models of other sizes"),
        ("Is PPO better than GRPO?", "other algorithms"),
        ("Why is the sky blue?", "No setting to vary"),
        ("asdf qwer zxcv", "No setting to vary"),
        ("Do learning rate and group size interact?", "One question varies one setting"),
    ],
)
def test_what_cannot_be_varied_is_refused_with_what_can(text: str, message: str):
    with pytest.raises(PlanRejected, match=message) as caught:
        planned(text)
    assert "learning rate" in str(caught.value)
    if "One question" not in message:
        assert "trainer.lr" in caught.value.next_step


@pytest.mark.parametrize(
    "text", ["Does a learning rate of 5 train better than 1e-5?", "Compare group sizes 1, 2 and 4"]
)
def test_impossible_values_are_refused(text: str):
    with pytest.raises(PlanRejected):
        planned(text)


def least_said(error: PlanRejected) -> Budget:
    return Budget.parse(error.next_step.split("--budget ")[1].split(", the least")[0])


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("Use 0 minutes and find the optimum", None),
        ("Which learning rate is best for number guessing?", "wall=30s"),
        ("Which learning rate is best for number guessing?", "wall=2h,trials=3"),
        ("Compare group sizes 4, 8 and 16", "wall=1m"),
    ],
)
def test_impossible_budget_is_refused_and_the_least_named_does_do(text: str, budget: str | None):
    with pytest.raises(PlanRejected, match="the least that would do") as caught:
        planned(text, budget=budget)
    least = least_said(caught.value)
    p = plan(text, brief=understand(text, kind=BriefKind.RESEARCH), budget=least, base=BASE, rates=RATES)
    assert len(p.seeds) >= MIN_SEEDS


@pytest.mark.parametrize("wall", ["6m", "8m", "15m", "30m", "1h", "3h", "1d"])
def test_plan_fits_its_budget_with_slack(wall: str):
    p = planned("Does a learning rate of 3e-4 train better than 1e-5?", budget=f"wall={wall}")
    assert p.estimate.wall_s <= BUDGET_SHARE * p.budget.wall_s
    assert p.estimate.trials == 2 * len(p.seeds)
    assert len(p.seeds) >= MIN_SEEDS
    assert MIN_UPDATES <= p.base.trainer.num_updates <= BASE.trainer.num_updates
    assert p.base.updated({"trainer.num_updates": BASE.trainer.num_updates}) == BASE


def test_more_budget_brings_the_third_seed_then_updates_then_further_seeds():
    walls = ("8m", "15m", "30m", "3h")
    plans = [planned("Does a learning rate of 3e-4 train better than 1e-5?", budget=f"wall={w}") for w in walls]
    sizes = [(len(p.seeds), p.base.trainer.num_updates) for p in plans]
    assert [seeds for seeds, _ in sizes] == [2, 3, 3, 5]
    assert sizes[1][1] < sizes[2][1] <= sizes[3][1] == BASE.trainer.num_updates


def test_limit_on_trials_limits_the_seeds():
    p = planned("Does a learning rate of 3e-4 train better than 1e-5?", budget="wall=3h,trials=5")
    assert p.estimate.trials == 4


def test_measured_rates_change_the_size_and_are_named():
    fast = Rates(turn_s=0.0005, update_s=0.1, trial_overhead_s=1.0, fixed_s=5.0, basis="measured in a rehearsal")
    text = "Which learning rate is best for number guessing?"
    slow, quick = planned(text, budget="wall=10m"), planned(text, budget="wall=10m", rates=fast)
    assert quick.base.trainer.num_updates > slow.base.trainer.num_updates
    assert "measured in a rehearsal" in quick.estimate.basis
    assert "the rates of these tests" in slow.estimate.basis


def test_dearer_levels_are_paid_for():
    small = planned("Compare batch sizes 8 and 16", budget="wall=15m")
    large = planned("Compare batch sizes 8 and 64", budget="wall=15m")
    assert large.base.trainer.num_updates < small.base.trainer.num_updates


def test_rules_and_expectation_are_written_before_data():
    p = planned("Does a learning rate of 3e-4 train better than 1e-5?")
    assert any("Supported when" in rule and "0.05" in rule for rule in p.decision_rules)
    assert p.hypotheses[0].expectation
    assert p.question.startswith("Does a learning rate")


def test_plan_survives_being_stored():
    p = planned("Compare group sizes 4, 8 and 16")
    assert Plan.model_validate_json(p.model_dump_json()) == p
