"""How long light takes between two places: cities' coordinates, great circles and what fibre makes of them.

``cities.csv`` holds the 6,146 cities of 100,000 people and more of GeoNames (https://www.geonames.org, CC BY
4.0), the largest first.
"""

from __future__ import annotations

import csv
import math
import unicodedata
from functools import cache
from pathlib import Path
from typing import NamedTuple

from scheduler.errors import SchedulerError

CITIES = Path(__file__).parent / "cities.csv"
EARTH_KM = 6371.0
FIBRE_KM_PER_S = 200_000.0
"""Light in fibre: two thirds of its speed in vacuum."""
ROUTE_FACTOR = 1.5
"""How much longer than the great circle the way is. An assumption: between the 66 pairs of the 12 regions in
``profiles/gcp12.json`` the measured latency is 1.55 times the great circle's in the median, a tenth of them
below 1.2 and a tenth above 2.2."""
ACCESS_S = 0.005
"""Of the line at either end; an assumption, as in ``profiles/home.json``."""


class Place(NamedTuple):
    """Degrees north and east."""

    latitude: float
    longitude: float


def great_circle_km(a: Place, b: Place) -> float:
    """The haversine formula, on a sphere."""
    north_a, north_b = math.radians(a.latitude), math.radians(b.latitude)
    half_north, half_east = (north_b - north_a) / 2, math.radians(b.longitude - a.longitude) / 2
    chord = math.sin(half_north) ** 2 + math.cos(north_a) * math.cos(north_b) * math.sin(half_east) ** 2
    return 2 * EARTH_KM * math.asin(min(1.0, math.sqrt(chord)))


def latency_s(a: Place, b: Place) -> float:
    """One way between two homes: both lines, and the fibre between."""
    return 2 * ACCESS_S + ROUTE_FACTOR * great_circle_km(a, b) / FIBRE_KM_PER_S


def find_city(name: str) -> Place:
    """The largest city of this name, or whose name begins with these words; ``"London, CA"`` looks in one
    country (ISO 3166). Case and accents do not matter. Raises SchedulerError if there is none."""
    wanted, _, country = (part.strip() for part in name.partition(","))
    country = country.upper()
    exact, beginnings = _cities()
    for table in (exact, beginnings):
        for land, place in table.get(_folded(wanted), ()):
            if country in ("", land):
                return place
    where = f" in {country}" if country else ""
    raise SchedulerError(f"no city {wanted!r} of 100,000 people{where} is known; give lat and lon instead")


Index = dict[str, list[tuple[str, Place]]]


@cache
def _cities() -> tuple[Index, Index]:
    """(cities by name, cities by the first words of a longer name), the largest first."""
    exact: Index = {}
    beginnings: Index = {}
    with CITIES.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            words = _folded(row["name"]).split()
            found = (row["country"], Place(float(row["latitude"]), float(row["longitude"])))
            exact.setdefault(" ".join(words), []).append(found)
            for count in range(1, len(words)):
                beginnings.setdefault(" ".join(words[:count]), []).append(found)
    return exact, beginnings


def _folded(name: str) -> str:
    """Lower case, without accents, one space between words."""
    plain = unicodedata.normalize("NFKD", name.casefold())
    letters = "".join(c if c.isalnum() else " " for c in plain if not unicodedata.combining(c) and c != "'")
    return " ".join(letters.split())
