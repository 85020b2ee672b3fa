"""Imports point one way: bootstrap -> peer -> scheduler, swarm."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("swarm", "scheduler", "peer", "bootstrap")
ALLOWED = {
    "swarm": {"swarm"},
    "scheduler": {"scheduler"},
    "peer": {"peer", "scheduler", "swarm"},
    "bootstrap": set(PACKAGES),
}
SCHEDULER_LIBRARIES = {"numpy", "numba", "msgpack", "pydantic"}


def imported(source: str, module: str, *, is_package: bool = False) -> set[str]:
    """Full names of the modules that ``source`` imports anywhere, also in functions and for types alone."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".")
                package = package[: len(package) - node.level + is_package]
                base = ".".join([*package, base]).rstrip(".")
            found.update(f"{base}.{alias.name}" for alias in node.names)
        elif (
            isinstance(node, ast.Call)
            and (getattr(node.func, "id", "") or getattr(node.func, "attr", ""))
            in ("__import__", "import_module")
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            found.add(str(node.args[0].value))
    return found


def forbidden(package: str, names: set[str]) -> set[str]:
    """Those of the imported ``names`` that ``package`` may not import."""
    bad = set()
    for name in names:
        top = name.partition(".")[0]
        if top in PACKAGES:
            if top not in ALLOWED[package]:
                bad.add(name)
        elif package == "scheduler" and top not in SCHEDULER_LIBRARIES and top not in sys.stdlib_module_names:
            bad.add(name)
    return bad


def modules() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    parts = path.relative_to(ROOT).with_suffix("").parts
    is_package = parts[-1] == "__init__"
    module = ".".join(parts[:-1] if is_package else parts)
    assert forbidden(parts[0], imported(path.read_text(), module, is_package=is_package)) == set()


def test_every_package_is_looked_at() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in modules()} == set(PACKAGES)


@pytest.mark.parametrize(
    ("package", "source"),
    [
        ("swarm", "import scheduler.plan"),
        ("swarm", "def f():\n    from peer import daemon"),
        ("swarm", "from importlib import import_module\nimport_module('bootstrap.local')"),
        ("scheduler", "from swarm.clock import Clock"),
        ("scheduler", "import torch"),
        ("scheduler", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import hivemind.p2p"),
        ("scheduler", "from ..swarm import clock"),
        ("peer", "import bootstrap"),
    ],
)
def test_a_wrong_import_is_found(package: str, source: str) -> None:
    assert forbidden(package, imported(source, f"{package}.module"))


def test_right_imports_pass() -> None:
    assert not forbidden("scheduler", imported("import heapq, numpy\nfrom . import plan", "scheduler.paths"))
    assert not forbidden("peer", imported("from swarm import clock\nimport torch", "peer.daemon"))
