"""Scheduling problems for the tests: some by hand, some drawn by hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

from scheduler.instance import Instance, Link, PeerSpec


def demo_instance(microbatches: int = 6, **changes: object) -> Instance:
    """4 stages with 2 replicas each, path length 3, two origins: the demo's swarm."""
    peers = tuple(
        PeerSpec(
            peer=f"p{i}",
            stage=i // 2,
            forward_s=0.010,
            backward_s=0.010,
            weight_s=0.010,
            loss_s=0.005,
            memory_slots=4,
            up_bytes_per_s=1e8,
            down_bytes_per_s=1e8,
        )
        for i in range(8)
    )
    fields: dict[str, object] = {
        "stages": 4,
        "path_length": 3,
        "peers": peers,
        "microbatches": {"p0": microbatches, "p1": microbatches},
        "activation_bytes": 1 << 18,
        "default_latency_s": 0.001,
    }
    return Instance.model_validate({**fields, **changes})


_seconds = st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.76, 3.0])
_rates = st.sampled_from([50.0, 100.0, 300.0, 1e15])


@st.composite
def instances(draw: st.DrawFn, *, cut_links: bool = False) -> Instance:
    """Up to 5 stages (some of them dead), up to 3 replicas, uneven peers and links."""
    stages = draw(st.integers(1, 5))
    sizes = [draw(st.integers(1 if stage == 0 else 0, 3)) for stage in range(stages)]
    peers = tuple(
        PeerSpec(
            peer=f"s{stage}r{i}",
            stage=stage,
            forward_s=draw(_seconds),
            backward_s=draw(_seconds),
            weight_s=draw(_seconds),
            loss_s=draw(_seconds),
            memory_slots=draw(st.integers(1, 3)),
            up_bytes_per_s=draw(_rates),
            down_bytes_per_s=draw(_rates),
        )
        for stage, size in enumerate(sizes)
        for i in range(size)
    )
    names = [spec.peer for spec in peers]
    pairs = draw(st.sets(st.tuples(st.sampled_from(names), st.sampled_from(names)), max_size=12))
    rates = st.sampled_from([0.0, 40.0, 200.0]) if cut_links else st.sampled_from([40.0, 200.0])
    return Instance(
        stages=stages,
        path_length=draw(st.integers(1, stages)),
        peers=peers,
        microbatches={f"s0r{i}": draw(st.integers(0, 4)) for i in range(sizes[0])},
        activation_bytes=100,
        default_latency_s=draw(_seconds),
        links=tuple(Link(a, b, draw(_seconds), draw(rates)) for a, b in sorted(pairs) if a != b),
        gradient_bytes=draw(st.sampled_from([(), (400,) * stages])),
    )
