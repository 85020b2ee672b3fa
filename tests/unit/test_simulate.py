"""``skipswarm simulate``: peers files and what comes of them."""

from __future__ import annotations

import configparser
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from statistics import median

import pytest
import typer
from typer.testing import CliRunner

from bootstrap.create import example_toml
from bootstrap.simulate_commands import simulate, sizes_of
from scheduler.bounds import bounds
from scheduler.errors import SchedulerError
from scheduler.plan import Plan, validate
from scheduler.simulate.build import Swarm
from scheduler.simulate.devices import flops_per_s
from scheduler.simulate.estimate import estimate, solve
from scheduler.simulate.model import ModelSizes
from scheduler.simulate.networks import NetworkProfile
from scheduler.simulate.peers import PeersFile, parse_csv, parse_toml
from scheduler.simulate.places import Place, find_city, great_circle_km, latency_s
from scheduler.timeline import Simulator, makespan
from swarm.errors import UserError
from swarm.manifest import Manifest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "bootstrap" / "examples"
RESEARCHER = "00" * 32
SIZES = sizes_of(Manifest.from_toml(example_toml(), researcher=RESEARCHER))
"""The demo's: four stages of one layer, path length 3."""


def peer_toml(name: str, **fields: object) -> str:
    lines = [f"{key} = {json.dumps(value)}" for key, value in {"name": name, **fields}.items()]
    return "\n".join(["[[peers]]", *lines, ""])


def eight(**fields: object) -> PeersFile:
    """Peers in eight cities."""
    cities = ("Paris", "London", "Berlin", "Madrid", "New York", "Toronto", "Tokyo", "Sydney")
    common = {"forward_s": 0.02, "backward_s": 0.02, "weight_s": 0.02, "up_mbit_s": 100, **fields}
    return parse_toml("\n".join(peer_toml(f"p{i}", city=city, **common) for i, city in enumerate(cities)))


def looks(count: int) -> Callable[[float], Callable[[], float]]:
    """A budget that is used up by so many looks at it, whatever the clock says."""

    def budget(seconds: float) -> Callable[[], float]:
        left = itertools.chain((seconds * (1 - n / count) for n in range(count)), itertools.repeat(0.0))
        return lambda: next(left)

    return budget


# -- places and devices ------------------------------------------------------------------------------------


def test_cities_are_where_they_are() -> None:
    assert great_circle_km(find_city("London"), find_city("Paris")) == pytest.approx(343, abs=5)
    assert great_circle_km(find_city("sao paulo"), find_city("São Paulo")) == 0
    assert find_city("new york") == find_city("New York City")
    assert find_city("London, CA") != find_city("London")
    assert find_city("London, CA").longitude == pytest.approx(-81.2, abs=0.2)
    assert great_circle_km(Place(90, 0), Place(-90, 17)) == pytest.approx(20015, abs=1)
    with pytest.raises(SchedulerError, match="no city 'Atlantis'"):
        find_city("Atlantis")
    with pytest.raises(SchedulerError, match="no city 'Paris' of 100,000 people in JP"):
        find_city("Paris, jp")


def test_latency_by_distance_is_that_of_the_home_profile() -> None:
    home = NetworkProfile.load("home")
    for a, b in (("London", "Paris"), ("Madrid", "Warsaw"), ("London", "Chicago")):
        assert 1e3 * latency_s(find_city(a), find_city(b)) == pytest.approx(
            home.between(a, b).one_way_ms, abs=0.3
        )


def test_the_route_factor_is_about_what_was_measured_between_regions() -> None:
    # Google's places of the regions: the towns of its data centres.
    where = {
        "Australia": Place(-33.87, 151.21),
        "Belgium": Place(50.47, 3.82),
        "Canada": Place(45.50, -73.57),
        "Germany": Place(50.11, 8.68),
        "Iowa": Place(41.26, -95.86),
        "Japan": Place(35.68, 139.69),
        "LA": Place(34.05, -118.24),
        "London": Place(51.51, -0.13),
        "NL": Place(53.44, 6.83),
        "Oregon": Place(45.59, -121.18),
        "Singapore": Place(1.35, 103.82),
        "Taiwan": Place(24.05, 120.52),
    }
    factors = [
        link.one_way_ms / (great_circle_km(where[link.a], where[link.b]) / 200)
        for link in NetworkProfile.load("gcp12").links
    ]
    assert median(factors) == pytest.approx(1.55, abs=0.01)


