"""What every transport does, simulated or real."""

from __future__ import annotations

import pytest
import torch

from swarm import wire
from swarm.wire import WireError
from tests.contract.harness import Bulk, Libp2pHarness, MemoryHarness, Node, Note

Harness = MemoryHarness | Libp2pHarness
pytestmark = pytest.mark.asyncio


async def pair(harness: Harness) -> tuple[Node, Node]:
    a, b = await harness.node(), await harness.node()
    await harness.introduce(a, b)
    return a, b


async def linked(harness: Harness) -> tuple[Node, Node]:
    a, b = await pair(harness)
    a.transport.connect(b.id)
    await harness.until(lambda: a.recorder.count("up") == b.recorder.count("up") == 1)
    return a, b


async def test_what_is_sent_during_the_dial_is_delivered_in_order(harness: Harness) -> None:
    a, b = await pair(harness)
    for number in range(100):
        a.say(b.id, number)
    await harness.until(lambda: len(b.recorder.messages) == 100)
    assert b.recorder.numbers() == list(range(100))
    assert {sender for sender, _, _ in b.recorder.messages} == {a.id}
    await harness.until(lambda: a.recorder.count("up") == 1)
    assert a.transport.links() == {b.id}
    assert b.transport.links() == {a.id}
    assert b.recorder.events == [("up", a.id)]


async def test_one_link_serves_both_directions(harness: Harness) -> None:
    a, b = await linked(harness)
    b.recorder.on_each = lambda sender, message, tensor: b.say(sender, message.number + 1)
    for number in range(0, 100, 2):
        a.say(b.id, number)
    await harness.until(lambda: len(a.recorder.messages) == 50)
    assert a.recorder.numbers() == list(range(1, 101, 2))
    assert a.recorder.events == [("up", b.id)]
    assert b.recorder.events == [("up", a.id)]


async def test_control_messages_do_not_wait_behind_tensors(harness: Harness) -> None:
    a, b = await linked(harness)
    bulk = torch.zeros(1 << 24, dtype=torch.uint8)
    for number in range(6):
        a.give(b.id, bulk, number)
    a.say(b.id, 7)
    await harness.until(lambda: len(b.recorder.messages) == 7)
    order = [message.kind for _, message, _ in b.recorder.messages]
    assert order.index("test_note") < 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
async def test_tensors_arrive_bit_for_bit(harness: Harness, dtype: torch.dtype) -> None:
    a, b = await linked(harness)
    generator = torch.Generator().manual_seed(5)
    sent = [torch.empty(3, 0, dtype=dtype)]
    for size in (1, 1000, 65_537, 262_144, 1_000_003):
        noise = torch.randint(0, 256, (size * dtype.itemsize,), dtype=torch.uint8, generator=generator)
        sent.append(noise.view(dtype))
    for number, tensor in enumerate(sent):
        a.give(b.id, tensor, number)
    await harness.until(lambda: len(b.recorder.messages) == len(sent))
    for sender, message, received in b.recorder.messages:
        assert isinstance(message, Bulk)
        tensor = sent[message.number]
        assert sender == a.id
        assert message == Bulk(number=message.number, tensor=wire.spec_of(tensor))
        assert received.dtype == dtype
        assert received.shape == tensor.shape
        assert wire.tensor_bytes(received).tobytes() == wire.tensor_bytes(tensor).tobytes()
    assert len(b.recorder.admitted) == len(sent)


async def test_tensors_of_any_layout_arrive_equal(harness: Harness) -> None:
    a, b = await linked(harness)
    base = torch.arange(600_000, dtype=torch.float32).reshape(600, 1000)
    layouts = [base.t(), base[:, ::2], base[3], torch.tensor(2.5), base.clone().requires_grad_()]
    for number, tensor in enumerate(layouts):
        a.give(b.id, tensor, number)
    await harness.until(lambda: len(b.recorder.messages) == len(layouts))
    for _, message, received in b.recorder.messages:
        assert isinstance(message, Bulk)
        assert torch.equal(received, layouts[message.number])


async def test_many_tensors_both_ways_at_once(harness: Harness) -> None:
    a, b = await linked(harness)
    generator = torch.Generator().manual_seed(3)
    sizes = torch.randint(0, 400_000, (60,), generator=generator).tolist()
    for number, size in enumerate(sizes):
        a.give(b.id, torch.full((size,), number, dtype=torch.float32), number)
        b.give(a.id, torch.full((size,), -number, dtype=torch.float32), number)
    await harness.until(lambda: len(a.recorder.messages) == len(b.recorder.messages) == 60)
    for node, sign in ((b, 1), (a, -1)):
        for _, message, tensor in node.recorder.messages:
            assert isinstance(message, Bulk)
            assert tensor.numel() == sizes[message.number]
            assert bool((tensor == sign * message.number).all())


async def test_a_refusal_closes_the_link(harness: Harness) -> None:
    a, b = await linked(harness)
    b.recorder.refuse = lambda sender, message, spec: "not the shape of this step"
    a.give(b.id, torch.zeros(1 << 20))
    await harness.until(lambda: a.recorder.count("lost") == b.recorder.count("lost") == 1)
    await harness.settle()
    assert b.recorder.messages == []
    assert "not the shape of this step" in b.recorder.reasons[0]
    assert a.transport.links() == b.transport.links() == frozenset()
    assert a.recorder.count("lost") == b.recorder.count("lost") == 1


