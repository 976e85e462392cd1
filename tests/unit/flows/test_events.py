import json

import pytest

from flows.events import EventKind, EventLog, EventTail


def test_a_tail_reads_each_event_once_and_waits_for_a_torn_line(tmp_path):
    path = tmp_path / "trial" / "judge.jsonl"
    log, tail = EventLog(path), EventTail(path)
    log.metrics({"eval/success": 0.5}, step=3)
    assert [(event.kind, event.fields["step"]) for event in tail.read()] == [(EventKind.METRICS, 3)]
    assert tail.read() == []

    whole = json.dumps({"kind": "note", "text": "later"}) + "\n"
    with path.open("a") as file:
        file.write(whole[:10])
        file.flush()
        assert tail.read() == []
        file.write(whole[10:])
    assert [event.fields["text"] for event in tail.read()] == ["later"]


def test_a_number_that_is_not_finite_is_refused_at_the_writer(tmp_path):
    log = EventLog(tmp_path / "swarm.jsonl")
    with pytest.raises(ValueError, match="JSON compliant"):
        log.metrics({"train/loss": float("nan")}, step=1)


def test_no_file_means_no_events(tmp_path):
    assert EventTail(tmp_path / "missing.jsonl").read() == []
