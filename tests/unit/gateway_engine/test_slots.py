from __future__ import annotations

from gateway.engines.slots import Slot, forget, shared_prefix, take_slot


def test_the_prompts_last_token_is_always_computed() -> None:
    assert shared_prefix([1, 2, 3], [1, 2, 3]) == 2
    assert shared_prefix([1, 2, 3], [1, 2, 3, 4, 5]) == 3
    assert shared_prefix([1, 9, 3], [1, 2, 3, 4]) == 1
    assert shared_prefix([], [1]) == 0


def test_a_session_goes_on_in_the_slot_that_holds_most_of_its_prompt() -> None:
    slots = [Slot(0, "a", [1, 2]), Slot(1, "a", [1, 2, 3, 4]), Slot(2, "b", [1, 2, 3, 4, 5])]
    taken = take_slot(slots, [1, 2, 3, 4, 5, 6], session="a")
    assert taken is slots[1]
    assert slots[1].ids == [1, 2, 3, 4]
    assert slots[1].is_busy


def test_what_differs_from_the_prompt_is_cut() -> None:
    taken = take_slot([Slot(0, "a", [1, 2, 3, 8])], [1, 2, 3, 4, 5], session="a")
    assert taken is not None
    assert taken.ids == [1, 2, 3]


def test_another_dialogue_of_a_session_takes_a_slot_of_its_own() -> None:
    slots = [Slot(0, "a", [1, 2, 3, 4, 5, 6], used_at=9), Slot(1, used_at=8)]
    taken = take_slot(slots, [1, 7, 7, 7], session="a")
    assert taken is slots[1]
    assert slots[1].ids == []
    assert slots[0].ids == [1, 2, 3, 4, 5, 6]


def test_released_slots_go_first_and_then_the_least_recently_used() -> None:
    slots = [Slot(0, "a", [1], used_at=5), Slot(1, "b", [1], used_at=3), Slot(2, "c", [1], used_at=7)]
    forget(slots[2])
    assert [take_slot(slots, [4, 5], session="d") for _ in range(4)] == [slots[2], slots[1], slots[0], None]
    assert all(slot.ids == [] for slot in slots)


def test_a_slot_that_is_forgotten_while_busy_keeps_its_tokens_for_the_running_call() -> None:
    slot = Slot(0, "a", [1, 2], is_busy=True)
    forget(slot)
    assert (slot.session, slot.ids) == ("", [1, 2])


def test_calls_without_a_session_never_share_tokens() -> None:
    taken = take_slot([Slot(0, "", [1, 2, 3])], [1, 2, 3, 4], session="")
    assert taken is not None
    assert taken.ids == []
