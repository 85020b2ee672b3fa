"""The commands as a researcher and four volunteers type them, each in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

EXE = Path(sys.executable).with_name("skipswarm")
LOOPBACK = ("--host-maddr", "/ip4/127.0.0.1/tcp/0")
STEPS = 12


class Machine:
    """Starts commands, finds what they leave behind, and ends whatever a failed test forgot."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tag = f"SKIPSWARM_TEST={uuid.uuid4()}"
        name, value = self._tag.split("=")
        self._environment = {**os.environ, name: value, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
        self._started: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [EXE, *arguments],
            cwd=self.folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._started.append(process)
        return process

    def run(self, *arguments: str) -> tuple[int, str, str]:
        process = self.start(*arguments)
        out, err = process.communicate(timeout=120)
        return process.returncode, out, err

    def left_behind(self) -> list[str]:
        """Command lines of living processes that descend from ours, p2pd among them."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if self._tag.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append((entry / "cmdline").read_text().replace("\0", " "))
            except OSError:  # not a process, or it has just ended
                continue
        return found

    def close(self) -> None:
        for process in self._started:
            process.kill()
            process.communicate()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    yield machine
    machine.close()


def until(process: subprocess.Popen[str], start: str) -> str:
    """Read what a process prints up to the line that begins with ``start``."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith(start):
            return line
    raise AssertionError(
        f"ended without {start!r}: {''.join(lines)}{process.stderr and process.stderr.read()}"
    )


def test_create_bootstrap_join_and_status(machine: Machine) -> None:
    code, example, _ = machine.run("create", "--example")
    assert code == 0
    for old, new in (
        ("start_replicas = 2", "start_replicas = 1"),
        ("total_steps = 200", f"total_steps = {STEPS}"),
        ("warmup_steps = 20", "warmup_steps = 4"),
    ):
        assert old in example
        example = example.replace(old, new)
    (machine.folder / "run.toml").write_text(example)
    code, created, _ = machine.run("create", "run.toml", "--json")
    assert code == 0
    run_id = json.loads(created)["run_id"]

    node = machine.start("bootstrap", "run.toml", "--json", *LOOPBACK)
    ready = json.loads(until(node, '{"event": "ready"'))
    assert ready["run_id"] == run_id
    join = ready["join"]
    code, _, _ = machine.run("status", join)
    assert code == 1  # no stage has a replica yet

    volunteers = [machine.start("join", join, "--dir", f"peer{number}", *LOOPBACK) for number in range(4)]
    begun = json.loads(until(node, '{"event": "genesis"'))
    assert sorted(member["stage"] for member in begun["members"]) == [0, 1, 2, 3]
    code, seen, _ = machine.run("status", join, "--json")
    assert code == 0
    status = json.loads(seen)
    assert status["run_id"] == run_id
    assert status["begun"] is True
    assert [stage["replicas"] for stage in status["stages"]] == [1, 1, 1, 1]
    assert status["refused"] == 0

    for volunteer in volunteers:
        out, err = volunteer.communicate(timeout=120)
        assert volunteer.returncode == 0, err
        assert f"the run is finished: {STEPS} steps" in out
    assert node.poll() is None
    node.send_signal(signal.SIGINT)
    node.communicate(timeout=30)
    assert node.returncode == 0
    assert machine.left_behind() == []


def test_ctrl_c_while_waiting_leaves_nothing(machine: Machine) -> None:
    _, example, _ = machine.run("create", "--example")
    (machine.folder / "run.toml").write_text(example)
    machine.run("create", "run.toml")
    node = machine.start("bootstrap", "run.toml", "--json", *LOOPBACK)
    join = json.loads(until(node, '{"event": "ready"'))["join"]
    volunteer = machine.start("join", join, "--dir", "peer", *LOOPBACK)
    until(volunteer, "waiting for the run to begin")
    assert any("p2pd" in line for line in machine.left_behind())  # what the last assertion looks for
    for process in (volunteer, node):
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
        assert process.returncode == 0
    assert machine.left_behind() == []


def test_a_run_that_the_node_does_not_know_is_one_line(machine: Machine) -> None:
    _, example, _ = machine.run("create", "--example")
    (machine.folder / "run.toml").write_text(example)
    machine.run("create", "run.toml")
    node = machine.start("bootstrap", "run.toml", "--json", *LOOPBACK)
    join = json.loads(until(node, '{"event": "ready"'))["join"]
    other = f"skipswarm:{'00' * 32}@{join.partition('@')[2]}"
    code, _, err = machine.run("join", other, "--dir", "peer", *LOOPBACK)
    assert code == 2
    assert err.count("\n") == 1
    assert "unknown run 000000000000" in err
