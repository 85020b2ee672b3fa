"""The file that says who takes part: TOML or CSV, checked, with one line for what is wrong in it."""

from __future__ import annotations

import csv
import io
import json
import tomllib
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, ValidationError, model_validator

from scheduler.errors import SchedulerError
from scheduler.instance import Frozen, PeerName, Stage
from scheduler.simulate.networks import MegabitsPerS, Milliseconds

MAX_FILE_BYTES = 1 << 22
MAX_PEERS = 1000

Positive = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]
Text = Annotated[str, Field(min_length=1, max_length=64)]


class PeerEntry(Frozen):
    """One peer, or ``count`` alike, whose names get numbers."""

    name: PeerName
    count: Annotated[int, Field(ge=1, le=MAX_PEERS)] = 1
    city: Text | None = None
    lat: Annotated[float, Field(ge=-90, le=90)] | None = None
    lon: Annotated[float, Field(ge=-180, le=180)] | None = None
    """Degrees north and east, instead of a city."""
    region: Text | None = None
    """Of the file's ``network``."""
    latency_ms: dict[PeerName, Milliseconds] = Field(default_factory=dict)
    """One way to other peers, and back from them unless they say otherwise; wins over places."""
    device: Text | None = None
    tflops: Positive | None = None
    """Effective, instead of a device."""
    forward_s: Positive | None = None
    backward_s: Positive | None = None
    """Measured, of one microbatch in a stage of mean size, instead of a device. Without ``weight_s`` the
    backward is the whole of it, as plain autograd does it."""
    weight_s: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    loss_s: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    memory_gb: Positive | None = None
    slots: Annotated[int, Field(ge=1, lt=2**20)] | None = None
    """Microbatches that it holds at once, instead of memory; else what the manifest says."""
    up_mbit_s: MegabitsPerS | None = None
    down_mbit_s: MegabitsPerS | None = None
    """Its line; None: the network's, or nothing that holds it up."""
    stage: Stage | None = None
    origin: bool = False
    """The same as ``stage = 0``: every peer of stage 0 draws microbatches."""

    @model_validator(mode="after")
    def _one_way_to_say_it(self) -> Self:
        speeds = [self.device is not None, self.tflops is not None, self.forward_s is not None]
        if (self.forward_s is None) != (self.backward_s is None):
            raise ValueError("forward_s and backward_s go together")
        if sum(speeds) == 0:
            raise ValueError("how fast is it? give device, or tflops, or forward_s and backward_s")
        if self.forward_s is None and (self.weight_s or self.loss_s):
            raise ValueError("weight_s and loss_s go with forward_s and backward_s")
        if (self.lat is None) != (self.lon is None):
            raise ValueError("lat and lon go together")
        if self.origin and self.stage not in (None, 0):
            raise ValueError("an origin hosts stage 0; leave out origin or stage")
        return self

    @property
    def fixed_stage(self) -> int | None:
        return 0 if self.origin else self.stage

    @property
    def names(self) -> tuple[str, ...]:
        if self.count == 1:
            return (self.name,)
        return tuple(f"{self.name}-{number}" for number in range(1, self.count + 1))


class PeersFile(Frozen):
    """Everybody, and the network that their ``region`` is of."""

    network: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    """``gcp12``, ``home`` or a file of that kind; peers then say their ``region``."""
    peers: Annotated[tuple[PeerEntry, ...], Field(min_length=1, max_length=MAX_PEERS)]

    @model_validator(mode="after")
    def _names(self) -> Self:
        names = [name for entry in self.peers for name in entry.names]
        if len(names) > MAX_PEERS:
            raise ValueError(f"{len(names)} peers; at most {MAX_PEERS}")
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"peers: {twice} is listed twice; give each peer a name of its own")
        for entry in self.peers:
            unknown = sorted(entry.latency_ms.keys() - set(names))
            if unknown:
                raise ValueError(f"peers: {entry.name} has a latency to {unknown[0]}, whom nobody lists")
            if entry.region is not None and self.network is None:
                raise ValueError(f"peers: {entry.name} has a region, but the file names no network")
        return self


