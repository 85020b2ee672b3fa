"""Gossip over the transport: facts as messages, and messages as facts."""

from __future__ import annotations

from peer.context import Context
from scheduler.gossip import Gossip
from scheduler.hashtree import Fact
from scheduler.store import Digest
from swarm.messages import GossipDigest, GossipEntry, GossipPush
from swarm.transport.base import PeerId


def push(context: Context, peer: PeerId, facts: tuple[Fact, ...]) -> None:
    """Facts that ``peer`` may not know. They are ours or were checked when they came: not checked again."""
    entries = tuple(GossipEntry.model_construct(**fact._asdict()) for fact in facts)
    context.transport.send(peer, GossipPush(entries=entries))


def ask(context: Context, peer: PeerId, digest: Digest) -> None:
    """What we know; ``peer`` answers with what is newer."""
    context.transport.send(peer, GossipDigest(**digest._asdict()))


def on_push(gossip: Gossip, sender: PeerId, message: GossipPush) -> None:
    gossip.on_push(sender, (Fact(e.topic, e.owner, e.version, e.value, e.signature) for e in message.entries))


def on_digest(gossip: Gossip, sender: PeerId, message: GossipDigest) -> None:
    gossip.on_digest(sender, Digest(message.nodes, message.held, message.wanted))
