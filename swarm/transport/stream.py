"""One libp2p stream as frames: reads straight into tensors, writes from their memory, in bounded pieces."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol

from swarm.clock import Clock, Timer
from swarm.wire import PREAMBLE_BYTES, Preamble, WireError, unpack_preamble

SLICE_BYTES = 1 << 20
_WRITE_HIGH_BYTES = 1 << 18
_SCRATCH_BYTES = 1 << 14
_FRAMES_A_TURN = 32
LINGER_S = 0.5
"""How long a refused stream's bytes are read and dropped. If the socket closed while more of them came, p2pd
could not write them, would reset the stream, and the farewell would not arrive."""


class StreamOwner(Protocol):
    """Who a stream reports to. A ``WireError`` from the first two ends in ``stream_lost``."""

    max_header_bytes: int

    def frame_came(self, stream: Stream, frame: Preamble, header: bytes) -> memoryview | None:
        """A frame without its payload. The memory for the payload, or None if there is none yet: the stream
        then reads nothing more until a ``retry`` succeeds."""
        ...

    def payload_came(self, stream: Stream, frame: Preamble) -> None:
        """The payload is in the memory that was given for it."""
        ...

    def stream_lost(self, stream: Stream, reason: str, *, ours: bool) -> None:
        """The stream is of no more use; ``ours``: we refuse what came, the other side does not know yet."""
        ...


class Stream(asyncio.BufferedProtocol):
    """Takes over the socket of a stream that hivemind opened."""

    def __init__(
        self,
        owner: StreamOwner,
        clock: Clock,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.owner = owner
        self.partial_since: float | None = None
        """When the first byte of a frame came whose header is not whole yet."""
        self.held_since: float | None = None
        """When a payload came that had to wait for its memory."""
        self.bytes_received = 0
        self.bytes_sent = 0
        self.queued_bytes = 0
        self._clock = clock
        # The socket closes when hivemind's reader and writer are collected.
        self._kept = (reader, writer)
        self._loop = asyncio.get_running_loop()
        self._socket: asyncio.Transport = writer.transport  # type: ignore[assignment]
        self._closed = False
        self._linger: Timer | None = None
        self._going_on = False
        self._paused = False
        self._queue: deque[memoryview] = deque()
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._start = 0
        self._end = 0
        self._frame: Preamble | None = None
        self._held_header = b""
        self._target: memoryview | None = None
        self._filled = 0

    @property
    def queued_pieces(self) -> int:
        return len(self._queue)

    @property
    def held_frame(self) -> Preamble | None:
        """The frame that waits for a ``retry``."""
        return self._frame if self.held_since is not None else None

    def begin(self) -> None:
        """Read from now on, first what hivemind's reader has already taken from the socket."""
        reader, _ = self._kept
        self._socket.pause_reading()
        early = bytes(reader._buffer)  # type: ignore[attr-defined]
        ended = reader.at_eof() or reader._eof  # type: ignore[attr-defined]
        reader._buffer.clear()  # type: ignore[attr-defined]
        self._socket.set_write_buffer_limits(high=_WRITE_HIGH_BYTES)
        self._socket.set_protocol(self)
        if self._socket.is_closing() or (ended and not early):
            self._loop.call_soon(self._lost, "closed by the other side", False)
            return
        if early:
            self._grow(len(early))
            self._scratch[: len(early)] = early
            self.bytes_received += len(early)
            self._end = len(early)
        self._go_on_soon()

    # Reading

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._closed:
            return self._scratch
        if self._target is not None:
            return self._target[self._filled :]
        return self._scratch[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._closed:
            return
        self.bytes_received += nbytes
        if self._target is None:
            self._end += nbytes
            self._parse()
            return
        self._filled += nbytes
        if self._filled == len(self._target):
            self._guarded(self._payload_done)

    def retry(self) -> None:
        """Offer the frame that was held back once more; if it is taken now, reading goes on."""
        self._guarded(self._offer_again)

    def _offer_again(self) -> None:
        if self._closed or self.held_since is None or self._frame is None:
            return
        target = self.owner.frame_came(self, self._frame, self._held_header)
        if target is not None and not self._closed:
            self.held_since, self._held_header = None, b""
            self._receive_into(target)
            self._go_on_soon()

    def _go_on(self) -> None:
        self._going_on = False
        if self._closed:
            return
        if self._target is None:
            self._parse()
        if not self._closed and not self._going_on and self.held_since is None:
            self._socket.resume_reading()

    def _go_on_soon(self) -> None:
        if not self._going_on:
            self._going_on = True
            self._loop.call_soon(self._go_on)

    def _parse(self) -> None:
        self._guarded(self._parse_frames)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except WireError as error:
            self._lost(str(error), True)

    def _parse_frames(self) -> None:
        for _ in range(_FRAMES_A_TURN):
            if self._closed or self._target is not None or self.held_since is not None:
                break
            if not self._next_frame():
                self._make_room()
                return
        else:
            # Many small frames: let the event loop breathe before the next ones.
            self._socket.pause_reading()
            self._go_on_soon()
        if self._start == self._end:
            self._start = self._end = 0

    def _next_frame(self) -> bool:
        """Handle the frame at the front of the scratch memory; False if its header is not whole yet."""
        ready = self._end - self._start
        if self._frame is None:
            if ready < PREAMBLE_BYTES:
                return False
            self._frame = unpack_preamble(self._scratch, self._start, self.owner.max_header_bytes)
        frame = self._frame
        body = self._start + PREAMBLE_BYTES
        if ready < PREAMBLE_BYTES + frame.header_bytes:
            return False
        header = bytes(self._scratch[body : body + frame.header_bytes])
        self._start = body + frame.header_bytes
        self.partial_since = None
        target = self.owner.frame_came(self, frame, header)
        if self._closed:
            return True
        if target is None:
            self.held_since, self._held_header = self._clock.now(), header
            self._socket.pause_reading()
        else:
            self._receive_into(target)
        return True

    def _receive_into(self, target: memoryview) -> None:
        """Point the socket at the payload's memory, after what the scratch memory holds of it."""
        early = min(self._end - self._start, len(target))
        if early:
            target[:early] = self._scratch[self._start : self._start + early]
            self._start += early
        if self._start == self._end:
            self._start = self._end = 0
        self._target, self._filled = target, early
        if early == len(target):
            self._payload_done()

    def _payload_done(self) -> None:
        frame = self._frame
        self._frame = self._target = None
        if frame is not None and frame.parts:
            self.owner.payload_came(self, frame)

    def _make_room(self) -> None:
        """The frame in hand is not whole: move it to the front, and double the memory as it fills."""
        ready = self._end - self._start
        if ready and self.partial_since is None:
            self.partial_since = self._clock.now()
        if self._start:
            self._scratch[:ready] = bytes(self._scratch[self._start : self._end])
            self._start, self._end = 0, ready
        if self._end == len(self._scratch):
            self._grow(2 * len(self._scratch))
        elif ready == 0 and len(self._scratch) > _SCRATCH_BYTES:
            self._scratch = memoryview(bytearray(_SCRATCH_BYTES))

    def _grow(self, size: int) -> None:
        if size >= len(self._scratch):
            larger = memoryview(bytearray(size + 1))
            larger[: self._end] = self._scratch[: self._end]
            self._scratch = larger

    # Writing

    def write(self, *pieces: bytes | memoryview) -> None:
        """Queue pieces; they are sent from their own memory, at most ``SLICE_BYTES`` at a time."""
        if self._closed:
            return
        for piece in pieces:
            if len(piece):
                self._queue.append(memoryview(piece))
                self.queued_bytes += len(piece)
        if not self._paused:
            self._pump()

    def _pump(self) -> None:
        while self._queue and not self._paused:
            piece = self._queue.popleft()
            if len(piece) > SLICE_BYTES:
                self._queue.appendleft(piece[SLICE_BYTES:])
                piece = piece[:SLICE_BYTES]
            self.queued_bytes -= len(piece)
            self.bytes_sent += len(piece)
            self._socket.write(piece)

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._pump()

    # Ending

    def eof_received(self) -> bool:
        self._lost("closed by the other side", False)
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        if self._linger is not None:
            self._linger.cancel()
        self._lost("closed by the other side" if exc is None else f"broke: {exc}"[:200], False)

    def _lost(self, reason: str, ours: bool) -> None:
        if not self._closed:
            self.owner.stream_lost(self, reason, ours=ours)
            self.close()

    def close(self, farewell: bytes = b"") -> None:
        """Close; what is queued is dropped. ``farewell`` goes out if it can at once; the other side then has
        ``LINGER_S`` to close first."""
        if self._closed:
            return
        self._closed = True
        self._queue.clear()
        self.queued_bytes = 0
        self._target = None
        if self._socket.get_write_buffer_size() > 0:
            self._socket.abort()
        elif farewell and not self._socket.is_closing():
            self._socket.write(farewell)
            self._linger = self._clock.call_later(LINGER_S, self._socket.close)
            self._socket.resume_reading()
        else:
            self._socket.close()
