"""A WAN on one machine: ``python -m benchmarks.wan --check PROFILE``, or a swarm that trains on it.

Needs root or unprivileged user namespaces, and /dev/net/tun. See docs/wan.md.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from dataclasses import replace

from benchmarks import report
from benchmarks.wan.namespaces import gain_rights
from swarm.errors import UserError


def main() -> None:
    options = _options()
    try:
        gain_rights()  # before anything that starts threads
        figures = _check(options) if options.check else _train(options)
    except UserError as error:
        sys.exit(str(error))
    report.write("wan_check" if options.check else "wan", figures, options.json)


def _options() -> argparse.Namespace:
    made = report.parser(__doc__ or "")
    made.add_argument("--profile", default="gcp12", help="gcp12, home, or a file")
    made.add_argument("--check", metavar="PROFILE", help="measure latencies and rates between pairs, and end")
    made.add_argument("--pairs", type=int, default=10, help="of which --check measures the rate")
    made.add_argument("--compare", action="store_true", help="all policies at 25, 33 and 50 %% skip")
    made.add_argument("--policy", default="plan", help="plan or full_pipeline")
    made.add_argument("--peers", type=int, default=12)
    made.add_argument("--stages", type=int, default=6)
    made.add_argument("--skip", type=float, default=1 / 3, help="share of the stages that a path leaves out")
    made.add_argument("--microbatches", type=int, default=6, help="that each origin starts in a step")
    made.add_argument("--slots", type=int, default=3, help="microbatches that a peer holds at once")
    made.add_argument("--activation-kib", type=int, default=1024)
    made.add_argument("--forward-s", type=float, default=0.2, help="nominal, of a stage")
    made.add_argument("--steps", type=int, default=8, help="to measure, after the warm-up")
    return made.parse_args()


def _check(options: argparse.Namespace) -> dict[str, float]:
    from benchmarks.wan import check
    from benchmarks.wan.profiles import Profile
    from benchmarks.wan.testbed import WanTestbed

    profile = Profile.load(options.check)
    names = [f"host{n}" for n in range(len(profile.regions))]

    async def measure() -> dict[str, float]:
        async with WanTestbed(profile.wan(profile.regions), names, profile.regions) as testbed:
            latencies = check.round_trips(testbed)
            print(check.table(latencies), flush=True)
            pairs = check.spread(testbed, 2 if options.quick else options.pairs)
            rates = [check.tcp_rate(testbed, *pair, 1.0 if options.quick else 4.0) for pair in pairs]
            print(check.table(rates))
        return {
            "pairs": len(latencies),
            "rtt_ratio_most": max(line.ratio for line in latencies),
            "rtt_ratio_least": min(line.ratio for line in latencies),
            "rate_ratio_most": max(line.ratio for line in rates),
            "rate_ratio_least": min(line.ratio for line in rates),
        }

    return asyncio.run(measure())


def _train(options: argparse.Namespace) -> dict[str, float]:
    from benchmarks.wan.compare import compare
    from benchmarks.wan.profiles import Profile
    from benchmarks.wan.training import POLICIES, Training, train

    if options.policy not in POLICIES:
        raise UserError(f"no policy {options.policy}; there are {', '.join(POLICIES)}")
    training = Training(
        POLICIES[options.policy],
        peers=options.peers,
        stages=options.stages,
        skip=options.skip,
        microbatches_per_origin=options.microbatches,
        memory_slots=options.slots,
        activation_bytes=options.activation_kib << 10,
        forward_s=options.forward_s,
        steps=options.steps,
    )
    if options.quick:
        training = replace(training, peers=4, stages=2, skip=0.0, steps=3)
    profile = Profile.load(options.profile)
    return asyncio.run(compare(profile, training) if options.compare else train(training, profile))


if __name__ == "__main__":
    main()
