"""The event log: every event is declared, written in order, and no disk ends a daemon."""

from __future__ import annotations

import ast
import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from bootstrap.simulation.swarm import SimSwarm
from swarm.clock import SimClock
from swarm.errors import UserError
from swarm.events import FLUSH_S, JsonLinesEvents, ListEvents, line_of
from swarm.timeline.schema import EVENTS, FREQUENT
from swarm.timeline.table import table

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("swarm", "scheduler", "peer", "bootstrap")
LOST = "s1r0"


def emitted() -> dict[str, set[str]]:
    """event -> names of the fields that some ``emit("...")`` in the code gives by keyword."""
    found: dict[str, set[str]] = {}
    for path in (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "emit" and node.args:
                name = node.args[0]
                assert isinstance(name, ast.Constant), f"{path.name}:{node.lineno}: an event without a name"
                found.setdefault(name.value, set()).update(k.arg for k in node.keywords if k.arg)
    return found


def test_every_event_that_the_code_emits_is_declared_and_no_other() -> None:
    assert emitted().keys() == EVENTS.keys()


@pytest.mark.parametrize("event", sorted(EVENTS))
def test_no_field_is_emitted_that_is_not_declared(event: str) -> None:
    assert emitted()[event] <= set(EVENTS[event].model_fields)


def test_the_table_of_events_is_current() -> None:
    assert (ROOT / "docs" / "events.md").read_text() == table(), "skipswarm events schema > docs/events.md"


@pytest.fixture(scope="module")
def swarm() -> SimSwarm:
    """Some steps with a lost peer, an origin that dies and a newcomer."""
    swarm = SimSwarm((3, 2, 2), validation_every=2, microbatches_per_origin=4)
    assert swarm.run_to(1)
    swarm.when("forward", lambda sender, to, message: to == LOST and not swarm.kill(LOST), step=1)
    assert swarm.run_to(2)
    swarm.when("commit", lambda sender, to, message: sender == "s0r1" and not swarm.kill(sender), step=2)
    assert swarm.run_to(3)
    swarm.newcomer(LOST, 1, incarnation=100)
    assert swarm.run_to(8)
    swarm.whole()
    return swarm


def test_a_simulated_swarm_tells_events_with_exactly_their_fields(swarm: SimSwarm) -> None:
    seen = set()
    for peer in swarm.lives():
        for line in peer.events.lines(peer.name):
            written = json.loads(line)
            assert (written.pop("peer"), isinstance(written.pop("t"), float)) == (peer.name, True)
            event = EVENTS[written.pop("event")]
            seen.add(event)
            required = {name for name, field in event.model_fields.items() if field.is_required()}
            assert required <= written.keys() <= set(event.model_fields), event
            assert event.model_validate_json(json.dumps(written), strict=True)
    assert {EVENTS[name] for name in ("rerouted", "taken_over", "computed", "joined", "gone")} <= seen


def test_each_life_begins_with_its_stage_and_incarnation(swarm: SimSwarm) -> None:
    assert [fields for name, fields in swarm.of("began") if name == LOST] == [
        {"stage": 1, "incarnation": 1},
        {"stage": 1, "incarnation": 100},
    ]


def test_what_counts_was_computed_once_in_each_direction_by_each_peer_of_the_path(swarm: SimSwarm) -> None:
    tasks = [(name, f["kind"], f["step"], f["index"], f["attempt"]) for name, f in swarm.of("computed")]
    for step in (0, 3, 4):
        for index, attempt, origin, path, _ in swarm.close_of(step)["counted"]:
            microbatch = (step, index, attempt)
            assert tasks.count((origin, "loss", *microbatch)) == 1
            for peer in (hop.partition(":")[2] for hop in path):
                for kind in ("forward", "backward", "weight"):
                    assert tasks.count((peer, kind, *microbatch)) == 1


def test_a_reroute_says_why(swarm: SimSwarm) -> None:
    reroutes = [fields for _, fields in swarm.of("rerouted") if fields["step"] == 1]
    assert reroutes
    for reroute in reroutes:
        assert (reroute["lost"], reroute["cause"]) == (LOST, "lost")
        reasons = {fields["reason"] for _, fields in swarm.of("lost") if fields["other"] == LOST}
        assert reroute["reason"] in reasons


# -- the file ----------------------------------------------------------------------------------------------


class Log:
    """An event log in virtual time, and what the volunteer was told."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock = SimClock()
        self.told: list[str] = []
        self.log = JsonLinesEvents(path, "a", self.clock, report=self.told.append, unix=lambda: 1e9)

    def events(self) -> list[Any]:
        return [json.loads(line)["event"] for line in self.path.read_text().splitlines()]


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path / "deep" / "a.jsonl")


def test_the_first_line_ties_the_clock_to_unix_time(log: Log) -> None:
    first = json.loads(log.path.read_text())
    assert (first["event"], first["t"], first["unix_s"], first["peer"]) == ("opened", 0.0, 1e9, "a")
    assert len(first["clock"]) == 12


def test_frequent_events_wait_for_a_second_or_for_a_rare_one(log: Log) -> None:
    assert {"computed", "refused"} <= FREQUENT
    log.log.emit("computed", step=0)
    log.log.emit("refused", step=0)
    assert log.events() == ["opened"]
    log.log.emit("lost", other="b", reason="reset")
    assert log.events() == ["opened", "computed", "refused", "lost"]
    log.log.emit("computed", step=1)
    log.clock.run_for(FLUSH_S - 0.01)
    assert len(log.events()) == 4
    log.clock.run_for(0.02)
    assert log.events()[4:] == ["computed"]


def test_the_end_writes_what_waits_and_forgets_what_comes_later(log: Log) -> None:
    log.log.emit("computed", step=0)
    log.log.close()
    log.log.emit("lost", other="b", reason="reset")
    log.log.close()
    assert log.events() == ["opened", "computed"]


def test_half_a_line_of_an_earlier_life_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"t":1.0,"peer":"a","event":"lo')
    Log(path)
    lines = path.read_text().splitlines()
    assert json.loads(lines[1])["event"] == "opened"


@pytest.mark.parametrize("event", ["lost", "computed"])
def test_a_full_disk_ends_the_log_and_nothing_else(event: str) -> None:
    full = Path("/dev/full")
    told: list[str] = []
    clock = SimClock()
    log = JsonLinesEvents(full, "a", clock, report=told.append)
    for _ in range(3):
        log.emit(event, other="b")
        clock.run_for(2 * FLUSH_S)
    log.close()
    assert told == [
        f"the event log {full} ends here: {os.strerror(errno.ENOSPC)}; the work goes on without it"
    ]


def test_a_log_that_cannot_be_opened_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"choose another file for the event log with --events$") as refused:
        Log(tmp_path)
    assert "\n" not in str(refused.value)


def test_events_in_memory_have_the_same_lines_as_those_on_disk(log: Log) -> None:
    kept = ListEvents(log.clock)
    for one in (kept, log.log):
        one.emit("lost", other="b", reason="reset")
    assert list(kept.lines("a"))[1] == log.path.read_text().splitlines(keepends=True)[1]
    assert line_of(0.0, "a", "lost", {"other": "b", "reason": "reset"}) == list(kept.lines("a"))[1]
