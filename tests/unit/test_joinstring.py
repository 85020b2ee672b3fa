"""The join string: there and back, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.identity import Identity
from swarm.joinstring import JoinString, JoinStringError

RUN = "0f" * 32
ONE = f"/ip4/127.0.0.1/tcp/4001/p2p/{Identity(b'a' * 32).peer_id}"
TWO = f"/dns4/seed.example.org/udp/4001/quic-v1/p2p/{Identity(b'b' * 32).peer_id}"


def test_there_and_back() -> None:
    join = JoinString(RUN, (ONE, TWO))
    assert str(join) == f"skipswarm:{RUN}@{ONE},{TWO}"
    assert JoinString.parse(f"  {join}\n") == join


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "looks like skipswarm:"),
        (RUN, "looks like skipswarm:"),
        (f"hivemind:{RUN}@{ONE}", "looks like skipswarm:"),
        (f"skipswarm:{RUN[:-1]}@{ONE}", "64 hexadecimal digits"),
        (f"skipswarm:{RUN.upper()}@{ONE}", "64 hexadecimal digits"),
        (f"skipswarm:{RUN}@", "not a multiaddr"),
        (f"skipswarm:{RUN}@{ONE},", "not a multiaddr"),
        (f"skipswarm:{RUN}@/ip4/127.0.0.1/tcp/4001", "not a multiaddr"),
        (f"skipswarm:{RUN}@/ip4/127.0.0.1/tcp/4001/p2p/QmYwAPJzv5CZsnA", "not an Ed25519 peer id"),
        (f"skipswarm:{RUN}@" + ",".join([ONE] * 33), "1 to 32 addresses"),
        ("skipswarm:" * 1000, "at most 8192"),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(JoinStringError, match=message):
        JoinString.parse(text)


@given(st.text(max_size=300))
def test_random_text_gives_only_the_error(text: str) -> None:
    with pytest.raises(JoinStringError):
        JoinString.parse(text)
    with pytest.raises(JoinStringError):
        JoinString.parse(f"skipswarm:{RUN}@{text}")