def test_devices_are_found_however_they_are_written() -> None:
    assert flops_per_s("NVIDIA RTX 4090", "bfloat16") == flops_per_s("rtx4090", "bfloat16")
    assert flops_per_s("RTX 4090", "bfloat16") == pytest.approx(0.4 * 165.2e12)
    assert flops_per_s("RTX 4090", "float32") == pytest.approx(0.4 * 82.6e12)
    with pytest.raises(SchedulerError, match=r"no device 'Abacus' in the table; .* RTX 3060"):
        flops_per_s("Abacus", "float32")


# -- the model ---------------------------------------------------------------------------------------------


def test_sizes_are_the_manifests() -> None:
    manifest = Manifest.from_toml(example_toml(stages="[1, 2, 1]", layers=4), researcher=RESEARCHER)
    sizes = sizes_of(manifest)
    assert [sizes.parameters(s) for s in range(3)] == [manifest.stage_parameters(s) for s in range(3)]
    assert sizes.activation_bytes == 4 * 128 * 128 * 4
    one, two = sizes.work(0), sizes.work(1)
    assert (two.forward, two.backward, two.weight) == (2 * one.forward, 2 * one.backward, 2 * one.weight)
    # 6 FLOPs for each parameter of the matrices and token, attention and norms aside.
    matrices = sizes.parameters(2) - 2 * 128
    assert one.weight == 2 * sizes.tokens * matrices
    assert one.forward + one.backward + one.weight > 6 * sizes.tokens * matrices
    assert sizes.slots_in(1e9, 1) < sizes.slots_in(1e9, 0)
    assert sizes.slots_in(1e6, 1) == 0


# -- peers files -------------------------------------------------------------------------------------------


def test_toml_and_csv_say_the_same() -> None:
    toml = parse_toml(
        'network = "gcp12"\n'
        + peer_toml("a", region="Iowa", tflops=2.5, origin=True, slots=3)
        + peer_toml("b", region="Oregon", device="T4", up_mbit_s=100, count=2)
        + "latency_ms = { a = 12.5 }\n"
    )
    text = (
        "name,network,region,tflops,device,origin,slots,up_mbit_s,count,latency_ms.a\n"
        "a,gcp12,Iowa,2.5,,true,3,,,\n"
        "b,,Oregon,,T4,,,100,2,12.5\n"
    )
    assert parse_csv(text) == toml
    assert toml.peers[1].names == ("b-1", "b-2")
    assert toml.peers[0].fixed_stage == 0


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("peers = 3", "peers: "),
        ("[[peers]]\nname = 'a'\n", "peer a: how fast is it"),
        (peer_toml("a", tflops=-1), "peer a tflops: "),
        (peer_toml("a", tflops="x"), "peer a tflops: "),
        (peer_toml("a", tflops=1, colour="red"), "peer a colour: unknown; there are: name, count"),
        ("[[peers]]\ntflops = 1\n", "peer 1 name: missing"),
        (peer_toml("a b", tflops=1), "peer a b name: "),
        (peer_toml("a", forward_s=1), "forward_s and backward_s go together"),
        (peer_toml("a", tflops=1, loss_s=1), "weight_s and loss_s go with"),
        (peer_toml("a", tflops=1, lat=1), "lat and lon go together"),
        (peer_toml("a", tflops=1, lat=91, lon=0), "peer a lat: "),
        (peer_toml("a", tflops=1, origin=True, stage=2), "an origin hosts stage 0"),
        (peer_toml("a", tflops=1) * 2, "a is listed twice"),
        (peer_toml("a", tflops=1, region="Iowa"), "the file names no network"),
        (peer_toml("a", tflops=1) + "latency_ms = { b = 1 }", "a has a latency to b, whom nobody lists"),
        (peer_toml("a", tflops=1) + "latency_ms = { a = inf }", "latency_ms"),
        ("[[peers]", "not TOML: "),
        ("when = 2026-01-01", "dates and times"),
    ],
)
def test_mistakes_in_a_file_are_one_line(text: str, reason: str) -> None:
    with pytest.raises(SchedulerError) as caught:
        parse_toml(text)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_mistakes_in_csv_are_one_line() -> None:
    for text, reason in (
        ("name,tflops\na,1,2\n", "line 2: not as many cells"),
        ("name,tflops\na\n", "line 2: not as many cells"),
        ('name,tflops\n"a"b,1\n', "line 2: not CSV"),
        ("name,tflops,network\na,1,gcp12\nb,1,home\n", "line 3: a second network"),
        ("name,tflops\na,fast\n", "peer a tflops: "),
        ("", "peers: "),
    ):
        with pytest.raises(SchedulerError, match=reason) as caught:
            parse_csv(text)
        assert "\n" not in str(caught.value)


# -- the problem -------------------------------------------------------------------------------------------


def swarm_of(*peers: str, head: str = "", sizes: ModelSizes = SIZES) -> Swarm:
    return Swarm(parse_toml(head + "\n".join(peers)), sizes)


