"""What the directory knows of a run, at one moment."""

from __future__ import annotations

import asyncio
import statistics

from pydantic import BaseModel, ConfigDict

from swarm.directory import Directory
from swarm.errors import UserError
from swarm.manifest import short_run_id
from swarm.records import PeerRecord, ProgressRecord


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class StageSnapshot(_Model):
    """One stage and its living replicas."""

    stage: int
    layers: int
    replicas: int
    """Peers that are active or joining."""
    peers: tuple[PeerRecord, ...]


class SwarmSnapshot(_Model):
    """The run as its peers and origins describe it. Losses in nats/token; None where nobody said."""

    run_id: str
    name: str
    begun: bool
    step: int | None
    total_steps: int
    train_loss: float | None
    validation_loss: float | None
    tokens_per_s: float
    tokens_total: int
    committed: int
    rerouted: int
    stages: tuple[StageSnapshot, ...]
    refused: int
    """Records that this reader refused."""

    @property
    def complete(self) -> bool:
        """Whether every stage has a replica."""
        return all(stage.replicas for stage in self.stages)


async def snapshot(directory: Directory) -> SwarmSnapshot:
    """Ask the DHT, and nobody else.

    Raises ``UserError`` for a run that nobody knows, ``DirectoryError`` when no node answers.
    """
    signed = await directory.manifest()
    if signed is None and directory.refused["bad manifest"]:
        raise UserError(
            f"the manifest that the nodes hold is not run {short_run_id(directory.run_id)}'s: its hash "
            "or its signature differs; ask the researcher for a new join string"
        )
    if signed is None:
        raise UserError(
            f"unknown run {short_run_id(directory.run_id)}: the nodes that answer hold no manifest of it; "
            "ask the researcher for the join string that `skipswarm bootstrap` prints now"
        )
    manifest = signed.verify(directory.run_id)
    peers, progress, genesis = await asyncio.gather(
        directory.peers(), directory.progress(), directory.genesis()
    )
    stages = tuple(
        StageSnapshot(
            stage=number,
            layers=layers,
            replicas=len(here := tuple(peer for peer in peers if peer.stage == number)),
            peers=here,
        )
        for number, layers in enumerate(manifest.stages)
    )
    newest = _newest_step(progress)
    return SwarmSnapshot(
        run_id=directory.run_id,
        name=manifest.name,
        begun=bool(progress) or genesis is not None,
        step=newest[0].step if newest else None,
        total_steps=manifest.optimizer.total_steps,
        train_loss=_mean([record.train_loss for record in newest]),
        validation_loss=_mean([record.validation_loss for record in newest]),
        tokens_per_s=statistics.median(record.tokens_per_s for record in newest) if newest else 0.0,
        tokens_total=max((record.tokens_total for record in newest), default=0),
        committed=max((record.committed for record in newest), default=0),
        rerouted=sum(record.rerouted for record in progress),
        stages=stages,
        refused=directory.refused.total(),
    )


def _newest_step(progress: list[ProgressRecord]) -> list[ProgressRecord]:
    """The records of the median origin's step: one of many that lies moves nothing."""
    if not progress:
        return []
    reached = statistics.median_high(record.step for record in progress)
    return [record for record in progress if record.step == reached]


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
