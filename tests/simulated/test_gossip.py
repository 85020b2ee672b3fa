"""What a swarm's peers hold of each other: members' words, nobody else's, and no more than they change."""

from __future__ import annotations

from bootstrap.simulation.swarm import SimSwarm
from peer.facts import TOPICS
from scheduler.view import VIEW_TOPIC
from swarm.messages import GossipEntry, GossipPush


def owners(swarm: SimSwarm, name: str) -> set[str]:
    """Whose facts a peer holds."""
    return {fact.owner for fact in swarm.peers[name].core.gossip.store.facts()}


def test_strangers_cannot_fill_the_store() -> None:
    """The simulation takes every signature for good, as if each were a stranger's own."""
    swarm = SimSwarm((2, 2))
    assert swarm.run_to(1)
    entries = tuple(
        GossipEntry(topic=VIEW_TOPIC, owner=f"stranger{n}", version=1, value=bytes(1 << 10))
        for n in range(500)
    )
    swarm.peers["s1r1"].core.context.transport.send("s0r0", GossipPush(entries=entries))
    assert swarm.run_to(4)
    assert owners(swarm, "s0r0") == set(swarm.peers)
    swarm.whole()


def test_what_the_departed_said_is_forgotten_and_newcomers_are_heard() -> None:
    swarm = SimSwarm((2, 2, 2))
    assert swarm.run_to(2)
    swarm.kill("s1r1")
    swarm.newcomer("s1r2", 1)
    for _ in range(20):
        step = max(peer.step for peer in swarm.living())
        assert swarm.run_to(step + 3)
        left = {peer.name for peer in swarm.living()}
        if all(owners(swarm, name) == left for name in left):
            break
    assert {name: owners(swarm, name) for name in left} == dict.fromkeys(left, left)
    facts = [swarm.peers[name].core.gossip.store.facts() for name in sorted(left)]
    assert all(len(held) <= len(TOPICS) * len(left) for held in facts)


def test_who_has_nothing_new_to_say_of_itself_says_nothing() -> None:
    swarm = SimSwarm((2, 2), pace=10)
    assert swarm.run_to(10)
    before = [fact.version for fact in swarm.peers["s0r0"].core.gossip.store.of_kind(VIEW_TOPIC)]
    swarm.clock.run_for(60)
    after = [fact.version for fact in swarm.peers["s0r0"].core.gossip.store.of_kind(VIEW_TOPIC)]
    # A version is drawn for every fact of an owner, the origins' word on each step among them.
    assert len(before) == len(after) == 4
    assert before[2:] == after[2:]