def test_a_way_is_the_one_that_was_said_else_that_of_the_places() -> None:
    swarm = swarm_of(
        peer_toml("a", tflops=1, region="Iowa", stage=0),
        peer_toml("b", tflops=1, region="Oregon", stage=1) + "latency_ms = { a = 7.0 }\n",
        peer_toml("c", tflops=1, region="Oregon", stage=2),
        peer_toml("d", tflops=1, region="Iowa", stage=3, up_mbit_s=50),
        head='network = "gcp12"\n',
    )
    instance = swarm.instance(swarm.first_stages())
    gcp = NetworkProfile.load("gcp12")
    far = gcp.between("Iowa", "Oregon")
    a, b, c, d = (instance.index[name] for name in "abcd")
    assert instance.latency_s[a, b] == instance.latency_s[b, a] == 0.007
    assert instance.latency_s[a, c] == far.one_way_ms / 1e3
    assert instance.latency_s[a, d] == 0.001
    assert instance.bandwidth_bytes_per_s[a, b] == far.bandwidth_mbit_per_s * 125_000
    assert instance.peers[d].up_bytes_per_s == 50 * 125_000
    assert instance.microbatches == {"a": 3}


@pytest.mark.parametrize(
    ("peers", "head", "reason"),
    [
        ([peer_toml("a", tflops=1), peer_toml("b", tflops=1)], "", "no latency between a and b: give both"),
        ([peer_toml("a", tflops=1, count=2)], "", "no latency between a-1 and a-2"),
        ([peer_toml("a", tflops=1, city="Nowhere at all")], "", "peer a: no city 'Nowhere at all'"),
        ([peer_toml("a", device="Abacus")], "", "peer a: no device 'Abacus'"),
        ([peer_toml("a", tflops=1, stage=4)], "", "peer a: stage 4 of 4; the last is 3"),
        ([peer_toml("a", tflops=1, stage=1)], "", "nobody hosts stage 0"),
        ([peer_toml("a", tflops=1, memory_gb=0.001)], "", "peer a: 0.001 GB hold no microbatch of stage 0"),
        (
            [peer_toml("a", tflops=1, region="Mars")],
            'network = "gcp12"\n',
            "peer a: no region 'Mars' in gcp12",
        ),
        ([peer_toml("a", tflops=1)], 'network = "moon"\n', "moon: No such file or directory; give a file or"),
    ],
)
def test_what_cannot_be_is_told_in_one_line(peers: list[str], head: str, reason: str) -> None:
    def build() -> None:
        swarm = swarm_of(*peers, head=head)
        swarm.instance(swarm.first_stages())

    with pytest.raises(SchedulerError) as caught:
        build()
    assert str(caught.value).startswith(reason)
    assert "\n" not in str(caught.value)


def test_measured_times_win_and_grow_with_the_stage() -> None:
    sizes = SIZES.model_copy(update={"stages": (1, 3)})
    swarm = swarm_of(
        peer_toml("a", device="T4", forward_s=0.5, backward_s=1.0, weight_s=0.25, loss_s=0.125), sizes=sizes
    )
    small, large = (swarm._spec("a", stage) for stage in (0, 1))
    assert (small.forward_s, small.backward_s, small.weight_s, small.loss_s) == (0.25, 0.5, 0.125, 0.125)
    assert (large.forward_s, large.backward_s, large.weight_s) == (0.75, 1.5, 0.375)


def test_peers_without_a_stage_fill_those_most_in_need() -> None:
    swarm = swarm_of(
        *(peer_toml(f"p{i}", tflops=1, city="Paris") for i in range(7)),
        peer_toml("q", tflops=1, city="Rome", stage=2),
    )
    stages = swarm.first_stages()
    assert stages["q"] == 2
    assert sorted(list(stages.values()).count(stage) for stage in range(4)) == [2, 2, 2, 2]


# -- the estimate ------------------------------------------------------------------------------------------


def test_the_estimate_is_what_the_simulator_says() -> None:
    swarm = Swarm(eight(), SIZES)
    solved = solve(swarm, seed=1, seconds=1.0, budget=looks(20))
    found = estimate(solved, SIZES, seed=1)
    instance, plan = solved.instance, solved.plan
    assert validate(plan, instance) is None
    averaging_s = Simulator(instance).averaging_s
    assert found.step_s == makespan(instance, plan.paths)
    assert found.averaging_s == averaging_s > 0
    assert found.bound_s == bounds(instance).best_s + averaging_s <= found.step_s
    assert found.efficiency == found.bound_s / found.step_s
    assert found.tokens == sum(instance.microbatches.values()) * 4 * 128
    assert found.tokens_per_s == pytest.approx(found.tokens / found.step_s)
    assert sum(found.critical_s.values()) == pytest.approx(found.step_s)
    assert sum(peer.visits for peer in found.peers) == sum(map(len, plan.paths))
    assert found.compared[0].name == "full pipeline"
    assert len(found.compared) == 5
    assert all(other.step_s >= found.step_s for other in found.compared)
    again = solve(swarm, seed=1, seconds=1.0, budget=looks(20))
    assert again.plan == plan


