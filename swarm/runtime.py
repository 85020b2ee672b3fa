"""The one way into asyncio: uvloop, and signals that ask first."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable

import uvloop


def run(main: Callable[[asyncio.Event], Awaitable[int]]) -> int:
    """Run ``main(stop)`` on uvloop and return its exit code.

    The first SIGINT or SIGTERM sets ``stop``; a second one ends the process at once (code 130).
    """

    async def supervised() -> int:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()

        def on_signal() -> None:
            if stop.is_set():
                os._exit(128 + signal.SIGINT)
            stop.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal)
        return await main(stop)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(supervised())
