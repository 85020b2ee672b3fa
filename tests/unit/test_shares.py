"""An origin's share of a step: what it drew, what it took over, what it gives back and what it leaves."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from peer.shares import Shares

ORDER = ("b", "a", "d", "c")


def everyone(microbatches: int = 24) -> dict[str, Shares]:
    return {name: Shares(name, ORDER, microbatches) for name in ORDER}


def test_each_index_is_drawn_once_and_evenly() -> None:
    shares = everyone()
    drawn = sorted(index for one in shares.values() for index in one.queue)
    assert drawn == list(range(24))
    assert list(shares["a"].queue) == [1, 5, 9, 13, 17, 21]
    assert [shares["d"].position(index) for index in shares["d"].queue] == list(range(6))


@given(st.sets(st.sampled_from(ORDER), max_size=3), st.sets(st.integers(0, 23)))
def test_the_living_take_over_all_that_the_lost_had_not_committed_each_once(
    lost: set[str], committed: set[int]
) -> None:
    shares = everyone()
    taken = [
        index
        for name, one in shares.items()
        if name not in lost
        for index in one.take_over(lost.__contains__, committed)
    ]
    wanted = [index for index in range(24) if ORDER[index % 4] in lost and index not in committed]
    assert sorted(taken) == wanted


def test_who_is_back_gets_what_was_not_started_and_leaves_the_rest() -> None:
    shares = everyone()
    ours, theirs = shares["a"], shares["d"]
    taken = ours.take_over("d".__eq__, ())
    begun = ours.queue.pop()
    assert begun in taken
    given, kept = ours.give_back("d")
    assert (sorted([*given, *kept]), kept) == (sorted(taken), [begun])
    assert theirs.leave_to("a", kept) == [begun]
    assert begun not in theirs.queue
    assert set(given) <= set(theirs.queue)
    assert ours.give_back("d") == ([], [begun])


def test_what_was_left_to_one_that_is_lost_is_started_after_all() -> None:
    shares = everyone()
    assert shares["d"].leave_to("a", (2, 6, 3)) == [2, 6]
    assert shares["d"].take_over("c".__eq__, {2}) != []
    assert 6 not in shares["d"].queue
    shares["d"].take_over("a".__eq__, {2})
    assert 6 in shares["d"].queue
    assert 2 not in shares["d"].queue


def test_what_was_handed_on_is_taken_over_again() -> None:
    ours = everyone()["a"]
    taken = ours.take_over("d".__eq__, ())
    ours.taken.discard(taken[0])
    ours.queue.remove(taken[0])
    assert ours.take_over("d".__eq__, ()) == [taken[0]]


def test_nobody_takes_what_another_drew_by_saying_that_it_left_it() -> None:
    shares = everyone()
    assert shares["a"].leave_to("d", (0, 2, 3)) == []
    assert list(shares["a"].queue) == [1, 5, 9, 13, 17, 21]
