"""Many logs, one timeline: where microbatches spent their time, what was lost, the trace; hostile files."""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from bootstrap.faults.trial import Trial
from bootstrap.simulation.swarm import DURATIONS_S, SimSwarm
from peer.worker import TaskKind
from swarm.errors import UserError
from swarm.timeline import read as reader
from swarm.timeline.merge import Timeline, merge
from swarm.timeline.summary import summarise
from swarm.timeline.trace import rows, write
from swarm.timeline.why import Why, why

LOST, ORIGIN = "s1r0", "s0r1"
COMPUTED_S = 3 * (DURATIONS_S[TaskKind.FORWARD] + DURATIONS_S[TaskKind.BACKWARD]) + DURATIONS_S[TaskKind.LOSS]


def save(swarm: SimSwarm, folder: Path) -> Path:
    swarm.save_logs(folder)
    return folder


def disturbed(message: str) -> SimSwarm:
    """A peer is lost with the first such message to it in step 1, an origin in step 2; the peer is back."""
    swarm = SimSwarm((3, 2, 2), microbatches_per_origin=4)
    swarm.when(message, lambda sender, to, _: to == LOST and not swarm.kill(LOST), step=1)
    assert swarm.run_to(2)
    swarm.when("forward", lambda sender, to, _: sender == ORIGIN and not swarm.kill(ORIGIN), step=2)
    assert swarm.run_to(3)
    swarm.newcomer(LOST, 1, incarnation=100)
    assert swarm.run_to(7)
    swarm.whole()
    return swarm


@pytest.fixture(scope="module")
def swarm() -> SimSwarm:
    return disturbed("forward")


