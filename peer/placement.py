"""Finding a place in a run: the manifest, the founding members, the stage that needs a peer most."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from scheduler.assignment import Hosted, choose_stage
from swarm.clock import Clock
from swarm.directory import Directory
from swarm.errors import UserError
from swarm.manifest import Manifest
from swarm.messages import Member
from swarm.records import Genesis, PeerRecord

LOOK_AGAIN_S = 0.5
MANIFEST_PATIENCE_S = 6.0


class Stopped(Exception):
    """The user asked to leave while something was waited for."""


class PlacementError(UserError):
    """There is no place in this run; one line."""


@dataclass(frozen=True)
class Place:
    """Where a peer stands in the run when it begins."""

    stage: int
    genesis: Genesis
    """The newest."""
    founding: bool
    """Is this peer one of its members? Else it is a newcomer."""


async def pause(clock: Clock, duration_s: float, stop: asyncio.Event) -> None:
    """Wait, or raise ``Stopped`` at once when the user wants to leave."""
    done = asyncio.Event()
    timer = clock.call_later(duration_s, done.set)
    waiting = [asyncio.ensure_future(done.wait()), asyncio.ensure_future(stop.wait())]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        timer.cancel()
        for task in waiting:
            task.cancel()
    if stop.is_set():
        raise Stopped


async def find_manifest(directory: Directory, clock: Clock, stop: asyncio.Event) -> Manifest:
    """The run's manifest from the DHT, its hash and signature checked.

    Raises:
        PlacementError: nobody published it, or only with a hash that is not the run id.
    """
    end_s = clock.now() + MANIFEST_PATIENCE_S
    while True:
        signed = await directory.manifest()
        if signed is not None:
            return signed.verify(directory.run_id)
        if clock.now() > end_s:
            break
        await pause(clock, LOOK_AGAIN_S, stop)
    if directory.refused["bad manifest"]:
        raise PlacementError(
            f"the manifest that the nodes hold is not run {directory.run_id[:12]}'s: its hash or its "
            "signature differs. Ask the researcher for a new join string"
        )
    raise PlacementError(
        f"unknown run {directory.run_id[:12]}: no node here holds its manifest. "
        "Ask the researcher whether `skipswarm bootstrap` runs, and for a new join string"
    )


def assign(peers: list[PeerRecord], me: str, manifest: Manifest) -> int:
    """The stage of ``me`` when those without a place take one in order of their ids, each the neediest.

    A function of the records alone, so peers that see the same records take different places.
    """
    count, length = len(manifest.stages), manifest.path_length
    hosted = [Hosted(p.stage) for p in peers if p.state in ("active", "waiting")]
    waiting = sorted({p.peer for p in peers if p.state == "joining"} | {me})
    for peer in waiting:
        stage = choose_stage(
            hosted,
            stages=count,
            path_length=length,
            start_replicas=manifest.sync.start_replicas,
            work_s=manifest.stages,
        )
        if peer == me:
            return stage
        hosted.append(Hosted(stage))
    raise AssertionError("unreachable: me is among the waiting")


async def find_place(
    directory: Directory,
    manifest: Manifest,
    me: Member,
    clock: Clock,
    stop: asyncio.Event,
    *,
    wanted: int | None,
    own: int | None,
    announce: Callable[[int], PeerRecord],
    report: Callable[[str], None],
) -> Place:
    """Announce, and wait until the run begins or, if it has begun, take the stage most in need.

    ``own`` is the stage whose state this peer holds from an earlier life: it takes that one again, unless
    another has no replica at all.
    """
    if wanted is not None and not 0 <= wanted < len(manifest.stages):
        raise PlacementError(f"no stage {wanted}: this run has stages 0 to {len(manifest.stages) - 1}")
    stage: int | None = None
    told = False
    while True:
        genesis = await directory.genesis()
        if genesis is not None:
            return await _place_of(directory, genesis, manifest, me, wanted, own)
        chosen = await _choose(directory, manifest, me, wanted, own)
        if chosen != stage:
            stage = chosen
            await directory.announce(announce(stage))
        if not told:
            told = True
            report(f"waiting for the run to begin, in stage {stage}")
        await pause(clock, LOOK_AGAIN_S, stop)


async def _choose(
    directory: Directory, manifest: Manifest, me: Member, wanted: int | None, own: int | None
) -> int:
    if wanted is not None:
        return wanted
    peers = await directory.peers()
    hosted = {peer.stage for peer in peers if peer.state == "active" and peer.peer != me.peer}
    if own is not None and (not hosted or len(hosted | {own}) == len(manifest.stages)):
        return own
    return assign(peers, me.peer, manifest)


async def _place_of(
    directory: Directory,
    genesis: Genesis,
    manifest: Manifest,
    me: Member,
    wanted: int | None,
    own: int | None,
) -> Place:
    for member in genesis.members:
        if member.peer == me.peer and member.incarnation == me.incarnation:
            return Place(member.stage, genesis, founding=True)
    stage = await _choose(directory, manifest, me, wanted, own)
    return Place(stage, genesis, founding=False)