def test_the_search_finds_better_places_than_newcomers_take() -> None:
    swarm = Swarm(eight(up_mbit_s=20), SIZES)
    first = swarm.instance(swarm.first_stages())
    solved = solve(swarm, seed=0, seconds=1.0, budget=looks(30))
    assert solved.plan.makespan_s < makespan(first, solve_paths(first))
    assert sorted(spec.stage for spec in solved.instance.peers) == sorted(spec.stage for spec in first.peers)


def solve_paths(instance: object) -> tuple[tuple[str, ...], ...]:
    from scheduler.paths import search

    return search(instance, seed=0).paths  # type: ignore[arg-type]


def test_stages_that_the_file_gives_stay() -> None:
    file = eight()
    fixed = file.model_copy(
        update={
            "peers": tuple(p.model_copy(update={"stage": i % 4}) for i, p in enumerate(file.peers[:6]))
            + file.peers[6:]
        }
    )
    solved = solve(Swarm(fixed, SIZES), seed=0, seconds=1.0, budget=looks(5))
    assert [spec.stage for spec in solved.instance.peers][:6] == [0, 1, 2, 3, 0, 1]


# -- the command -------------------------------------------------------------------------------------------


def run(*arguments: str) -> tuple[int, str, BaseException | None]:
    app = typer.Typer()
    app.command()(simulate)
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "120"})
    return result.exit_code, result.stdout, result.exception


def test_it_is_an_installed_command() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert (
        "simulate = bootstrap.simulate_commands:simulate"
        in setup["options.entry_points"]["skipswarm.commands"]
    )


def test_the_example_is_printed_and_can_be_simulated(tmp_path: Path) -> None:
    code, text, _ = run("--example")
    assert (code, text) == (0, (EXAMPLES / "peers.toml").read_text())
    peers = tmp_path / "peers.toml"
    peers.write_text(text)
    code, shown, error = run(str(peers), "--seconds", "0.05")
    assert (code, error) == (0, None)
    for word in (
        "tokens/s",
        "lower bound",
        "efficiency",
        "bottleneck",
        "averaging",
        "full pipeline",
        "lab-2",
    ):
        assert word in shown


def test_json_holds_the_estimate_and_the_plan(tmp_path: Path) -> None:
    peers = tmp_path / "peers.csv"
    peers.write_text(
        "name,lat,lon,tflops,stage\n" + "".join(f"p{i},{10 * i},0,1,{i % 4}\n" for i in range(8))
    )
    manifest = tmp_path / "run.toml"
    manifest.write_text(example_toml())
    code, shown, error = run(str(peers), "--manifest", str(manifest), "--seconds", "0.05", "--json")
    assert (code, error) == (0, None)
    found = json.loads(shown)
    plan = Plan.from_text(found["plan"])
    assert plan.makespan_s == found["step_s"]
    assert len(plan.paths) == found["microbatches"] == 6
    assert {peer["peer"]: peer["stage"] for peer in found["peers"]} == {f"p{i}": i % 4 for i in range(8)}


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    good = tmp_path / "peers.toml"
    good.write_text((EXAMPLES / "peers.toml").read_text())
    bad = tmp_path / "bad.toml"
    bad.write_text("[[peers]]\nname = 'a'\n")
    for arguments, reason in (
        ((), "no peers given; begin with: skipswarm simulate --example > peers.toml"),
        ((str(tmp_path / "no.toml"),), "no.toml: No such file or directory; begin with: skipswarm simulate"),
        ((str(bad),), "bad.toml: peer a: how fast is it?"),
        ((str(good), "--gantt", "step.gif"), "--gantt step.gif: the name must end in .svg, .png, .html"),
        ((str(good), "--manifest", str(bad)), "bad.toml: "),
        ((str(good), "--seconds", "0", "--trace", str(tmp_path)), "choose another file with --trace"),
        ((str(good), "--seconds", "0", "--gantt", str(tmp_path / "no" / "g.html")), "with --gantt"),
    ):
        code, _, error = run(*arguments)
        assert code == 1
        assert isinstance(error, UserError)
        assert reason in str(error)
        assert "\n" not in str(error)