@pytest.fixture(scope="module")
def logs(swarm: SimSwarm, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(swarm, tmp_path_factory.mktemp("logs"))


@pytest.fixture(scope="module")
def timeline(logs: Path) -> Timeline:
    return merge(logs)


def rerouted(swarm: SimSwarm) -> list[tuple[str, dict[str, Any]]]:
    return [(by, fields) for by, fields in swarm.of("rerouted") if fields["lost"] == LOST]


def whole(answer: Why) -> Why:
    """Its slices follow each other without a gap from the first start to the commit."""
    at_s = 0.0
    for part in answer.slices:
        assert part.from_s == pytest.approx(at_s, abs=5e-6)  # logs have whole microseconds
        at_s += part.for_s
    assert at_s == pytest.approx(answer.total_s)
    assert sum(answer.spent_s.values()) == pytest.approx(answer.total_s)
    return answer


# -- where a microbatch spent its time ---------------------------------------------------------------------


def test_every_event_comes_into_one_order(swarm: SimSwarm, timeline: Timeline) -> None:
    assert len(timeline.entries) == sum(len(peer.events.entries) + 1 for peer in swarm.lives())
    assert [e.at_s for e in timeline.entries] == sorted(e.at_s for e in timeline.entries)
    assert not timeline.passed_over
    assert timeline.stages == {peer.name: peer.stage for peer in swarm.lives()}


def test_an_undisturbed_microbatch_computes_queues_and_travels(swarm: SimSwarm, timeline: Timeline) -> None:
    for index, attempt, origin, path, _ in swarm.close_of(0)["counted"]:
        answer = whole(why(timeline, 0, index))
        assert answer.committed
        assert (answer.attempt, answer.reroutes, answer.spent_s["waiting"]) == (attempt, [], 0)
        assert answer.spent_s["compute"] == pytest.approx(COMPUTED_S)
        hops = [f"to {peer}" for peer in (path[1][2:], path[2][2:], origin)]
        assert [p.detail for p in answer.slices if p.what == "transfer"][:3] == hops
        assert [f"{work.stage}:{work.peer}" for work in answer.counted] == path
        weights = [work.weight_s for work in answer.counted]
        assert weights == pytest.approx([DURATIONS_S[TaskKind.WEIGHT]] * 3)


def test_a_reroute_in_forward_names_the_lost_peer_the_reason_and_who_did_it(
    swarm: SimSwarm, timeline: Timeline
) -> None:
    reasons = {fields["reason"] for _, fields in swarm.of("lost") if fields["other"] == LOST}
    waited_s: list[float] = []
    for by, fields in rerouted(swarm):
        answer = whole(why(timeline, 1, fields["index"]))
        (reroute,) = answer.reroutes
        assert (reroute.by, reroute.stage, reroute.lost, reroute.cause) == (by, 1, LOST, "lost")
        assert reroute.reason in reasons
        assert reroute.instead == "1:s1r1"
        waits = [part for part in answer.slices if part.detail == f"{LOST} was lost: {reroute.reason}"]
        ready = next(part for part in answer.slices if (part.peer, part.what) == (by, "compute"))
        waited_s.append(reroute.at_s - ready.from_s - ready.for_s)
        assert sum(wait.for_s for wait in waits) == pytest.approx(waited_s[-1])
        assert {(wait.what, wait.peer) for wait in waits} <= {("waiting", by)}
        assert LOST not in {work.peer for work in answer.counted}
    assert max(waited_s) > 0


def test_a_reroute_in_backward_shows_the_work_that_was_lost_and_done_again(tmp_path: Path) -> None:
    swarm = disturbed("backward")
    timeline = merge(save(swarm, tmp_path))
    details = Counter[str]()
    for by, fields in rerouted(swarm):
        answer = whole(why(timeline, 1, fields["index"]))
        assert [(r.by, r.lost, r.instead) for r in answer.reroutes] == [(by, LOST, "1:s1r1")]
        work = [(p.peer, p.detail) for p in answer.slices if p.what == "compute" and p.stage == 1]
        assert work == [(LOST, "forward"), ("s1r1", "forward"), ("s1r1", "backward")][-len(work) :]
        assert len(work) >= 2
        details.update(part.detail for part in answer.slices)
    assert details["to the next hop and back"]
    assert details["s1r1 refused: busy"]
    assert details["for room at the next stage"]


def test_a_lost_origin_is_named_with_the_time_until_another_took_over(
    swarm: SimSwarm, timeline: Timeline
) -> None:
    taken = [f["index"] for _, f in swarm.of("taken_over") if f["lost"] == ORIGIN]
    begun = [f["index"] for name, f in swarm.of("started") if name == ORIGIN and f["step"] == 2]
    assert set(taken) & set(begun)
    for index in set(taken) & set(begun):
        answer = whole(why(timeline, 2, index))
        assert set(answer.taken_over_from) == {ORIGIN}
        assert answer.attempts[0].origin == ORIGIN
        assert answer.counted[0].peer != ORIGIN
        assert f"origin {ORIGIN} was lost" in {part.detail for part in answer.slices}


@pytest.mark.parametrize("seed", range(4))
def test_under_random_faults_each_moment_has_one_name_and_no_slice_overlaps(
    seed: int, tmp_path: Path
) -> None:
    trial = Trial(seed)
    trial.run()
    trial.swarm.save_logs(tmp_path)
    timeline = merge(tmp_path)
    assert not timeline.passed_over
    started = {(f["step"], f["index"]) for _, f in trial.swarm.of("started")}
    assert started
    rerouted = 0
    for step, index in started:
        answer = whole(why(timeline, step, index))
        rerouted += len(answer.reroutes)
    assert rerouted == len(trial.swarm.of("rerouted")) == sum(summarise(timeline).rerouted.values())
    assert sum(e["ph"] == "X" for e in rows(timeline)) == sum(
        len(trial.swarm.of(event)) for event in ("computed", "averaged")
    )


def test_what_is_in_no_log_is_one_line(timeline: Timeline) -> None:
    with pytest.raises(UserError, match="no log names microbatch 99 of step 0"):
        why(timeline, 0, 99)


class Scribe:
    """Writes the logs of a swarm that never was."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def tell(self, peer: str, at_s: float, event: str, **fields: Any) -> None:
        line = json.dumps({"t": at_s, "peer": peer, "event": event, **fields})
        with (self.folder / f"{peer}.jsonl").open("a") as file:
            file.write(line + "\n")

    def task(self, peer: str, at_s: float, kind: str, run_s: float, wait_s: float = 0.0) -> None:
        self.mine(peer, at_s, "computed", kind=kind, run_s=run_s, wait_s=wait_s)

    def mine(self, peer: str, at_s: float, event: str, **fields: Any) -> None:
        self.tell(peer, at_s, event, step=0, index=0, attempt=fields.pop("attempt", 0), **fields)


@pytest.fixture
def scribe(tmp_path: Path) -> Scribe:
    scribe = Scribe(tmp_path)
    for stage, peer in enumerate("abc"):
        scribe.tell(peer, 0.0, "began", stage=stage, incarnation=1)
    return scribe


def told(answer: Why) -> list[tuple[float, float, str, str, str]]:
    return [(round(p.from_s, 3), round(p.for_s, 3), p.what, p.peer, p.detail) for p in whole(answer).slices]


def test_a_restarted_microbatch_waits_for_its_new_attempt(scribe: Scribe) -> None:
    scribe.mine("a", 1.0, "started", path=["0:a", "1:b"])
    scribe.task("a", 2.0, "forward", 1.0)
    scribe.mine("a", 5.0, "restarted", reason="not back after 4 s")
    scribe.mine("a", 5.5, "started", path=["0:a", "2:c"], attempt=1)
    scribe.mine("a", 6.0, "committed", loss=1.0, path=["0:a", "2:c"], attempt=1)
    answer = why(merge(scribe.folder), 0, 0)
    assert told(answer)[:3] == [
        (0.0, 1.0, "compute", "a", "forward"),
        (1.0, 3.0, "waiting", "a", "given up: not back after 4 s"),
        (4.0, 0.5, "waiting", "a", "for a new attempt"),
    ]
    assert [(one.attempt, one.given_up) for one in answer.attempts] == [(0, "not back after 4 s"), (1, None)]


def test_what_comes_before_its_step_waits_for_the_parameters(scribe: Scribe) -> None:
    scribe.mine("a", 1.0, "started", path=["0:a", "1:b"])
    scribe.task("a", 2.0, "forward", 1.0)
    scribe.mine("b", 2.5, "received", other="a")
    scribe.task("b", 5.0, "forward", 1.0, wait_s=1.0)
    assert told(why(merge(scribe.folder), 0, 0)) == [
        (0.0, 1.0, "compute", "a", "forward"),
        (1.0, 0.5, "transfer", "a", "to b"),
        (1.5, 0.5, "waiting", "b", "for the step's parameters"),
        (2.0, 1.0, "queue", "b", "forward"),
        (3.0, 1.0, "compute", "b", "forward"),
    ]


def test_a_peer_that_woke_later_did_not_compute_after_it_was_given_up(scribe: Scribe) -> None:
    scribe.mine("a", 1.0, "started", path=["0:a", "1:b"])
    scribe.task("a", 2.0, "forward", 1.0)
    reroute: dict[str, Any] = {"stage": 1, "lost": "b", "cause": "lost", "reason": "silent for 4.0 s"}
    scribe.mine("a", 6.0, "rerouted", **reroute, path=["0:a", "2:c"])
    scribe.task("c", 8.0, "forward", 1.0)
    scribe.task("a", 9.0, "backward", 0.5)
    scribe.mine("a", 9.0, "committed", loss=1.0, path=["0:a", "2:c"])
    scribe.task("b", 30.0, "forward", 27.0)
    answer = why(merge(scribe.folder), 0, 0)
    assert [(part.peer, part.detail) for part in answer.slices if part.what == "compute"] == [
        ("a", "forward"),
        ("b", "forward"),
        ("c", "forward"),
        ("a", "backward"),
    ]
    assert (2.0, 3.0, "compute", "b", "forward") in told(answer)
    assert answer.reroutes[0].instead == "2:c"


def test_what_a_close_counts_is_committed_though_its_origins_log_is_not_there(scribe: Scribe) -> None:
    scribe.task("b", 2.0, "forward", 1.0)
    scribe.task("b", 4.0, "backward", 1.0)
    scribe.tell("c", 6.0, "closed", step=0, counted=[[0, 0, "z", ["0:z", "1:b"], 9]], members=["0:z"])
    answer = why(merge(scribe.folder), 0, 0)
    assert (answer.committed, answer.attempt, answer.total_s) == (True, 0, 2.0)
    assert [(work.peer, work.forward_s, work.weight_s) for work in answer.counted] == [
        ("z", None, None),
        ("b", 1.0, None),
    ]


# -- in numbers --------------------------------------------------------------------------------------------


def test_the_summary_counts_what_happened(swarm: SimSwarm, timeline: Timeline) -> None:
    summary = summarise(timeline)
    assert (summary.closed, summary.steps) == (7, 7)
    assert summary.counted == sum(swarm.counted(step) for step in range(7))
    assert summary.committed == len(swarm.of("committed"))
    assert sum(summary.rerouted.values()) == len(swarm.of("rerouted"))
    assert summary.taken_over == len(swarm.of("taken_over"))
    assert (summary.peers, summary.lives) == (7, 8)


def test_each_loss_comes_with_its_recovery(swarm: SimSwarm, timeline: Timeline) -> None:
    peer, origin = summarise(timeline).losses
    assert (peer.peer, peer.stage, peer.told_by) == (LOST, 1, 6)
    assert (origin.peer, origin.stage) == (ORIGIN, 0)
    assert peer.rerouted == len(rerouted(swarm))
    assert peer.silent_s is not None
    last_s = max(t for t, _, _ in swarm.former[0].events.entries)
    assert peer.at_s == pytest.approx(last_s + peer.silent_s)
    indices = {fields["index"] for _, fields in rerouted(swarm)}
    commits = [
        t
        for life in swarm.lives()
        for t, event, fields in life.events.entries
        if event == "committed" and fields["step"] == 1 and fields["index"] in indices
    ]
    assert peer.recovered_s == pytest.approx(max(commits) - peer.at_s)
    assert peer.next_close_s is not None
    assert peer.next_close_s > peer.recovered_s


# -- the trace ---------------------------------------------------------------------------------------------


def test_the_trace_is_what_perfetto_reads(swarm: SimSwarm, timeline: Timeline, tmp_path: Path) -> None:
    with (tmp_path / "trace.json").open("w") as file:
        count = write(timeline, file)
    trace = json.loads((tmp_path / "trace.json").read_text(), parse_constant=pytest.fail)
    events = trace["traceEvents"]
    assert len(events) == count
    slices: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        assert {"ph", "name", "pid", "tid"} <= event.keys()
        assert event["ph"] in "MXisf"
        if event["ph"] != "M":
            assert type(event["ts"]) is int
            assert event["ts"] >= 0
        if event["ph"] == "X":
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        if event["ph"] == "i":
            assert event["s"] in "tpg"
    for spans in slices.values():
        assert spans == sorted(spans)
        for before, after in pairwise(spans):
            assert before[1] <= after[0]
    arrows: dict[int, dict[str, Any]] = defaultdict(dict)
    for event in events:
        if event["ph"] in "sf":
            arrows[event["id"]][event["ph"]] = event
            spans = slices[event["pid"], event["tid"]]
            assert any(begin <= event["ts"] <= end for begin, end in spans)
    assert arrows
    for ends in arrows.values():
        assert ends["s"]["ts"] <= ends["f"]["ts"]
        assert ends["f"]["bp"] == "e"


def test_the_trace_has_a_process_for_each_stage_and_a_thread_for_each_peer(
    swarm: SimSwarm, timeline: Timeline
) -> None:
    events = list(rows(timeline))
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(processes.values()) == ["stage 0", "stage 1", "stage 2"]
    threads = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "thread_name"}
    assert {peer: processes[pid] for peer, pid in threads.items()} == {
        peer.name: f"stage {peer.stage}" for peer in swarm.lives()
    }
    names = Counter(e["name"].partition(" ")[0] for e in events if e["ph"] == "X")
    computed = Counter(fields["kind"] for _, fields in swarm.of("computed"))
    assert names == computed + Counter(averaging=len(swarm.of("averaged")))
    instants = Counter(e["cat"] for e in events if e["ph"] == "i")
    for event in ("lost", "rerouted", "taken_over", "committed", "stepped"):
        assert instants[event] == len(swarm.of(event))


def test_each_hop_of_an_undisturbed_microbatch_has_its_arrow(swarm: SimSwarm, timeline: Timeline) -> None:
    arrows = [e for e in rows(timeline) if e["ph"] == "s"]
    first_commit_of_step_1 = min(
        t
        for life in swarm.lives()
        for t, event, f in life.events.entries
        if event == "started" and f["step"] == 1
    )
    early = [e for e in arrows if e["ts"] < (first_commit_of_step_1 - timeline.entries[0].at_s) * 1e6]
    assert len(early) == swarm.counted(0) * 6  # three hops there, three back


def test_slices_of_a_lying_log_do_not_overlap(scribe: Scribe) -> None:
    for at_s in (2.0, 2.5, 3.0):
        scribe.task("a", at_s, "forward", 2.0)
    spans = [(e["ts"], e["ts"] + e["dur"]) for e in rows(merge(scribe.folder)) if e["ph"] == "X"]
    assert spans == [(0, 2_000_000), (2_000_000, 2_500_000), (2_500_000, 3_000_000)]


# -- clocks ------------------------------------------------------------------------------------------------


def moved(logs: Path, folder: Path, offsets_s: dict[str, float], unix_s: dict[str, float]) -> Path:
    """The same logs as if machines had other clocks: by the first letters of the peer."""
    for path in logs.glob("*.jsonl"):
        machine = path.name[:2]
        lines = []
        for line in path.read_text().splitlines():
            event = json.loads(line)
            true_s = event["t"]
            event["t"] = true_s - offsets_s[machine]
            if event["event"] == "opened":
                event |= {"clock": machine, "unix_s": 1e9 + true_s + unix_s[machine]}
            lines.append(json.dumps(event) + "\n")
        (folder / path.name).write_text("".join(lines))
    return folder


def test_clocks_of_several_machines_are_aligned_by_the_messages_between_them(
    logs: Path, timeline: Timeline, tmp_path: Path
) -> None:
    offsets_s = {"s0": 0.0, "s1": 5000.0, "s2": -123.456}
    wrong_s = {"s0": 0.0, "s1": 3.0, "s2": -2.0}
    aligned = merge(moved(logs, tmp_path, offsets_s, wrong_s))
    assert {clock: a.by for clock, a in aligned.clocks.items()} == {
        "s0": "reference",
        "s1": "messages",
        "s2": "messages",
    }
    for clock, alignment in aligned.clocks.items():
        assert alignment.uncertainty_s is not None
        error_s = abs(alignment.offset_s - offsets_s[clock])
        assert error_s <= alignment.uncertainty_s + 1e-4
        assert error_s < 2e-4
    assert why(aligned, 0, 0).total_s == pytest.approx(why(timeline, 0, 0).total_s, abs=1e-3)


def test_without_messages_unix_time_decides(scribe: Scribe) -> None:
    for peer, zero_s in (("d", 1000.0), ("e", 1500.0)):
        scribe.tell(peer, 10.0, "opened", version=1, unix_s=zero_s + 10.0, clock=f"machine of {peer}")
        scribe.tell(peer, 20.0, "lost", other="x", reason="reset")
    for peer in "abc":
        (scribe.folder / f"{peer}.jsonl").unlink()
    merged = merge(scribe.folder)
    assert [entry.at_s for entry in merged.entries if entry.name == "lost"] == [20.0, 520.0]
    assert {a.by for a in merged.clocks.values()} == {"reference", "unix time"}


# -- files from anyone -------------------------------------------------------------------------------------

GOOD = '{"t":1.0,"peer":"a","event":"lost","other":"b","reason":"reset"}'

HOSTILE = {
    "broken": [
        "{",
        "[1]",
        "null",
        "\x00\x01",
        "[" * 100_000,
        '{"t":NaN,"peer":"a","event":"lost","other":"b","reason":"r"}',
        '{"t":1e400,"peer":"a","event":"lost","other":"b","reason":"r"}',
        '{"t":"1","peer":"a","event":"lost","other":"b","reason":"r"}',
        '{"t":1,"peer":"","event":"lost","other":"b","reason":"r"}',
        '{"t":1,"peer":"' + "a" * 200 + '","event":"lost","other":"b","reason":"r"}',
        '{"t":1,"peer":"a","event":["lost"],"other":"b","reason":"r"}',
        '{"t":' + "9" * 5000 + ',"peer":"a","event":"lost","other":"b","reason":"r"}',
    ],
    "unknown event": ['{"t":1,"peer":"a","event":"abducted","by":"aliens"}'],
    "malformed": [
        '{"t":1,"peer":"a","event":"lost","other":7,"reason":"r"}',
        '{"t":1,"peer":"a","event":"lost","reason":"r"}',
        '{"t":1,"peer":"a","event":"lost","other":"b","reason":"' + "r" * 5000 + '"}',
        '{"t":1,"peer":"a","event":"joined","step":-1}',
        '{"t":1,"peer":"a","event":"joined","step":' + "9" * 30 + "}",
        '{"t":1,"peer":"a","event":"committed","step":0,"index":0,"attempt":0,"loss":NaN,"path":[]}',
        '{"t":1,"peer":"a","event":"started","step":0,"index":0,"attempt":0,"path":["no hop"]}',
        '{"t":1,"peer":"a","event":"opened","version":1,"unix_s":1e300,"clock":"c"}',
    ],
}


@pytest.mark.parametrize(("why_not", "line"), [(k, line) for k, lines in HOSTILE.items() for line in lines])
def test_a_hostile_line_is_passed_over_and_counted(why_not: str, line: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(f"{GOOD}\n{line}\n{GOOD}\n")
    merged = merge(tmp_path)
    assert [entry.name for entry in merged.entries] == ["lost", "lost"]
    assert merged.passed_over == {why_not: 1}


def test_the_end_of_a_killed_writer_and_endless_lines_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "MAX_LINE_BYTES", 100)
    (tmp_path / "a.jsonl").write_bytes(
        b"x" * 1000 + b"\n" + GOOD.encode() + b"\n\xff\xfe\n\n" + GOOD.encode()[:30]
    )
    merged = merge(tmp_path)
    assert len(merged.entries) == 1
    assert merged.passed_over == {"too long": 1, "broken": 2}


def test_a_later_version_is_read_as_far_as_it_is_known(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        '{"t":0,"peer":"a","event":"opened","version":2,"unix_s":1.0,"clock":"c","shape":"round"}\n' + GOOD
    )
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write("\n")
    merged = merge(tmp_path)
    assert len(merged.entries) == 2
    assert merged.passed_over == {"logs of a later version, read as far as known": 1}


def test_only_plain_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "folder.jsonl").mkdir()
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "a.jsonl").write_text(GOOD + "\n")
    assert merge(tmp_path).files == 1


def test_too_much_to_read_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_text(f"{GOOD}\n" * 3)
    monkeypatch.setattr(reader, "MAX_EVENTS", 2)
    with pytest.raises(UserError, match="more than 2 events"):
        merge(tmp_path)
    (tmp_path / "b.jsonl").write_text(GOOD)
    monkeypatch.setattr(reader, "MAX_FILES", 1)
    with pytest.raises(UserError, match="holds 2 logs, more than 1"):
        merge(tmp_path)
