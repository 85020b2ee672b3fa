"""A swarm that is stopped whole goes on, bit for bit, where it stopped.

Two microbatches a step and no skipped stage: their sum has the same bits in whatever order they are added, so
that two runs can be compared at all.
"""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

from bootstrap.create import example_toml
from peer import checkpoint
from tests.network.swarms import events, first, happens, opened

STEPS = 14
STAGES = 2
PEERS = [(f"peer{number}", number % STAGES) for number in range(2 * STAGES)]
STOP_STEP = 5
MANIFEST = example_toml(
    stages="[2, 2]",
    path_length=2,
    microbatches_per_origin=1,
    microbatch_size=2,
    total_steps=STEPS,
    warmup_steps=4,
    validation_every=0,
    checkpoint_every=3,
)


async def train(directory: Path, *, stop: bool) -> dict[str, str]:
    """A whole run; the SHA-256 of each peer's last state. ``stop``: all are asked to leave in the middle, at
    once, and started again when every process has ended."""
    async with opened(directory, MANIFEST) as run:
        swarm, made, clock = run.swarm, run.made, run.clock

        async def ended() -> None:
            peers = [swarm.processes[name] for name, _ in PEERS]
            await happens(clock, lambda: all(peer.ended.is_set() for peer in peers) or None)
            for peer in peers:
                assert peer.code == 0, peer.log.read_text()[-2000:]

        for name, stage in PEERS:
            swarm.start_peer(name, join=run.join, stage=stage)
        if stop:
            await happens(clock, lambda: first(directory, "peer0", "started", step=STOP_STEP))
            for name, _ in PEERS:
                swarm.signal(name, signal.SIGINT)
            await ended()
            # They find their stage again by what they hold.
            for name, _ in PEERS:
                swarm.start_peer(name, join=run.join)
        await ended()
    digests = {}
    for name, stage in PEERS:
        found = checkpoint.newest(directory / name / "checkpoints", made.manifest.run_id, stage)
        assert found is not None
        assert found[0].step == STEPS
        digests[name] = found[0].sha256
    return digests


def test_a_swarm_that_was_stopped_whole_ends_bit_equal_to_one_that_never_stopped(tmp_path: Path) -> None:
    digests = []
    for name, stop in (("whole", False), ("stopped", True)):
        (tmp_path / name).mkdir()
        digests.append(asyncio.run(train(tmp_path / name, stop=stop)))
    assert digests[0] == digests[1]
    directory = tmp_path / "stopped"
    begun = [event for event in events(directory, "node") if event["event"] == "genesis"]
    assert [event["epoch"] for event in begun] == [0, 1]
    # Whoever was asked a moment earlier stopped a step before the others, and comes in as a newcomer.
    assert begun[1]["step"] >= STOP_STEP - 2
    stepped: set[int] = set()
    for name, _ in PEERS:
        steps = [
            event["step"] for event in events(directory, name) if event["event"] in ("stepped", "followed")
        ]
        stepped |= set(steps)
    assert stepped == set(range(STEPS))
