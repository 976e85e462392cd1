"""The contract of `a3r.store.Store`, the same over SQLite in a file, SQLite in memory and PostgreSQL."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from a3r.campaign import CampaignState, EventKind, SettingKind, TrialState, Verdict, VerdictKind
from a3r.config import Budget, TrialConfig
from a3r.episode import Ending, EpisodeKind, Transcript
from a3r.errors import EnvironmentNotReady, IllegalTransition, InfrastructureFault, NotFound, UsageError
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

POSTGRES_BIN = Path("/usr/lib/postgresql/15/bin")


def a_plan(question: str = "Does a larger step learn faster?") -> Plan:
    treatment, control = {"trainer.lr": 1e-3}, {"trainer.lr": 1e-4}
    return Plan(
        question=question,
        brief=Brief(text=question, kind=BriefKind.RESEARCH, recipe="arithmetic", understood="arithmetic"),
        hypotheses=(
            PlannedHypothesis(
                statement="1e-3 beats 1e-4",
                null="It does not",
                kind=ClaimKind.BETTER,
                treatment=treatment,
                control=control,
            ),
        ),
        metric=Metric(temperature=0.6, num_tasks=64),
        space=SearchSpace(dimensions=(Dimension(path="trainer.lr", levels=(1e-3, 1e-4)),)),
        seeds=(0, 1),
        base=TrialConfig(),
        decision_rules=("the interval decides",),
        budget=Budget(wall_s=600),
        estimate=Estimate(trials=4, wall_s=300, basis="a guess"),
    )


def an_owner() -> Owner:
    return Owner(pid=4321, started_at=1_700_000_000.25)


def an_experiment(store: Store, campaign_id: str) -> str:
    program = store.add_program(campaign_id, sha256="ab" * 32, commit="c0ffee", path="/p", coder="recipes")
    return store.open_experiment(campaign_id, program_id=program.id).id


def a_trial(store: Store, *, seed: int = 0) -> tuple[str, str]:
    campaign = store.create_campaign(a_plan())
    setting = store.open_setting(an_experiment(store, campaign.id), {"trainer.lr": 1e-3})
    trial = store.open_trial(setting.id, seed=seed, config=TrialConfig(seed=seed))
    return campaign.id, trial.id


def an_episode(episode_id: str, *, metric: float | None = 1.0, step: int = 5) -> EpisodeSummary:
    return EpisodeSummary(
        episode_id=episode_id,
        task_id="hidden-1",
        kind=EpisodeKind.EVAL,
        step=step,
        ending=Ending.REWARDED if metric is not None else Ending.CLIENT_FAULT,
        reward=None,
        metric=metric,
        turns=2,
        transcript=Transcript(output={"said": "5"}),
    )


@pytest.fixture(scope="module")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL prefix of a PostgreSQL server of our own, on a Unix socket only."""
    if not (POSTGRES_BIN / "initdb").exists():
        pytest.skip("no PostgreSQL 15 binaries on this machine")
    folder = tmp_path_factory.mktemp("pg")
    command: list[str] = []
    if os.geteuid() == 0:
        # The server refuses to run as root.
        command = ["runuser", "-u", "postgres", "--"]
        shutil.chown(folder, "postgres")
        for parent in (folder.parent, folder.parent.parent):
            parent.chmod(0o755)
    data, socket = folder / "data", folder
    subprocess.run(
        [*command, POSTGRES_BIN / "initdb", "-D", data, "-A", "trust", "-U", "postgres", "--no-sync"],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    control = [*command, POSTGRES_BIN / "pg_ctl", "-D", data, "-w", "-l", folder / "log"]
    options = f"-c listen_addresses='' -c unix_socket_directories={socket} -c fsync=off"
    subprocess.run([*control, "-o", options, "start"], check=True, stdout=subprocess.DEVNULL)
    yield f"postgresql://postgres@/{{database}}?host={socket}"
    subprocess.run([*control, "-m", "fast", "stop"], check=True, stdout=subprocess.DEVNULL)


@pytest.fixture(params=["file", "memory", pytest.param("postgres", marks=pytest.mark.heavy)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return f"sqlite:///{tmp_path / 'a3r.db'}"
    if request.param == "memory":
        return "sqlite://"
    template: str = request.getfixturevalue("postgres")
    name = f"t{abs(hash(request.node.nodeid))}"
    socket = template.rpartition("host=")[2]
    subprocess.run([POSTGRES_BIN / "createdb", "-h", socket, "-U", "postgres", name], check=True)
    return template.format(database=name)


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    store = Store(url)
    yield store
    store.close()


class TestStoreContract:
    def test_a_campaign_comes_back_as_it_was_planned(self, store: Store) -> None:
        plan = a_plan()
        made = store.create_campaign(plan, options={"coder": "recipes"})
        read = store.campaign(made.id)
        assert read == made
        assert read.plan == plan
        assert read.state is CampaignState.PLANNED
        assert read.options == {"coder": "recipes"}
        assert [h.planned for h in store.hypotheses(made.id)] == list(plan.hypotheses)

    def test_creating_a_campaign_again_by_its_id_makes_no_second_one(self, store: Store) -> None:
        first = store.create_campaign(a_plan(), id="c-k3f9")
        again = store.create_campaign(a_plan(), id="c-k3f9")
        assert again == first
        assert len(store.campaigns()) == 1
        with pytest.raises(UsageError, match="another plan"):
            store.create_campaign(a_plan("Something else?"), id="c-k3f9")

    def test_ids_resolve_by_unique_prefix_with_or_without_the_letter(self, store: Store) -> None:
        store.create_campaign(a_plan(), id="c-k3f9")
        store.create_campaign(a_plan(), id="c-k3zz")
        assert store.campaign("c-k3f").id == "c-k3f9"
        assert store.campaign("k3z").id == "c-k3zz"
        with pytest.raises(UsageError, match="c-k3f9, c-k3zz"):
            store.campaign("k3")
        for unknown in ("c-x", "", "c-", "k%", "_3f9"):
            with pytest.raises(NotFound):
                store.campaign(unknown)

    def test_state_moves_by_the_table_and_leaves_one_event_each(self, store: Store) -> None:
        campaign = store.create_campaign(a_plan())
        store.set_campaign_state(campaign.id, CampaignState.APPROVED)
        store.set_campaign_state(campaign.id, CampaignState.RUNNING)
        store.set_campaign_state(campaign.id, CampaignState.RUNNING)
        with pytest.raises(IllegalTransition, match="cannot become planned"):
            store.set_campaign_state(campaign.id, CampaignState.PLANNED)
        done = store.set_campaign_state(campaign.id, CampaignState.FINISHED, reason="all trials done")
        assert (done.state, done.reason) == (CampaignState.FINISHED, "all trials done")
        states = [event.data["state"] for event in store.events_after(campaign.id, kinds=[EventKind.STATE])]
        assert states == ["approved", "running", "finished"]

    def test_the_deadline_counts_from_approval(self, store: Store) -> None:
        campaign = store.create_campaign(a_plan())
        assert campaign.deadline is None
        approved = store.set_campaign_state(campaign.id, CampaignState.APPROVED)
        assert approved.approved_at is not None
        assert approved.deadline == pytest.approx(approved.approved_at + 600)

    def test_campaigns_are_listed_newest_first_and_by_state(self, store: Store) -> None:
        ids = [store.create_campaign(a_plan()).id for _ in range(3)]
        store.set_campaign_state(ids[0], CampaignState.APPROVED)
        assert {c.id for c in store.campaigns()} == set(ids)
        assert store.campaigns()[-1].id == ids[0]
        assert [c.id for c in store.campaigns([CampaignState.APPROVED])] == [ids[0]]

    def test_an_owner_is_kept_until_the_campaign_is_over(self, store: Store) -> None:
        campaign = store.create_campaign(a_plan())
        store.set_campaign_state(campaign.id, CampaignState.APPROVED)
        store.set_campaign_state(campaign.id, CampaignState.RUNNING)
        assert store.own_campaign(campaign.id, an_owner()).owner == an_owner()
        assert store.set_campaign_state(campaign.id, CampaignState.CANCELLED).owner is None

    def test_links_merge_and_hidden_tasks_are_fixed_once(self, store: Store) -> None:
        campaign = store.create_campaign(a_plan())
        store.add_links(campaign.id, {"prefect": "http://p"})
        assert store.add_links(campaign.id, {"mlflow": "http://m"}).links == {
            "prefect": "http://p",
            "mlflow": "http://m",
        }
        store.set_hidden_tasks(campaign.id, seed=2**62, sha256="aa")
        assert store.set_hidden_tasks(campaign.id, seed=2**62, sha256="aa").hidden_seed == 2**62
        with pytest.raises(UsageError, match="fixed already"):
            store.set_hidden_tasks(campaign.id, seed=2, sha256="bb")

    def test_opening_the_same_thing_twice_makes_one_row(self, store: Store) -> None:
        campaign = store.create_campaign(a_plan(), id="c-k3f9")
        experiment = an_experiment(store, campaign.id)
        assert an_experiment(store, campaign.id) == experiment
        first = store.open_setting(experiment, {"trainer.lr": 1e-3, "trainer.group_size": 8}, number=0)
        again = store.open_setting(experiment, {"trainer.group_size": 8.0, "trainer.lr": 1e-3})
        assert again == first
        baseline = store.open_setting(experiment, {"trainer.num_updates": 0}, kind=SettingKind.BASELINE)
        assert [s.kind for s in store.settings(experiment)] == [SettingKind.PLANNED, SettingKind.BASELINE]
        trial = store.open_trial(first.id, seed=7, config=TrialConfig(seed=7))
        assert store.open_trial(first.id, seed=7, config=TrialConfig(seed=7)) == trial
        assert store.setting(baseline.id).values == {"trainer.num_updates": 0}
        assert len(store.programs(campaign.id)) == len(store.experiments(campaign.id)) == 1
        assert store.campaign_trials(campaign.id) == store.trials(first.id) == [trial]
        assert store.trial("k3f9-0-0-7").config == TrialConfig(seed=7)

    def test_another_program_of_the_same_campaign_gets_its_own_row(self, store: Store) -> None:
        campaign = store.create_campaign(a_plan())
        for sha256 in ("aa", "bb", "aa"):
            store.add_program(
                campaign.id, sha256=sha256, commit="c", path="/p", coder="openai", attempts=2, gates={"lint": "clean"}
            )
        programs = store.programs(campaign.id)
        assert [p.sha256 for p in programs] == ["aa", "bb"]
        assert store.program(programs[0].id).gates == {"lint": "clean"}

    def test_a_trial_runs_fails_is_planned_again_and_finishes(self, store: Store) -> None:
        campaign_id, trial_id = a_trial(store)
        running = store.start_trial(trial_id, owner=an_owner())
        assert (running.state, running.attempts, running.owner) == (TrialState.RUNNING, 1, an_owner())
        assert store.running_trials() == [running]
        failed = store.close_trial(trial_id, TrialState.FAILED, reason="engine died")
        assert (failed.owner, failed.reason) == (None, "engine died")
        assert store.running_trials() == []
        store.replan_trial(trial_id, reason="infrastructure")
        assert store.start_trial(trial_id, owner=an_owner()).attempts == 2
        finished = store.close_trial(trial_id, TrialState.FINISHED)
        assert finished.ended_at is not None
        assert store.close_trial(trial_id, TrialState.FINISHED) == finished
        with pytest.raises(IllegalTransition):
            store.start_trial(trial_id, owner=an_owner())
        assert store.campaign_trials(campaign_id, [TrialState.FINISHED]) == [finished]
        events = [e.data["state"] for e in store.events_after(campaign_id) if e.trial_id == trial_id]
        assert events == ["running", "failed", "planned", "running", "finished"]

    def test_a_trial_cannot_be_closed_as_running(self, store: Store) -> None:
        _, trial_id = a_trial(store)
        with pytest.raises(UsageError):
            store.close_trial(trial_id, TrialState.RUNNING)

    def test_metrics_written_twice_are_there_once_and_the_last_value_rules(self, store: Store) -> None:
        _, trial_id = a_trial(store)
        store.add_metrics(trial_id, [("train/reward", step, step / 10) for step in range(1200)])
        store.add_metrics(trial_id, [("train/reward", step, step / 10) for step in range(1200)])
        store.add_metrics(trial_id, [("train/reward", 3, 9.5), ("eval/success", 1200, 0.25)])
        store.add_metrics(trial_id, [])
        assert len(store.series(trial_id, "train/reward")) == 1200
        assert store.metric(trial_id, "train/reward", 3) == 9.5
        assert store.metric(trial_id, "train/reward", 7) == 0.7
        assert len(store.metrics(trial_id)) == 1201
        with pytest.raises(NotFound):
            store.metric(trial_id, "train/reward", 1201)

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_a_metric_that_is_no_number_is_refused_by_name(self, store: Store, value: float) -> None:
        _, trial_id = a_trial(store)
        with pytest.raises(UsageError, match="train/loss"):
            store.add_metrics(trial_id, [("train/ok", 1, 1.0), ("train/loss", 1, value)])
        assert store.metrics(trial_id) == []

    def test_episodes_keep_kind_ending_and_transcript(self, store: Store) -> None:
        _, trial_id = a_trial(store)
        store.add_episodes(trial_id, [an_episode("a"), an_episode("b", metric=None), an_episode("a")])
        store.add_episodes(trial_id, [an_episode("b", metric=None)])
        assert store.episodes(trial_id) == [an_episode("a"), an_episode("b", metric=None)]
        assert store.episodes(trial_id, EpisodeKind.TRAIN) == []

    def test_scores_are_the_last_values_of_finished_trials(self, store: Store) -> None:
        campaign = store.create_campaign(a_plan())
        experiment = an_experiment(store, campaign.id)
        for lr in (1e-3, 1e-4):
            setting = store.open_setting(experiment, {"trainer.lr": lr})
            for seed in (0, 1, 2):
                trial = store.open_trial(setting.id, seed=seed, config=TrialConfig(seed=seed))
                store.start_trial(trial.id, owner=an_owner())
                store.add_metrics(trial.id, [("eval/success", 0, 0.1), ("eval/success", 5, lr + seed)])
                if seed < 2:
                    store.close_trial(trial.id, TrialState.FINISHED)
        store.open_setting(experiment, {"trainer.lr": 0.5})
        assert store.scores(experiment) == {
            "trainer.lr=0.001": (1e-3, 1e-3 + 1),
            "trainer.lr=0.0001": (1e-4, 1e-4 + 1),
        }

    def test_a_verdict_is_kept_whole_and_announced_once(self, store: Store) -> None:
        campaign = store.create_campaign(a_plan())
        verdict = Verdict(VerdictKind.INCONCLUSIVE, 0.25, -0.1, 0.6, 3, 2, "too few seeds", "a", "b", ("b",))
        store.set_verdict(campaign.id, 0, verdict)
        judged = store.set_verdict(campaign.id, 0, verdict)
        assert store.hypotheses(campaign.id) == [judged]
        assert judged.verdict == verdict
        assert len(store.events_after(campaign.id, kinds=[EventKind.VERDICT])) == 1
        with pytest.raises(NotFound):
            store.set_verdict(campaign.id, 1, verdict)

    def test_events_are_followed_by_id_and_kind(self, store: Store) -> None:
        campaign, other = store.create_campaign(a_plan()), store.create_campaign(a_plan())
        first = store.add_event(campaign.id, EventKind.NOTE, "hello", data={"n": 1})
        store.add_event(other.id, EventKind.CANCEL)
        second = store.add_event(campaign.id, EventKind.CANCEL, "by a person")
        assert store.events_after(campaign.id) == [first, second]
        assert store.events_after(campaign.id, first.id) == [second]
        steering = [kind for kind in EventKind if kind.is_steering]
        assert store.events_after(campaign.id, kinds=steering) == [second]
        assert (first.data, first.text) == ({"n": 1}, "hello")

    def test_what_is_not_there_is_said_so(self, store: Store) -> None:
        for call in (
            lambda: store.set_campaign_state("c-none", CampaignState.APPROVED),
            lambda: store.open_experiment("c-none", program_id="p"),
            lambda: store.open_setting("e-none-0", {"trainer.lr": 1e-3}),
            lambda: store.open_trial("s-none-0-0", seed=0, config=TrialConfig()),
            lambda: store.start_trial("t-none", owner=an_owner()),
            lambda: store.add_metrics("t-none", [("a", 0, 1.0)]),
            lambda: store.add_episodes("t-none", [an_episode("a")]),
            lambda: store.add_event("c-none", EventKind.NOTE),
            lambda: store.program("p-none"),
            lambda: store.setting("s-none"),
            lambda: store.trial("t-none"),
        ):
            with pytest.raises(NotFound):
                call()

    def test_a_second_store_on_the_same_database_sees_everything(self, store: Store, url: str) -> None:
        if url == "sqlite://":
            pytest.skip("a memory database belongs to its store")
        _, trial_id = a_trial(store)
        other = Store(url)
        other.add_metrics(trial_id, [("eval/success", 1, 0.5)])
        assert store.metric(trial_id, "eval/success", 1) == 0.5
        other.close()

    def test_racing_writers_lose_and_repeat_nothing(self, store: Store, url: str) -> None:
        if url == "sqlite://":
            pytest.skip("a memory database has one connection")
        campaign = store.create_campaign(a_plan())
        experiment = an_experiment(store, campaign.id)

        def work(worker: int) -> None:
            for seed in range(5):
                setting = store.open_setting(experiment, {"trainer.lr": 10.0 ** -(1 + seed)})
                trial = store.open_trial(setting.id, seed=seed, config=TrialConfig(seed=seed))
                store.add_metrics(trial.id, [("train/reward", worker, 1.0)])
                store.add_event(campaign.id, EventKind.NOTE, f"{worker}")

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
        assert len(store.settings(experiment)) == 5
        trials = store.campaign_trials(campaign.id)
        assert len(trials) == 5
        assert all(len(store.metrics(trial.id)) == 4 for trial in trials)
        assert len(store.events_after(campaign.id)) == 20


def test_processes_that_open_a_new_file_at_once_all_succeed(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'new' / 'a3r.db'}"
    # Forked, so that they pay no imports and truly race.
    with multiprocessing.get_context("fork").Pool(4) as pool:
        assert pool.map(_num_campaigns, [url] * 8, chunksize=1) == [0] * 8


def _num_campaigns(url: str) -> int:
    store = Store(url)
    try:
        return len(store.campaigns())
    finally:
        store.close()


def test_a_database_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a3r.db"
    Store(f"sqlite:///{path}").close()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE schema_version SET version = 99")
    with pytest.raises(EnvironmentNotReady, match="version 99"):
        Store(f"sqlite:///{path}")


@pytest.mark.parametrize("url", ["mysql://host/db", "nonsense", ""])
def test_a_url_that_cannot_be_used_is_a_usage_error(url: str) -> None:
    with pytest.raises(UsageError):
        Store(url)


def test_an_unreachable_database_is_an_infrastructure_fault() -> None:
    with pytest.raises(InfrastructureFault) as caught:
        Store("postgresql://someone:secret@127.0.0.1:1/nothing")
    assert "secret" not in str(caught.value)


def test_a_file_that_is_no_database_is_an_infrastructure_fault(tmp_path: Path) -> None:
    (tmp_path / "a3r.db").write_bytes(b"this is no database at all" * 100)
    with pytest.raises(InfrastructureFault):
        Store(f"sqlite:///{tmp_path / 'a3r.db'}")
