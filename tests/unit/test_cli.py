"""The command line without a network: help, ``create``, and one line for every mistake."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from bootstrap.create import load_signed
from swarm.cli import main
from swarm.identity import Identity
from swarm.manifest import Manifest, SignedManifest


@dataclass
class Result:
    code: int
    out: str
    err: str


class Shell:
    """Runs ``skipswarm`` in this process and in a folder of its own."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.folder = folder
        self._monkeypatch = monkeypatch
        self._capsys = capsys
        monkeypatch.chdir(folder)
        monkeypatch.setenv("COLUMNS", "100")
        monkeypatch.setenv("HIVEMIND_LOGLEVEL", "ERROR")

    def __call__(self, *arguments: str) -> Result:
        self._monkeypatch.setattr(sys, "argv", ["skipswarm", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        output = self._capsys.readouterr()
        code = ended.value.code
        assert isinstance(code, int | None)
        return Result(code or 0, output.out, output.err)

    def one_line(self, *arguments: str) -> str:
        """What a mistake prints."""
        result = self(*arguments)
        assert (result.code, result.out) == (2, "")
        assert result.err.startswith("skipswarm: ")
        assert result.err.count("\n") == 1
        return result.err.removeprefix("skipswarm: ").rstrip()


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(tmp_path, monkeypatch, capsys)


@pytest.fixture
def researcher(shell: Shell) -> Shell:
    """A folder with the example manifest."""
    (shell.folder / "run.toml").write_text(shell("create", "--example").out)
    return shell


@pytest.mark.parametrize("command", ["create", "bootstrap", "join", "status"])
def test_every_command_has_help_with_an_example(command: str, shell: Shell) -> None:
    assert f"\n  {command} " in shell("--help").out
    shown = shell(command, "--help")
    assert shown.code == 0
    assert f"Example:\n    skipswarm {command} " in shown.out


def test_help_imports_neither_torch_nor_hivemind() -> None:
    code = (
        "import sys; from swarm.cli import build; build(); "
        "print(sorted({'torch', 'hivemind'} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "[]\n"


def test_create_signs_what_the_toml_says(researcher: Shell) -> None:
    here = researcher.folder
    made = researcher("create", "run.toml")
    assert made.code == 0
    assert stat.S_IMODE((here / "researcher.key").stat().st_mode) == 0o600
    key = Identity.load(here / "researcher.key")
    manifest = Manifest.from_toml(here / "run.toml", researcher=key.public_key.hex())
    signed = SignedManifest.from_bytes((here / "run.signed").read_bytes())
    assert signed.verify(manifest.run_id) == manifest
    assert f"run id   {manifest.run_id}\n" in made.out
    assert "next     skipswarm bootstrap run.toml\n" in made.out

    again = researcher("create", "run.toml", "--json", "--out", "other.signed")
    assert json.loads(again.out) == {
        "run_id": manifest.run_id,  # the key was kept
        "signed": "other.signed",
        "key": "researcher.key",
        "next": "skipswarm bootstrap other.signed",
    }
    for path in ("run.toml", "run.signed", "other.signed"):
        assert load_signed(here / path).verify() == manifest


def test_mistakes_in_a_manifest_are_one_line_and_write_nothing(researcher: Shell) -> None:
    here = researcher.folder
    toml = (here / "run.toml").read_text()
    for old, new, message in [
        (
            "heads = 4",
            "heads = 3",
            "run.toml: model.heads: must divide model.width (128); correct it and run",
        ),
        ("heads = 4", "heads = = 3", "run.toml: not TOML: Invalid value"),
        ('"kjv"', '"bible"', "run.toml: data.corpus: no 'bible' is shipped; there are: kjv"),
        (
            "seed = 1",
            f'researcher = "{"ab" * 32}"',
            "run.toml: researcher: names abababababab..., but researcher.key",
        ),
    ]:
        (here / "run.toml").write_text(toml.replace(old, new, 1))
        assert researcher.one_line("create", "run.toml").startswith(message)
        assert sorted(path.name for path in here.iterdir()) == ["run.toml"]
    assert "skipswarm create --example" in researcher.one_line("create")
    assert "skipswarm create --example > no.toml" in researcher.one_line("create", "no.toml")


def test_bootstrap_wants_what_was_signed_and_who_signed_it(researcher: Shell) -> None:
    def said(*arguments: str) -> str:
        return researcher.one_line("bootstrap", *arguments)

    here = researcher.folder

    assert said("run.toml") == "run.signed does not exist; make it with: skipswarm create run.toml"
    researcher("create", "run.toml")
    toml = (here / "run.toml").read_text()
    (here / "run.toml").write_text(toml.replace("seed = 1", "seed = 2"))
    assert said("run.toml").startswith("run.toml has changed since it was signed")
    (here / "run.toml").write_text(toml)

    Identity.generate().save(here / "stranger.key")
    assert said("run.toml", "--key", "stranger.key").startswith("stranger.key is not the key that signed")
    assert said("run.toml", "--key", "lost.key").startswith("lost.key does not exist")
    signed = (here / "run.signed").read_text()
    (here / "run.signed").write_text(signed.replace('\\"seed\\":1', '\\"seed\\":3'))
    assert said("run.signed").startswith("run.signed: its signature is not the researcher's; make it again")
    (here / "run.signed").write_text("{}")
    assert said("run.signed").startswith("run.signed: not a signed manifest")
    (here / "run.signed").write_text(signed)
    (here / "run.genesis").write_text("{}")
    assert said("run.toml", "--port", "0") == (
        "run.genesis is not this run's genesis (cannot be read); move it away"
    )


@pytest.mark.parametrize("command", ["join", "status"])
def test_a_bad_join_string_is_one_line(command: str, shell: Shell) -> None:
    assert "looks like skipswarm:<run id>@" in shell.one_line(command, "hello")
