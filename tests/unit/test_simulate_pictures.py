"""The critical path of a simulated step, and its pictures: nothing of the step is left out."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from scheduler_cases import demo_instance, instances

from bootstrap.gantt import draw
from bootstrap.simulated_trace import write_trace
from scheduler.instance import Instance
from scheduler.paths import search
from scheduler.simulate.chart import Chart, chart, colour
from scheduler.simulate.critical import critical_path
from scheduler.simulate.estimate import Solved
from scheduler.simulate.page import page, round_times
from scheduler.timeline import Simulator


def solved_of(instance: Instance) -> Solved:
    plan = search(instance, seed=0)
    timeline = Simulator(instance).timeline(plan.paths)
    return Solved(instance, plan, timeline, critical_path(timeline, plan.paths))


def chart_of(solved: Solved) -> Chart:
    return chart(solved.instance, solved.plan.paths, solved.timeline, solved.critical)


DEMO = solved_of(demo_instance(gradient_bytes=(10_000_000,) * 4))


# -- the critical path -------------------------------------------------------------------------------------


@given(instances())
@settings(max_examples=150, deadline=None)
def test_the_critical_path_is_a_chain_as_long_as_the_step(instance: Instance) -> None:
    solved = solved_of(instance)
    rows = set(solved.timeline.rows)
    if not rows:
        assert solved.critical == ()
        return
    assert solved.critical[0].start_s == 0.0
    assert solved.critical[-1].end_s == solved.timeline.makespan_s
    for before, after in pairwise(solved.critical):
        assert before.end_s == pytest.approx(after.start_s, abs=1e-6)
        assert after.kind == "A" or after.peer == before.target
    for segment in solved.critical:
        if segment.kind == "T":
            # No tensor and no word of a commit comes faster than light.
            a, b = (instance.index[peer] for peer in (segment.peer, segment.target))
            assert segment.end_s - segment.start_s >= instance.latency_s[a, b] - 1e-9
        else:
            assert segment[:2] == (segment.kind, segment.target)
            assert (segment.kind, segment.peer, segment.microbatch) in {row_key(row) for row in rows}
    total_s = sum(segment.end_s - segment.start_s for segment in solved.critical)
    assert total_s == pytest.approx(solved.timeline.makespan_s)


def row_key(row: object) -> tuple[str, str, int]:
    return row.kind, row.peer, row.microbatch  # type: ignore[attr-defined]


def test_the_critical_path_of_one_microbatch_is_its_way() -> None:
    instance = demo_instance().model_copy(update={"microbatches": {"p0": 1}})
    solved = solved_of(instance)
    origin, first, last = solved.plan.paths[0]
    kinds = [(segment.kind, segment.peer) for segment in solved.critical]
    assert kinds[:7] == [
        ("F", origin), ("T", origin), ("F", first), ("T", first), ("F", last), ("T", last), ("L", origin),
    ]  # fmt: skip
    assert kinds[7:12] == [("T", origin), ("B", last), ("T", last), ("B", first), ("T", first)]
    assert kinds[12] == ("B", origin)
    assert kinds[-1][0] == "W"


# -- the chart ---------------------------------------------------------------------------------------------


def test_the_chart_has_all_rows_ways_and_skips() -> None:
    found = chart_of(DEMO)
    shown = Counter((bar.kind, found.lanes[bar.lane].peer, bar.microbatch, bar.start_s) for bar in found.bars)
    assert shown == Counter((r.kind, r.peer, r.microbatch, r.start_s) for r in DEMO.timeline.rows)
    assert [lane.stage for lane in found.lanes] == [0, 0, 1, 1, 2, 2, 3, 3]
    for path, lanes in zip(DEMO.plan.paths, found.visits, strict=True):
        assert [found.lanes[n].peer for n in lanes if n is not None] == list(path)
        assert lanes.count(None) == 1
    assert len(found.ways) == sum(2 * len(path) for path in DEMO.plan.paths)
    assert all(way.end_s > way.start_s for way in found.ways)
    marked = [bar for bar in found.bars if bar.critical]
    assert len(marked) + sum(way.critical for way in found.ways) >= len(
        [s for s in DEMO.critical if s.kind != "W"]
    ) - sum(a.kind == "T" and b.kind == "W" for a, b in pairwise(DEMO.critical))


def test_a_long_averaging_takes_a_part_of_the_axis_only() -> None:
    slow = chart_of(solved_of(demo_instance(gradient_bytes=(10**11,) * 4)))
    assert slow.makespan_s > 100 * slow.computed_s
    assert slow.x(slow.computed_s) == slow.computed_s
    assert slow.x(slow.makespan_s) == pytest.approx(1.15 * slow.computed_s)
    without = chart_of(solved_of(demo_instance()))
    assert without.squeeze == 1
    assert without.x(without.makespan_s) == without.makespan_s


def test_colours_tell_stages_replicas_and_kinds_apart() -> None:
    colours = [colour(stage, replica, kind) for stage in range(12) for replica in (0, 1) for kind in "FBW"]
    assert len(set(colours)) == len(colours)
    assert all(re.fullmatch("#[0-9a-f]{6}", each) for each in colours)


def test_times_on_the_axis_are_round() -> None:
    assert round_times(0) == [0.0]
    assert round_times(7.85)[:3] == [0.0, 1.0, 2.0]
    for until_s in (0.003, 0.999, 1.0, 42.0, 31_000.0):
        times = round_times(until_s)
        assert 6 <= len(times) <= 16
        assert times[-1] < until_s


# -- files -------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_the_page_has_a_bar_with_a_tip_for_each_row_and_needs_nothing_else() -> None:
    text = page(chart_of(DEMO), title="<a> & b", subtitle="c")
    seen = Page(text).found
    tips = Counter(
        str(attrs["data-t"]).partition(" (")[0]
        for tag, attrs in seen
        if tag == "rect" and " s)" in str(attrs.get("data-t"))
    )
    assert tips.total() == len(DEMO.timeline.rows)
    first = DEMO.timeline.rows[0]
    assert f"forward of microbatch 0\n{first.peer}, stage 0\n0.000 to 0.010 s" in tips
    skips = [attrs for tag, attrs in seen if "skips stage" in str(attrs.get("data-t"))]
    assert len(skips) == len(DEMO.plan.paths)
    assert [attrs for _, attrs in seen if "crit" in str(attrs.get("class")).split()]
    assert "&lt;a&gt; &amp; b" in text
    assert "prefers-color-scheme:dark" in text
    for attrs in (attrs for _, attrs in seen):
        assert not {"src", "href"} & set(attrs)
    assert "http" not in text.replace("http://www.w3.org", "")
    assert "@import" not in text


def test_an_svg_and_a_png_are_drawn(tmp_path: Path) -> None:
    found = chart_of(DEMO)
    for name in ("step.svg", "again.svg", "step.png"):
        draw(found, tmp_path / name, title="a step", subtitle="of eight peers")
    svg = (tmp_path / "step.svg").read_text()
    words = [
        "".join(element.itertext()) for element in ElementTree.fromstring(svg).iter() if "text" in element.tag
    ]
    for word in (*(f"p{i}" for i in range(8)), "a step", "critical path", "stage 3", "weight gradient"):
        assert word in words
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    strip = re.compile("<dc:date>.*?</dc:date>")
    assert strip.sub("", svg) == strip.sub("", (tmp_path / "again.svg").read_text())


def test_a_trace_holds_every_task_and_the_arrows_between(tmp_path: Path) -> None:
    count = write_trace(DEMO, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert len(events) == count
    slices = [event for event in events if event["ph"] == "X"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    kinds = {"F": "forward", "B": "backward", "W": "weight", "L": "loss"}
    told = Counter((e["name"], names[e["pid"], e["tid"]], e["ts"], e["ts"] + e["dur"]) for e in slices)
    assert told == Counter(
        (
            f"{kinds[row.kind]} {row.microbatch}" if row.kind != "A" else "averaging 0",
            row.peer,
            round(row.start_s * 1e6),
            round(row.end_s * 1e6),
        )
        for row in DEMO.timeline.rows
    )
    by_thread: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in slices:
        by_thread.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["dur"]))
    for spans in by_thread.values():
        for (ts, dur), (after, _) in pairwise(sorted(spans)):
            assert ts + dur <= after
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert len(starts) == len(chart_of(DEMO).ways)
    assert all(starts[number]["ts"] < ends[number]["ts"] for number in starts)
    # Nothing waits longer than since the step began, and the first of each origin not at all.
    waits = {(e["name"], names[e["pid"], e["tid"]]): e["args"].get("queued_ms") for e in slices}
    assert waits["forward 0", DEMO.plan.paths[0][0]] == 0
    assert all(0 <= wait / 1e3 < DEMO.timeline.makespan_s for wait in waits.values() if wait is not None)


def test_nothing_is_drawn_with_until_it_is_wanted() -> None:
    code = (
        "import sys; import bootstrap.simulate_commands, bootstrap.gantt, scheduler.simulate.page; "
        "print(sorted({'matplotlib', 'torch', 'hivemind'} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "[]\n"
