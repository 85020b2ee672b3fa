"""``skipswarm demo``: it trains through a kill, and whatever ends it, no process is left."""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors import safe_open

EXE = Path(sys.executable).with_name("skipswarm")
GONE_S = 15.0
"""After an end without farewell every process is gone in this time, on a busy machine too."""


class Demo:
    """A demo in a process group of its own, as in a terminal, and whatever it has started."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder / "demo"
        name = "SKIPSWARM_TEST"
        value = str(uuid.uuid4())
        self._tag = f"{name}={value}".encode()
        self.process = subprocess.Popen(
            [EXE, "demo", "--dir", self.folder, *arguments],
            cwd=folder,
            env={**os.environ, name: value},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def living(self) -> dict[int, str]:
        """Command lines of the processes that carry our mark, by id."""
        found = {}
        for entry in Path("/proc").iterdir():
            try:
                if self._tag in (entry / "environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
            except OSError:  # not a process, or it has just ended
                continue
        return found

    def until(self, text: str) -> None:
        """Read standard output up to the line that holds ``text``."""
        assert self.process.stdout is not None
        lines = []
        for line in self.process.stdout:
            lines.append(line)
            if text in line:
                return
        assert self.process.stderr is not None
        raise AssertionError(f"ended without {text!r}: {lines}, {self.process.stderr.read()}")

    def terminal_signal(self, number: signal.Signals) -> None:
        """What a key does: the whole foreground process group gets it."""
        os.killpg(self.process.pid, number)

    def end(self) -> tuple[str, str]:
        return self.process.communicate(timeout=120)

    def wait_until_gone(self) -> None:
        """Wait for the processes that there are now; AssertionError if some stay."""
        handles = []
        for pid in self.living():
            try:
                handles.append(os.pidfd_open(pid))
            except ProcessLookupError:
                continue
        try:
            for handle in handles:
                ready, _, _ = select.select([handle], [], [], GONE_S)
                assert ready, f"left behind: {self.living()}"
        finally:
            for handle in handles:
                os.close(handle)
        assert self.living() == {}

    def close(self) -> None:
        """For a test that has failed: end what is left."""
        for pid in self.living():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.communicate()


@pytest.fixture
def demos(tmp_path: Path) -> Iterator[list[Demo]]:
    """Every demo that a test has started; they are ended with it."""
    started: list[Demo] = []
    yield started
    for demo in started:
        demo.close()


def socket_folders(living: dict[int, str]) -> set[Path]:
    """Where the p2pds among these processes have their control sockets."""
    found = re.findall(r"/unix(/tmp/skipswarm-[^/ ]+)/", " ".join(living.values()))
    return {Path(folder) for folder in found}


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def events(folder: Path, name: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "events" / f"{name}.jsonl").read_text().splitlines()]


def test_it_trains_through_a_kill(tmp_path: Path, demos: list[Demo]) -> None:
    demo = Demo(tmp_path, "--steps", "14", "--seed", "3", "--json")
    demos.append(demo)
    out, err = demo.end()
    assert demo.process.returncode == 0, err
    assert demo.living() == {}
    assert "every process is gone" in err
    summary = json.loads(out)
    assert (summary["peers"], summary["steps"], summary["committed"]) == (8, 14, 14 * 6)
    assert summary["tokens"] == 14 * 6 * 4 * 128
    assert summary["validation_loss_first"] == pytest.approx(5.5, abs=0.2)
    assert summary["validation_loss_last"] < 4.5
    assert 0 < summary["first_step_s"] < 120
    # The sample may hold bytes that are no character, so there are at most so many.
    assert 0 < len(summary["sample"]) <= 200

    folder = Path(summary["directory"])
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    config = json.loads((folder / "model" / "config.json").read_text())
    assert (config["architectures"], config["num_hidden_layers"]) == (["LlamaForCausalLM"], 4)
    with safe_open(folder / "model" / "model.safetensors", "pt") as file:
        assert len(list(file.keys())) == 4 * 9 + 3

    kill = summary["kill"]
    assert kill["stage"] in (1, 2, 3)
    assert kill["step"] >= 7
    assert kill["next_step_closed_s"] > 0
    victim = events(folder, kill["peer"])
    assert not any(event["event"] == "finished" for event in victim)
    last = [event for event in events(folder, "p0") if event["event"] == "closed"][-1]
    assert last["step"] == 13
    members = last["members"]
    assert isinstance(members, list)
    assert len(members) == 7
    assert f"{kill['stage']}:{victim[0]['peer']}" not in members


@pytest.mark.parametrize(
    ("moment", "number"),
    [("starting the processes", signal.SIGINT), ("the peers find each other", signal.SIGTERM)],
)
def test_a_signal_during_the_start(
    tmp_path: Path, demos: list[Demo], moment: str, number: signal.Signals
) -> None:
    demo = Demo(tmp_path)
    demos.append(demo)
    demo.until(moment)
    demo.terminal_signal(number)
    out, err = demo.end()
    assert demo.process.returncode == 130
    assert demo.living() == {}
    assert "leaving before the training began" in out
    assert "Traceback" not in out + err


def test_ctrl_c_during_the_training(tmp_path: Path, demos: list[Demo]) -> None:
    demo = Demo(tmp_path)
    demos.append(demo)
    demo.until("step ")
    folders = socket_folders(demo.living())
    assert len(folders) == 1  # or the last assertion looks for nothing
    demo.terminal_signal(signal.SIGINT)
    out, err = demo.end()
    assert demo.process.returncode == 130
    assert demo.living() == {}
    assert "every peer ends its step" in out
    assert "killing" not in out
    assert "stopped; every process is gone" in out
    assert "Traceback" not in out + err
    for peer in range(8):
        assert "leaving at the end of this step" in (demo.folder / f"p{peer}" / "log").read_text()
    assert not any(folder.exists() for folder in folders)


def test_a_second_ctrl_c_ends_it_now(tmp_path: Path, demos: list[Demo]) -> None:
    demo = Demo(tmp_path)
    demos.append(demo)
    demo.until("the peers find each other")
    demo.terminal_signal(signal.SIGINT)
    demo.until("leaving before the training began; Ctrl-C again leaves now")
    demo.terminal_signal(signal.SIGINT)
    demo.end()
    assert demo.process.returncode == 130
    demo.wait_until_gone()


@pytest.mark.parametrize("moment", ["starting the processes", "the peers find each other", "step "])
def test_sigkill_leaves_nothing(tmp_path: Path, demos: list[Demo], moment: str) -> None:
    demo = Demo(tmp_path)
    demos.append(demo)
    demo.until(moment)
    living = demo.living()
    if moment == "step ":
        assert sum("p2pd" in line for line in living.values()) >= 9
        assert sum("forker" in line for line in living.values()) >= 10
    demo.process.kill()
    demo.end()
    demo.wait_until_gone()
    assert not any(folder.exists() for folder in socket_folders(living))


def test_the_forker_takes_everything_with_it(tmp_path: Path, demos: list[Demo]) -> None:
    demo = Demo(tmp_path)
    demos.append(demo)
    demo.until("step ")
    living = demo.living()
    forkers = [pid for pid in living if parent_of(pid) == demo.process.pid]
    assert len(forkers) == 1
    os.kill(forkers[0], signal.SIGKILL)
    _, err = demo.end()
    assert demo.process.returncode == 2
    assert err.count("\n") == 1
    assert "every peer has ended before the last step" in err
    demo.wait_until_gone()
    for folder in socket_folders(living):  # who would have removed it is dead
        shutil.rmtree(folder)


def test_a_folder_that_is_in_use_is_one_line(tmp_path: Path, demos: list[Demo]) -> None:
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "mine").write_text("keep")
    demo = Demo(tmp_path)
    demos.append(demo)
    out, err = demo.end()
    assert (demo.process.returncode, out) == (2, "")
    assert err.count("\n") == 1
    assert "is not empty; give a new folder with --dir" in err
