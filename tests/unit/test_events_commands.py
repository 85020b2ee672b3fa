"""``skipswarm events``: answers for people and for scripts, one line for every mistake."""

from __future__ import annotations

import json
from configparser import ConfigParser
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from bootstrap.simulation.swarm import SimSwarm
from swarm import cli
from swarm.timeline import commands, read
from tests.unit.test_cli import Shell
from tests.unit.test_cli import shell as shell

ROOT = Path(__file__).resolve().parents[2]
LOST = "s1r0"


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands as ``setup.cfg`` lists them, whether or not they were installed since."""
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    listed = config["options.entry_points"][cli.COMMANDS].split("\n")
    pairs = [line.split(" = ") for line in listed if line]
    monkeypatch.setattr(
        cli, "entry_points", lambda group: [EntryPoint(name, value, group) for name, value in pairs]
    )


@pytest.fixture
def logs(shell: Shell) -> SimSwarm:
    """A swarm that lost a peer; its logs in ``logs``."""
    swarm = SimSwarm((2, 2, 2))
    swarm.when("forward", lambda sender, to, _: to == LOST and not swarm.kill(LOST), step=1)
    assert swarm.run_to(3)
    folder = shell.folder / "logs"
    folder.mkdir()
    swarm.save_logs(folder)
    return swarm


@pytest.mark.parametrize("command", ["merge", "why", "summary", "schema"])
def test_every_command_has_help_with_an_example(command: str, shell: Shell) -> None:
    assert f"\n  {command} " in shell("events", "--help").out
    shown = shell("events", command, "--help")
    assert shown.code == 0
    assert f"Example:\n    skipswarm events {command}" in shown.out


def test_why_tells_people_and_scripts_the_same(logs: SimSwarm, shell: Shell) -> None:
    by, fields = next((by, f) for by, f in logs.of("rerouted") if f["lost"] == LOST)
    about = ("logs", "--step", "1", "--index", str(fields["index"]))
    shown = shell("events", "why", *about)
    assert shown.code == 0
    assert f"{by} put s1r1 in the place of {LOST} (stage 1) because it was lost: " in shown.out
    assert "stage 1 s1r1: forward 0.010, backward 0.012, weights 0.008 s" in shown.out
    answer = json.loads(shell("events", "why", *about, "--json").out)
    assert answer["committed"] is True
    assert [(r["by"], r["lost"], r["cause"], r["instead"]) for r in answer["reroutes"]] == [
        (by, LOST, "lost", "1:s1r1")
    ]


def test_summary_tells_people_and_scripts_the_same(logs: SimSwarm, shell: Shell) -> None:
    shown = shell("events", "summary", "logs")
    assert "6 logs of 6 peers in 6 lives" in shown.out
    assert f"stage 1 {LOST}" in shown.out
    summary = json.loads(shell("events", "summary", "logs", "--json").out)
    assert [loss["peer"] for loss in summary["losses"]] == [LOST]
    assert sum(summary["rerouted"].values()) == len(logs.of("rerouted"))


def test_merge_writes_a_trace(logs: SimSwarm, shell: Shell) -> None:
    assert " -> logs/trace.json (" in shell("events", "merge", "logs").out
    assert shell("events", "merge", "logs", "--out", "other.json").code == 0
    traces = [json.loads((shell.folder / name).read_text()) for name in ("logs/trace.json", "other.json")]
    assert traces[0] == traces[1]
    assert {e["name"] for e in traces[0]["traceEvents"]} >= {f"lost {LOST}", f"rerouted {LOST}", "committed"}


def test_the_schema_is_the_page_in_docs(shell: Shell) -> None:
    assert shell("events", "schema").out == (ROOT / "docs" / "events.md").read_text()


def test_long_reading_says_how_far_it_is(
    logs: SimSwarm, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shell("events", "summary", "logs").err == ""
    monkeypatch.setattr(commands, "SILENT_S", 0.0)
    monkeypatch.setattr(read, "LINES_A_REPORT", 10)
    shown = shell("events", "summary", "logs", "--json")
    assert "0 of 6 logs read, 9 events\n" in shown.err
    json.loads(shown.out)


def test_chosen_steps_are_read_alone(logs: SimSwarm, shell: Shell) -> None:
    every = json.loads(shell("events", "summary", "logs", "--json").out)
    some = json.loads(shell("events", "summary", "logs", "--json", "--from-step", "1", "--to-step", "1").out)
    assert (every["closed"], some["closed"]) == (3, 1)
    assert some["counted"] == logs.counted(1)
    assert some["losses"][0]["peer"] == LOST
    later = json.loads(shell("events", "summary", "logs", "--json", "--from-step", "1").out)
    assert later["closed"] == 2


def test_mistakes_are_one_line(logs: SimSwarm, shell: Shell) -> None:
    (shell.folder / "empty").mkdir()
    said = shell.one_line
    assert said("events", "summary", "nowhere").startswith("nowhere does not exist")
    assert said("events", "summary", "empty").startswith("empty holds no event log")
    (shell.folder / "empty" / "a.jsonl").write_text("nonsense\n")
    assert said("events", "summary", "empty").startswith("empty holds no event;")
    assert said("events", "why", "logs", "--step", "9", "--index", "0").startswith(
        "no log names microbatch 0"
    )
    assert said("events", "merge", "logs", "--out", "no/where.json").endswith(
        "choose another file with --out"
    )
