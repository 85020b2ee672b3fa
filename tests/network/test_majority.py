"""More than half of the peers die at once: the researcher's node begins the run again with the rest."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

from bootstrap.create import example_toml
from peer import checkpoint
from tests.network.swarms import events, first, happens, opened

PEERS = {"a0": 0, "b0": 0, "a1": 1, "b1": 1, "c1": 1, "d1": 1}
KILLED = ("b0", "b1", "c1")
LEAVES = "d1"
SURVIVORS = ("a0", "a1")
KILL_STEP = 5
MORE_STEPS = 4


def steps(log: list[dict[str, Any]]) -> list[int]:
    return [event["step"] for event in log if event["event"] == "stepped"]


def went_on(directory: Path, log: list[dict[str, Any]], again: dict[str, Any]) -> None:
    """Every step once, by the same members: what was under way was drawn again, and nobody came in anew."""
    begins = next(n for n, event in enumerate(log) if event["event"] == "founded" and event["epoch"] == 1)
    assert (log[begins]["step"], log[begins]["members"]) == (again["step"], len(SURVIVORS))
    before, after = steps(log[:begins]), steps(log[begins:])
    assert before[-1] == again["step"] - 1
    assert after[:MORE_STEPS] == list(range(again["step"], again["step"] + MORE_STEPS))
    # All are told of our new life before we send anything in it.
    assert not [event for event in log if event["event"] in ("fell_out", "stale", "restarted")]


async def lose_majority(directory: Path) -> None:
    manifest = example_toml(
        stages="[2, 2]", path_length=2, microbatch_size=2, validation_every=0, checkpoint_every=0
    )
    async with opened(directory, manifest) as run:
        swarm, made, clock = run.swarm, run.made, run.clock
        for name, stage in PEERS.items():
            swarm.start_peer(name, join=run.join, stage=stage)

        def all_stepped(names: tuple[str, ...], step: int) -> bool | None:
            return all(max(steps(events(directory, name)), default=0) >= step for name in names) or None

        await happens(clock, lambda: all_stepped(tuple(PEERS), KILL_STEP))
        for name in KILLED:
            swarm.signal(name, signal.SIGKILL)

        def without_majority() -> bool | None:
            lost = {event["other"] for event in events(directory, LEAVES) if event["event"] == "lost"}
            return len(lost) >= len(KILLED) or None

        await happens(clock, without_majority)
        swarm.signal(LEAVES, signal.SIGINT)
        again = await happens(clock, lambda: first(directory, "node", "genesis", epoch=1))
        await happens(clock, lambda: all_stepped(SURVIVORS, again["step"] + MORE_STEPS))
        for name in SURVIVORS:
            went_on(directory, events(directory, name), again)

        # Whoever left while nothing could go on has kept its last whole step, of which the others went on.
        assert swarm.processes[LEAVES].code == 0
        kept = checkpoint.newest(directory / LEAVES / "checkpoints", made.manifest.run_id, PEERS[LEAVES])
        assert kept is not None
        assert kept[0].mark == (0, again["step"])


def test_three_of_six_are_killed_and_the_run_goes_on_in_a_new_epoch(tmp_path: Path) -> None:
    asyncio.run(lose_majority(tmp_path))
