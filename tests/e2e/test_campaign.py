"""Whole campaigns through the command line: real services, real training, real sandboxes."""

import os
import signal
from pathlib import Path

from a3r.campaign import CampaignState, TrialState
from flows.report import verify_report
from tests.e2e.conftest import TINY, coder_variables, until
from tests.fakes.llm_endpoint import Answer, scripted_endpoint
from vibe.recipes.library import program_source

QUESTION = "Does a learning rate of 3e-4 train the small policy better at signalling than 1e-5?"
TASK = "Two agents: one sees a target and may say one word, the other picks the object."
PARAMETERS = {"objects": 8, "words": 8}


def test_a_sentence_becomes_a_report_whose_numbers_resolve(a3r):
    lines = a3r.lines("research", QUESTION, *TINY, "--budget", "wall=20m,trials=4", expect=7)
    end = lines[-1]
    assert end["kind"] == "end"
    assert end["state"] == "finished"
    assert end["verdicts"][0]["kind"] == "inconclusive"  # two updates decide nothing, and it says so
    store = a3r.store
    trials = store.campaign_trials(end["campaign"])
    assert [trial.state for trial in trials] == [TrialState.FINISHED] * 5
    assert all(store.series(trial.id, "eval/success") for trial in trials)
    mismatch = [store.series(t.id, "train/mismatch_max") for t in trials if t.config.trainer.num_updates]
    assert all(point.value <= 1e-5 for series in mismatch for point in series)
    assert verify_report(store, Path(end["report"])) == []


def test_a_killed_campaign_goes_on_and_repeats_no_finished_trial(a3r):
    started = a3r.lines("research", QUESTION, *TINY, "--budget", "wall=20m,trials=4", "--detach", expect=0)
    campaign_id = started[-1]["campaign"]
    store = a3r.store

    def finished():
        return store.campaign_trials(campaign_id, (TrialState.FINISHED,))

    def cut_short():
        """The trial that runs after two finished ones."""
        return len(finished()) >= 2 and store.campaign_trials(campaign_id, (TrialState.RUNNING,))

    (running,) = until(cut_short, timeout_s=120, what="a trial running after two finished ones")
    victim = store.campaign(campaign_id).owner
    assert victim is not None
    os.kill(victim.pid, signal.SIGKILL)
    done_before = {trial.id: (trial.attempts, trial.ended_at) for trial in finished()}

    resumed = a3r.lines("resume", campaign_id, expect=7)
    assert resumed[-1]["state"] == "finished"
    assert store.campaign(campaign_id).state is CampaignState.FINISHED
    done_after = {trial.id: (trial.attempts, trial.ended_at) for trial in finished()}
    assert len(done_after) == 5
    assert {key: done_after[key] for key in done_before} == done_before
    if running.id not in done_before:
        assert done_after[running.id][0] == running.attempts + 1


def test_a_program_that_an_llm_repairs_is_trained(a3r):
    good = f"Here it is.\n\n```python path=program.py\n{program_source('signalling', PARAMETERS)}\n```\n"
    broken = good.replace("def grade(", "def grades(")
    with scripted_endpoint([Answer(text=broken), Answer(text=good)]) as endpoint:
        lines = a3r.lines("train", TASK, *TINY, "--coder", "openai", expect=0, **coder_variables(endpoint.base_url))
    campaign_id = lines[-1]["campaign"]
    (program,) = a3r.store.programs(campaign_id)
    assert (program.coder, program.attempts) == ("openai", 2)
    notes = [line["text"] for line in lines if line["kind"] == "event"]
    assert any(note.startswith("gate contract: FAILED") for note in notes)
    assert len(endpoint.requests) == 2


def test_an_llm_that_writes_nonsense_ends_the_campaign_with_its_record(a3r):
    with scripted_endpoint([Answer(text="I would rather talk about the weather.")]) as endpoint:
        lines = a3r.lines("train", TASK, *TINY, "--coder", "openai", expect=1, **coder_variables(endpoint.base_url))
    campaign = a3r.store.campaign(lines[-1]["campaign"])
    assert campaign.state is CampaignState.FAILED
    assert "no Program" in campaign.reason or "program.py" in campaign.reason, campaign.reason
    assert len(endpoint.requests) == 2
    assert a3r.run("status", campaign.id).returncode == 0
    kept = list(a3r.home.glob(f"**/{campaign.id}/llm.json"))
    assert len(kept) == 1  # it may be resumed
    assert a3r.run("cancel", campaign.id).returncode == 0
    assert not kept[0].exists()


def test_cancel_ends_a_running_campaign_with_a_partial_report(a3r):
    started = a3r.lines(
        "research", QUESTION, *TINY, "--set", "trainer.num_updates=400", "--budget", "wall=3h", "--detach", expect=0
    )
    campaign_id = started[-1]["campaign"]
    store = a3r.store
    until(lambda: store.campaign_trials(campaign_id, (TrialState.RUNNING,)), timeout_s=120, what="a running trial")
    assert a3r.run("cancel", campaign_id).returncode == 0
    until(lambda: "report" in store.campaign(campaign_id).links, timeout_s=60, what="the partial report")
    assert store.campaign(campaign_id).state is CampaignState.CANCELLED
    assert not store.campaign_trials(campaign_id, (TrialState.RUNNING,))


def test_a_trained_policy_exports_and_answers(a3r, tmp_path):
    lines = a3r.lines("train", TASK, *TINY, expect=0)
    campaign_id = lines[-1]["campaign"]
    exported = a3r.run("model", "export", campaign_id, "--to", str(tmp_path / "policy"))
    assert exported.returncode == 0, exported.stderr
    assert (tmp_path / "policy" / "model.safetensors").exists()
    reply = a3r.lines("model", "chat", str(tmp_path / "policy"), "--message", "Target: red. Say one word.", expect=0)
    assert isinstance(reply[-1]["text"], str)
