from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from a3r.errors import UsageError
from a3r.sample import Sample
from trainer.batch import micro_batches


def sample(mask: list[int], *, name: str = "e") -> Sample:
    return Sample(
        episode_id=name,
        task_id="t",
        ids=tuple(range(10, 10 + len(mask))),
        mask=tuple(mask),
        logprobs=tuple(-0.5 * one for one in mask),
        advantages=tuple(2.0 * one for one in mask),
        version=3,
    )


MASKS = st.lists(
    st.lists(st.integers(0, 1), min_size=1, max_size=9).map(lambda tail: [0, *tail]), min_size=1, max_size=12
)


@given(MASKS, st.integers(4, 40))
@settings(max_examples=100, deadline=None)
def test_every_trained_token_is_scored_once_after_its_own_predecessor(masks: list[list[int]], max_tokens: int) -> None:
    samples = [sample(mask) for mask in masks]
    pairs = []
    for batch in micro_batches(samples, max_tokens=max_tokens):
        before = batch.inputs.flatten()[batch.predecessors]
        pairs += list(zip(before.tolist(), batch.targets.tolist(), strict=True))
        assert batch.inputs.numel() <= max_tokens or batch.inputs.shape[0] == 1
        assert set(batch.versions.tolist()) <= {3}
        assert set(batch.behaviour_logprobs.tolist()) <= {-0.5}
        assert set(batch.advantages.tolist()) <= {2.0}
    expected = [(9 + t, 10 + t) for mask in masks for t, trained in enumerate(mask) if trained]
    assert sorted(pairs) == sorted(expected)


def test_rows_of_like_length_share_a_micro_batch() -> None:
    lengths = [3, 30, 4, 31, 3, 29]
    batches = micro_batches([sample([0] * (n - 1) + [1]) for n in lengths], max_tokens=90)
    assert [tuple(batch.inputs.shape) for batch in batches] == [(3, 3), (3, 30)]
    assert [batch.num_tokens for batch in batches] == [10, 90]


def test_a_row_that_trains_its_first_token_is_refused() -> None:
    with pytest.raises(UsageError, match="first token"):
        micro_batches([sample([1, 0])], max_tokens=100)
