"""The transport over libp2p: long-lived binary streams of hivemind's p2pd."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from typing import Any

import torch
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError

from swarm import wire
from swarm.clock import Clock
from swarm.messages import Message, TensorSpec
from swarm.transport.base import PeerId, TransferWatch, TransportHandler
from swarm.transport.link import Hello, Limits, Link, Session, Welcome, model_frame
from swarm.transport.neighbours import Arrival, Neighbour, PeerStats
from swarm.transport.p2phost import HostError, P2PHost
from swarm.transport.stream import Stream
from swarm.wire import FrameKind, WireError

logger = logging.getLogger(__name__)

PROTOCOL = f"/skipswarm/{wire.PROTOCOL_VERSION}"
_MAX_ADDRESSES = 16
_TICK_S = 1.0
_GONE_S = 2.0


class Libp2pTransport:
    """``Transport`` over ``host``'s streams; ``await open()`` before use.

    One link of a control stream and ``data_streams`` tensor streams joins each pair of neighbours; if both
    dialled at once there are two, and each side sends on the one that was up first. When one of them breaks,
    all are dropped, so that a loss is always told, once, for everything that was on its way.
    """

    def __init__(
        self,
        host: P2PHost,
        clock: Clock,
        *,
        run_id: str,
        data_streams: int = 4,
        limits: Limits | None = None,
    ) -> None:
        self._host = host
        self._clock = clock
        self._run_id = run_id
        self._data_streams = data_streams
        self._limits = limits or Limits()
        self._instance = secrets.token_bytes(8)
        self._loop = asyncio.get_running_loop()
        self._peers: dict[PeerId, Neighbour] = {}
        self._generations = itertools.count()
        self.arrivals: dict[Stream, Arrival] = {}
        self._handler: TransportHandler | None = None
        self._watch: TransferWatch | None = None
        self._closed = False
        limits = self._limits
        deadlines = (limits.hello_timeout_s, limits.header_timeout_s, limits.transfer_timeout_s)
        self._tick_s = min(_TICK_S, *(deadline / 4 for deadline in deadlines))
        self._timer = clock.call_later(self._tick_s, self._tick)

    async def open(self) -> None:
        """Register with p2pd: from now on others can reach us."""
        self._host.on_restart(self._register)
        await self._register(self._host.p2p)

    async def _register(self, p2p: P2P) -> None:
        if not self._closed:
            await p2p.add_binary_stream_handler(PROTOCOL, self._stream_came)

    # The Transport protocol

    @property
    def peer_id(self) -> PeerId:
        return self._host.peer_id

    def start(self, handler: TransportHandler) -> None:
        self._handler = handler

    def learn(self, peer: PeerId, addresses: tuple[str, ...]) -> None:
        known = self._peer(peer)
        known.addresses = tuple(dict.fromkeys((*addresses, *known.addresses)))[:_MAX_ADDRESSES]

    def send(self, to: PeerId, message: Message, tensor: torch.Tensor | None = None) -> None:
        """See ``Transport.send``. Raises ``WireError`` for a message that no peer could accept: too large, or
        a tensor that is not what ``message.tensor`` says."""
        limits = self._limits
        header, payload = wire.encode(message, tensor, limits.max_header_bytes, limits.max_frame_bytes)
        if self._closed:
            return
        if to == self.peer_id:
            self._loop.call_soon(self.deliver, to, message, tensor)
            return
        peer = self._peer(to)
        peer.stats.messages_sent += 1
        if peer.current is not None:
            if not peer.current.send(header, payload):
                self._loop.call_soon(peer.current.fail, "too much waits to be sent")
            return
        peer.queued_bytes += len(header)
        peer.queue.append((header, payload))
        if self._overfull(peer):
            self._forget_queue(peer)
            self._loop.call_soon(self._report_lost, peer, "too much waits to be sent")
            return
        self._dial(peer)

    def connect(self, peer: PeerId) -> None:
        if peer != self.peer_id and not self._closed:
            known = self._peer(peer)
            if known.current is None:
                self._dial(known)

    def disconnect(self, peer: PeerId) -> None:
        known = self._peers.get(peer)
        if known is not None:
            if known.dial is not None:
                known.dial.cancel()
                known.dial = None
            known.awaited = False
            self._forget_queue(known)
            for link in list(known.links):
                self._discard(known, link)
                link.close("disconnected")
            known.generation = next(self._generations)

    def reset(self, peer: PeerId) -> None:
        """Break the links to a peer as a network does, both sides are told. For emulation."""
        for link in list(self._peers[peer].links) if peer in self._peers else ():
            link.fail("reset")

    def links(self) -> frozenset[PeerId]:
        return frozenset(name for name, peer in self._peers.items() if peer.current is not None)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._timer.cancel()
        dials = [peer.dial for peer in self._peers.values() if peer.dial is not None]
        for name in list(self._peers):
            self.disconnect(name)
        for stream in list(self.arrivals):
            stream.close()
        self.arrivals.clear()
        await asyncio.gather(*dials, return_exceptions=True)
        try:
            await asyncio.wait_for(self._host.p2p.remove_binary_stream_handler(PROTOCOL), _GONE_S)
        except (P2PDaemonError, OSError, asyncio.IncompleteReadError, KeyError):
            logger.debug("p2pd was gone before the transport", exc_info=True)

    def stats(self) -> dict[PeerId, PeerStats]:
        """Bytes and messages to and from each peer; bytes of links that are up count as they go."""
        result = {}
        for name, peer in self._peers.items():
            streams = [stream for link in peer.links for stream in link.streams.values()]
            result[name] = PeerStats(
                peer.stats.bytes_sent + sum(stream.bytes_sent for stream in streams),
                peer.stats.bytes_received + sum(stream.bytes_received for stream in streams),
                peer.stats.messages_sent,
                peer.stats.messages_received,
            )
        return result

    def watch(self, watch: TransferWatch) -> None:
        """Tell ``watch`` what becomes of large tensors from now on."""
        self._watch = watch

    # What links tell us

    def transfer_sent(self, peer: PeerId, size: int) -> None:
        if self._watch is not None:
            self._watch.sent(peer, size)

    def transfer_taken(self, peer: PeerId, size: int) -> None:
        if self._watch is not None:
            self._watch.taken(peer, size)

    def deliver(self, peer: PeerId, message: Message, tensor: Any) -> None:
        if self._closed or self._handler is None:
            return
        known = self._peers.get(peer)
        if known is not None:
            known.stats.messages_received += 1
        try:
            self._handler.on_message(peer, message, tensor)
        except Exception as error:
            self._report_bug(f"on_message({message.kind})", error)

    def admit(self, peer: PeerId, message: Message, spec: TensorSpec) -> str | None:
        if self._closed or self._handler is None:
            return "closed"
        try:
            return self._handler.admit(peer, message, spec)
        except Exception as error:
            self._report_bug("admit", error)
            return "internal error"

    def link_up(self, link: Link) -> None:
        peer = self._peer(link.peer)
        session = link.session
        assert session is not None
        old = peer.session if peer.current is not None else None
        if old is not None and old != session:
            if old.instance == session.instance and session.generation < old.generation:
                self._discard(peer, link)
                link.close("from before the last loss")
                return
            self._drop_links(peer, "reconnected", but=link)
            self._report_lost(peer, "it has dropped our link and dialled anew")
        peer.session = session
        if peer.current is None:
            peer.current = link
            peer.awaited = False
            self._flush(peer, link)
            if self._handler is not None:
                self._call("on_link_up", peer.name)

    def link_lost(self, link: Link, reason: str) -> None:
        peer = self._peer(link.peer)
        self._discard(peer, link)
        if link.up:
            self._drop_links(peer, reason)
            peer.generation = next(self._generations)
            self._report_lost(peer, reason)
        else:
            self._unreached(peer, reason)

    # Dialling

    def _dial(self, peer: Neighbour) -> None:
        peer.awaited = True
        if peer.dial is None:
            peer.dial = self._loop.create_task(self._dial_peer(peer))

    async def _dial_peer(self, peer: Neighbour) -> None:
        link = Link(
            self,
            peer.name,
            secrets.token_bytes(16),
            self._data_streams,
            self._limits,
            self._clock,
            dialled=True,
        )
        reason = "no answer"
        try:
            await asyncio.wait_for(self._open_link(peer, link), self._limits.dial_timeout_s)
        except TimeoutError:
            pass
        except (HostError, WireError, P2PDaemonError, OSError, ValueError, EOFError) as error:
            reason = " ".join(str(error).split())[:150] or type(error).__name__
        finally:
            if peer.dial is asyncio.current_task():
                peer.dial = None
            if not link.up and not link.closed:
                self._discard(peer, link)
                link.close("given up")
        if not link.up:
            self._unreached(peer, reason)

    def _unreached(self, peer: Neighbour, reason: str) -> None:
        """A link did not come up. What waits for it is lost, unless another may still: the other side dials
        too, and may be the only one that can."""
        if not peer.awaited or peer.dial is not None or peer.links or self._closed:
            self._forget_stranger(peer)
            return
        peer.awaited = False
        self._forget_queue(peer)
        self._report_lost(peer, f"cannot be reached: {reason}")

    async def _open_link(self, peer: Neighbour, link: Link) -> None:
        """Open every stream, and wait until the other side has answered on each."""
        peer_id = PeerID.from_base58(peer.name)
        await self._host.dial(peer.name, peer.addresses)
        answered: asyncio.Future[None] = self._loop.create_future()
        link.when_settled(answered)
        peer.links.append(link)
        session = Session(instance=self._instance, generation=peer.generation)
        p2p = self._host.p2p

        async def open_stream(index: int) -> None:
            info, reader, writer = await p2p.call_binary_stream_handler(peer_id, PROTOCOL)
            stream = Stream(link, self._clock, reader, writer)
            if link.closed or info.peer_id != peer_id:
                stream.close()
                raise WireError(link.lost_reason or "another peer answered")
            hello = Hello(
                run_id=self._run_id,
                session=session,
                link=link.link_id,
                stream=index,
                data_streams=link.data_streams,
            )
            link.add(index, stream)
            stream.begin()
            stream.write(model_frame(FrameKind.HELLO, hello))

        await asyncio.gather(*(open_stream(index) for index in range(link.data_streams + 1)))
        await answered

    # Being dialled

    async def _stream_came(
        self, info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        peer = str(info.peer_id)
        arrival = Arrival(self, peer, self._clock.now())
        stream = Stream(arrival, self._clock, reader, writer)
        waiting = sum(1 for other in self.arrivals.values() if other.peer == peer)
        most = self._limits.max_waiting_streams
        if self._closed or waiting >= most // 4 or len(self.arrivals) >= most:
            stream.close()
            return
        self.arrivals[stream] = arrival
        stream.begin()

    def hello_came(self, stream: Stream, arrival: Arrival, hello: Hello) -> None:
        """A stream says which link it belongs to; the last one of a link brings it up."""
        if hello.run_id != self._run_id:
            raise WireError("this peer is in another run")
        peer = self._peer(arrival.peer)
        link = next((each for each in peer.links if each.link_id == hello.link and not each.dialled), None)
        if link is None:
            if len(peer.links) >= self._limits.max_links_per_peer:
                raise WireError("too many links")
            link = Link(
                self, peer.name, hello.link, hello.data_streams, self._limits, self._clock, dialled=False
            )
            peer.links.append(link)
        if hello.data_streams != link.data_streams:
            raise WireError("the hellos of one link differ")
        link.add(hello.stream, stream)
        del self.arrivals[stream]
        if link.complete():
            welcome = Welcome(session=Session(instance=self._instance, generation=peer.generation))
            for each in link.streams.values():
                each.write(model_frame(FrameKind.WELCOME, welcome))
            link.set_up(hello.session)

    # Housekeeping

    def _peer(self, name: PeerId) -> Neighbour:
        peer = self._peers.get(name)
        if peer is None:
            peer = self._peers[name] = Neighbour(name, next(self._generations))
        return peer

    def _overfull(self, peer: Neighbour) -> bool:
        limits = self._limits
        return peer.queued_bytes > limits.max_queued_bytes or len(peer.queue) > limits.max_queued_tensors

    def _forget_queue(self, peer: Neighbour) -> None:
        peer.queue.clear()
        peer.queued_bytes = 0

    def _flush(self, peer: Neighbour, link: Link) -> None:
        for header, payload in peer.queue:
            link.send(header, payload)
        self._forget_queue(peer)

    def _discard(self, peer: Neighbour, link: Link) -> None:
        """Take a link out of the books."""
        if link in peer.links:
            peer.links.remove(link)
            for stream in link.streams.values():
                peer.stats.bytes_sent += stream.bytes_sent
                peer.stats.bytes_received += stream.bytes_received
        if peer.current is link:
            peer.current = None
            if self._watch is not None:
                self._watch.lost(peer.name)

    def _drop_links(self, peer: Neighbour, reason: str, but: Link | None = None) -> None:
        """Close all links to a peer that are up, but one, without a report."""
        for link in list(peer.links):
            if link.up and link is not but:
                self._discard(peer, link)
                link.close(reason)

    def _report_lost(self, peer: Neighbour, reason: str) -> None:
        if not self._closed:
            logger.debug("link to %s lost: %s", peer.name, reason)
            self._call("on_link_lost", peer.name, reason)
        self._forget_stranger(peer)

    def _forget_stranger(self, peer: Neighbour) -> None:
        """Strangers may come by the thousand: keep no record of those that nobody told us about."""
        if not (peer.addresses or peer.links or peer.dial or peer.queue):
            self._peers.pop(peer.name, None)

    def _call(self, name: str, *args: Any) -> None:
        if self._handler is None:
            return
        try:
            getattr(self._handler, name)(*args)
        except Exception as error:
            self._report_bug(name, error)

    def _report_bug(self, where: str, error: Exception) -> None:
        """A handler's exception is our own bug: it is shown, and must not take the link with it."""
        self._loop.call_exception_handler({"message": f"exception in {where}", "exception": error})

    def _tick(self) -> None:
        """End what has waited too long: streams without a hello, links with half a frame."""
        now = self._clock.now()
        for stream, arrival in list(self.arrivals.items()):
            if now - arrival.since > self._limits.hello_timeout_s:
                self.arrivals.pop(stream, None)
                stream.close(wire.bye_frame("no hello"))
        for peer in list(self._peers.values()):
            for link in list(peer.links):
                reason = link.overdue(now)
                if reason is not None:
                    link.fail(reason)
        self._timer = self._clock.call_later(self._tick_s, self._tick)
