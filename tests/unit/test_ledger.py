"""The ledger is a pure function of events, and settling commits is a merge."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.ledger import (
    Closed,
    Committed,
    Ledger,
    SumDiscarded,
    Summed,
    apply,
    owed,
    settle,
    tokens_of,
    unsound,
)
from swarm.messages import Counted, Hop, Member, StepClose


def counted(index: int, attempt: int = 0, origin: str = "o0", hops: tuple[str, ...] = ("a",)) -> Counted:
    path = (Hop(stage=0, peer=origin), *(Hop(stage=s + 1, peer=p) for s, p in enumerate(hops)))
    return Counted(index=index, attempt=attempt, origin=origin, path=path, tokens=10)


def close(*entries: Counted, step: int = 3) -> StepClose:
    return StepClose(step=step, counted=entries, members=(Member(peer="o0", stage=0),))


COMMITS = st.lists(
    st.builds(
        counted,
        st.integers(0, 3),
        st.integers(0, 2),
        st.sampled_from(["o0", "o1"]),
        st.sampled_from([("a",), ("b",), ("a", "c")]),
    ),
    max_size=8,
)


@given(COMMITS, COMMITS, COMMITS)
def test_settling_commits_is_commutative_associative_and_idempotent(
    a: list[Counted], b: list[Counted], c: list[Counted]
) -> None:
    assert settle([*a, *b]) == settle([*b, *a])
    left = settle([*settle([*a, *b]).values(), *c])
    right = settle([*a, *settle([*b, *c]).values()])
    assert left == right
    assert settle([*settle(a).values(), *a]) == settle(a)


@given(COMMITS)
def test_the_order_in_which_commits_come_does_not_matter(commits: list[Counted]) -> None:
    ends = set()
    for order in itertools.islice(itertools.permutations(commits), 24):
        ledger = Ledger(3)
        for one in order:
            ledger = apply(ledger, Committed(one))
        ends.add(tuple(sorted(ledger.commits.items(), key=lambda item: item[0])))
    assert len(ends) == 1
    assert dict(ends.pop()) == settle(commits)


def test_nothing_is_summed_twice() -> None:
    ledger = apply(Ledger(3), Summed(counted(1)))
    with pytest.raises(ValueError, match="summed twice"):
        apply(ledger, Summed(counted(1)))
    assert apply(apply(ledger, SumDiscarded()), Summed(counted(1))).summed == (counted(1),)


def test_a_step_has_one_close() -> None:
    ledger = apply(Ledger(3), Closed(close(counted(0))))
    assert apply(ledger, Closed(close(counted(0)))) == ledger
    with pytest.raises(ValueError, match="two histories"):
        apply(ledger, Closed(close(counted(1))))
    with pytest.raises(ValueError, match="step 4"):
        apply(ledger, Closed(close(step=4)))


def test_a_commit_after_the_close_changes_nothing() -> None:
    ledger = apply(Ledger(3), Closed(close(counted(0))))
    assert apply(ledger, Committed(counted(5))) == ledger


def test_weights_come_from_the_close() -> None:
    decided = close(counted(0, hops=("a",)), counted(1, hops=("b", "c")), counted(2, hops=("a", "c")))
    assert [c.index for c in owed(decided, "a", 1)] == [0, 2]
    assert [c.index for c in owed(decided, "a", 2)] == []
    assert tokens_of(decided, "c", 2) == 20
    assert tokens_of(decided, "o0", 0) == 30


def test_a_sum_that_holds_what_the_close_does_not_count_is_unsound() -> None:
    kept, dropped = counted(0), counted(1, attempt=7)
    ledger = apply(apply(Ledger(3), Summed(kept)), Summed(dropped))
    assert not unsound(ledger, "a", 1)
    assert unsound(apply(ledger, Closed(close(kept))), "a", 1)
    assert not unsound(apply(ledger, Closed(close(kept, dropped))), "a", 1)