def load_peers(path: Path) -> PeersFile:
    """Read a file: CSV if it is called so, else TOML. Raises SchedulerError, in one line."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise SchedulerError(
            f"{path}: {error.strerror}; begin with: skipswarm simulate --example > peers.toml"
        ) from None
    if len(data) > MAX_FILE_BYTES:
        raise SchedulerError(f"{path}: longer than {MAX_FILE_BYTES} bytes")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise SchedulerError(f"{path}: not UTF-8 text") from None
    try:
        return parse_csv(text) if path.suffix.lower() == ".csv" else parse_toml(text)
    except SchedulerError as error:
        raise SchedulerError(f"{path}: {error}") from None


def parse_toml(text: str) -> PeersFile:
    """``network = ...`` and ``[[peers]]``. Raises SchedulerError."""
    try:
        table = tomllib.loads(text)
        document = json.dumps(table)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise SchedulerError(f"not TOML: {error}") from None
    except TypeError:
        raise SchedulerError("dates and times have no place here") from None
    return _checked(document)


def parse_csv(text: str) -> PeersFile:
    """A line for each peer, a column for each field; ``latency_ms.NAME`` is the latency to peer NAME, and
    ``network``, in any line, is the file's. Empty cells say nothing. Raises SchedulerError."""
    reader = csv.DictReader(io.StringIO(text), strict=True)
    network: str | None = None
    peers: list[dict[str, Any]] = []
    try:
        for row in reader:
            peer: dict[str, Any] = {}
            for key, cell in row.items():
                if key is None or cell is None:
                    raise SchedulerError(f"line {reader.line_num}: not as many cells as the first line")
                column, value = key.strip(), cell.strip()
                if not value:
                    continue
                if column == "network":
                    if network not in (None, value):
                        raise SchedulerError(f"line {reader.line_num}: a second network")
                    network = value
                elif column.startswith("latency_ms."):
                    other = column.removeprefix("latency_ms.")
                    peer.setdefault("latency_ms", {})[other] = _number(value)
                else:
                    peer[column] = value if column in _TEXTS else _number(value)
            peers.append(peer)
    except csv.Error as error:
        raise SchedulerError(f"line {reader.line_num + 1}: not CSV: {error}") from None
    return _checked(json.dumps({"network": network, "peers": peers}))


_TEXTS = frozenset({"name", "city", "region", "device"})
_FLAGS = {"true": True, "yes": True, "false": False, "no": False}


def _number(value: str) -> int | float | bool | str:
    """What a cell holds, where it is a number or a flag; else itself, for pydantic to complain of."""
    if value.lower() in _FLAGS:
        return _FLAGS[value.lower()]
    for kind in (int, float):
        try:
            number = kind(value)
        except ValueError:
            continue
        return number if abs(number) < 1e18 else value
    return value


def _checked(document: str) -> PeersFile:
    try:
        return PeersFile.model_validate_json(document)
    except ValidationError as error:
        raise _named(error, document) from None


def _named(error: ValidationError, document: str) -> SchedulerError:
    """The first complaint, with the peer's name in the place of its number."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = [str(part) for part in first["loc"]]
    if len(where) > 1 and where[0] == "peers" and where[1].isdigit():
        entry = json.loads(document)["peers"][int(where[1])]
        name = entry.get("name") if isinstance(entry, dict) else None
        where[:2] = [f"peer {name if isinstance(name, str) else int(where[1]) + 1}"]
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing":
        message = "missing"
    elif first["type"] == "extra_forbidden":
        message = f"unknown; there are: {', '.join(PeerEntry.model_fields)}"
    return SchedulerError(": ".join([" ".join(where), message]) if where else message)
