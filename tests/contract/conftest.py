from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio
import uvloop

from tests.contract.harness import Libp2pHarness, MemoryHarness


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The daemon's loop."""
    return {"uvloop": uvloop.new_event_loop}


@pytest_asyncio.fixture(params=[MemoryHarness, Libp2pHarness], ids=["memory", "libp2p"])
async def harness(request: pytest.FixtureRequest) -> AsyncIterator[MemoryHarness | Libp2pHarness]:
    made = request.param()
    yield made
    await made.close()


@pytest_asyncio.fixture
async def libp2p() -> AsyncIterator[Libp2pHarness]:
    made = Libp2pHarness()
    yield made
    await made.close()