async def test_a_message_to_oneself_needs_no_network(harness: Harness) -> None:
    a = await harness.node()
    tensor = torch.arange(5.0)
    a.say(a.id, 1)
    a.give(a.id, tensor)
    assert a.recorder.messages == [], "delivered from within send"
    await harness.until(lambda: len(a.recorder.messages) == 2)
    assert a.recorder.numbers() == [1]
    assert torch.equal(a.recorder.tensors()[0], tensor)
    assert a.recorder.events == []
    assert a.transport.links() == frozenset()


async def test_a_death_is_told_once(harness: Harness) -> None:
    a, b = await linked(harness)
    c = await harness.node()
    await harness.introduce(a, b, c)
    a.transport.connect(c.id)
    await harness.until(lambda: a.recorder.count("up") == 2)
    await harness.die(b)
    await harness.until(lambda: a.recorder.count("lost") == 1)
    await harness.settle()
    assert a.recorder.events.count(("lost", b.id)) == 1
    assert a.transport.links() == {c.id}
    a.say(c.id, 1)
    await harness.until(lambda: c.recorder.numbers() == [1])


async def test_a_dial_that_fails_is_told(harness: Harness) -> None:
    a, b = await pair(harness)
    nobody = await harness.unknown()
    a.say(nobody, 1)
    await harness.until(lambda: a.recorder.count("lost") == 1)
    assert a.recorder.events == [("lost", nobody)]
    await harness.die(b)
    a.transport.connect(b.id)
    await harness.until(lambda: a.recorder.count("lost") == 2)
    assert a.recorder.events[-1] == ("lost", b.id)
    assert a.transport.links() == frozenset()


async def test_a_peer_that_comes_back_is_linked_again(harness: Harness) -> None:
    a, b = await linked(harness)
    await harness.die(b)
    await harness.until(lambda: a.recorder.count("lost") == 1)
    again = await harness.revive(b)
    await harness.introduce(a, again)
    assert again.id == b.id
    again.say(a.id, 1)
    await harness.until(lambda: a.recorder.numbers() == [1])
    a.say(b.id, 2)
    await harness.until(lambda: again.recorder.numbers() == [2])
    assert b.recorder.numbers() == []
    assert [event for event, _ in a.recorder.events] == ["up", "lost", "up"]


async def test_disconnect_is_silent_here_and_a_loss_there(harness: Harness) -> None:
    a, b = await linked(harness)
    a.transport.disconnect(b.id)
    assert a.transport.links() == frozenset()
    await harness.until(lambda: b.recorder.count("lost") == 1)
    await harness.settle()
    assert a.recorder.count("lost") == 0
    assert b.transport.links() == frozenset()
    b.say(a.id, 3)
    await harness.until(lambda: a.recorder.numbers() == [3])
    a.transport.disconnect("12D3KooWBtg3aaRMjxwedh83aGiUkwSxDwUZkzuJcfaqUmo7R3pq")


async def test_disconnect_during_the_dial_is_silent(harness: Harness) -> None:
    a, b = await pair(harness)
    a.say(b.id, 1)
    a.transport.disconnect(b.id)
    await harness.settle()
    assert a.recorder.events == []
    assert a.transport.links() == frozenset()
    assert b.recorder.messages == []


async def test_both_dial_at_once(harness: Harness) -> None:
    a, b = await pair(harness)
    for number in range(20):
        a.say(b.id, number)
        b.say(a.id, number)
        a.give(b.id, torch.full((100_000,), number))
        b.give(a.id, torch.full((100_000,), number))
    await harness.until(lambda: len(a.recorder.messages) == len(b.recorder.messages) == 40)
    for node in (a, b):
        assert node.recorder.numbers() == list(range(20))
        assert node.recorder.count("up") == 1
    await harness.settle()
    a.transport.disconnect(b.id)
    await harness.until(lambda: b.recorder.count("lost") == 1)
    await harness.settle()
    assert a.recorder.count("lost") == 0
    assert b.recorder.count("lost") == 1
    assert a.transport.links() == b.transport.links() == frozenset()


async def test_connect_twice_makes_one_link(harness: Harness) -> None:
    a, b = await linked(harness)
    a.transport.connect(b.id)
    b.transport.connect(a.id)
    await harness.settle()
    assert a.recorder.events == [("up", b.id)]
    assert b.recorder.events == [("up", a.id)]


async def test_close_is_silent_here_and_a_loss_there(harness: Harness) -> None:
    a, b = await linked(harness)
    await a.transport.close()
    await harness.until(lambda: b.recorder.count("lost") == 1)
    assert a.recorder.count("lost") == 0
    assert a.transport.links() == frozenset()
    a.transport.send(b.id, Note(number=1))
    await harness.settle()
    assert b.recorder.messages == []
    await a.transport.close()


async def test_a_message_that_nobody_could_accept_is_refused_at_once(harness: Harness) -> None:
    a, b = await pair(harness)
    with_spec = Bulk(number=0, tensor=wire.spec_of(torch.zeros(3)))
    with pytest.raises(WireError):
        a.transport.send(b.id, with_spec)
    with pytest.raises(WireError):
        a.transport.send(b.id, Note(number=1), torch.zeros(3))
    with pytest.raises(WireError):
        a.transport.send(b.id, with_spec, torch.zeros(4))
