"""Coming in while the others train: admission, the state's download, and catching up.

A newcomer downloads its stage's state of the step that is under way. The step's close admits it: as a
member, if it holds that state by then, else as a *learner*, so that everyone agrees from which step on it
gets every average of its stage, that of the closed step included. It applies the averages that came
meanwhile, and when it has caught up the next close names it a member. No one waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from peer.context import Context
from peer.download import Download
from peer.restore import Recalled, Restoration
from peer.rounds import lineage_after
from peer.worker import TaskKind
from swarm.messages import (
    AverageDone,
    AverageMessage,
    AverageResult,
    JoinRequest,
    Member,
    StateIndex,
    StepClose,
)
from swarm.transport.base import PeerId

ASK_AGAIN_S = 1.0


class Joiner:
    """A newcomer's way in: asks, downloads, catches up; ``on_ready(step, members)`` ends it, and so does
    ``on_missed(reason)``: it was named a member, and cannot do what the others now wait for."""

    def __init__(
        self,
        context: Context,
        *,
        on_ready: Callable[[int, tuple[Member, ...]], None],
        on_missed: Callable[[str], None],
        recalled: Recalled,
        moving: bool = False,
    ) -> None:
        self._context = context
        self._on_ready = on_ready
        self._on_missed = on_missed
        self._recalled = recalled
        self._moving = moving
        """We are a member of another stage meanwhile, which keeps our links."""
        self.contacts: set[PeerId] = set()
        """Members, whose word on decisions is taken."""
        self._closes: dict[int, StepClose] = {}
        """The newest decision that we know of, and those since the step of our state."""
        self._named_once = False
        self._passed_over = False
        """We had asked for it and begun to load, and a close did not name us: from now on we load when one
        does."""
        self._heard_since: int | None = None
        """The newest closed step when others had heard that we want to come in."""
        self.download: Download | None = None
        self.restoration: Restoration | None = None
        self._told = ""
        """Why the stage could not be restored, as the volunteer knows."""
        self._state_step: int | None = None
        """The step whose parameters the backend holds."""
        self._averages: dict[int, dict[str, dict[int, Any]]] = {}
        self._done: dict[int, AverageDone] = {}
        """step -> the word of a replica that it is over."""
        self._loading = False
        self._loads = 0
        """Loads that were begun or given up: what an older one brings is of no use."""
        self._applying = False
        self._bereft = False
        """A replica was lost since the last average came: what it had for us may never come."""
        self._closed = False
        self._largest_image = context.backend.image_bytes()

    def begin(self, contacts: set[PeerId]) -> None:
        self.contacts = set(contacts)
        self._ask()

    def close(self) -> None:
        self._closed = True
        self._drop_download()

    def _drop_download(self) -> None:
        if self.download is not None:
            self.download.close()
            self.download = None
        if self.restoration is not None:
            self.restoration.close()
            self.restoration = None

    def download_of(self, stage: int, step: int) -> Download | None:
        """The download of that state, if there is one."""
        downloads = [self.download] if self.download is not None else []
        if self.restoration is not None:
            downloads += self.restoration.downloads
        return next((one for one in downloads if (one.stage, one.step) == (stage, step)), None)

    @property
    def ready(self) -> bool:
        """Caught up with the newest close that is known, and able to average with all replicas."""
        context = self._context
        apart = any(context.liveness.vouched(peer) for peer in context.replicas(context.stage))
        return not apart and bool(self._closes) and self._state_step == max(self._closes) + 1

    def _ask(self) -> None:
        if self._closed:
            return
        context = self._context
        context.clock.call_later(ASK_AGAIN_S, self._ask)
        if self._heard_since is None and self._closes:  # in answer to the first request
            self._heard_since = max(self._closes)
        self._send_request(self.contacts)
        self._fetch()
        step = self._state_step
        if step is not None and step not in self._closes and self._closes and max(self._closes) > step:
            self._start_over(step)  # a decision was missed, and with it the average
        if self._bereft and step in self._closes and not self._applying and self._never_comes(step):
            self._start_over(step)
        self._catch_up()  # a replica that we could not reach may be back

    def _averagers(self, step: int) -> set[PeerId]:
        """Who averages ``step`` in our stage, as far as we know: one of them may host another stage since."""
        close = self._closes.get(step - 1)
        members = close.members if close is not None else self._context.members
        return {m.peer for m in members if m.stage == self._context.stage and not m.learning}

    def _misses_replica(self, step: int) -> bool:
        return not all(self._context.liveness.alive(peer) for peer in self._averagers(step))

    def _never_comes(self, step: int) -> bool:
        """Has a replica applied the average of ``step``, which we wait for, or is nobody left who could?"""
        context = self._context
        others = set(context.replicas(context.stage)) - {context.me}
        if self._named(step + 1) and all(context.liveness.gone(peer) for peer in others):
            return True
        passed = others & set(context.living(context.stage))
        return any((context.liveness.step_of(peer) or 0) > step for peer in passed)

    def on_link_up(self, peer: PeerId) -> None:
        if peer in self.contacts:
            self._send_request((peer,))

    def on_decided(self, close: StepClose) -> None:
        """A step was closed: we are not in it, a learner of the next, or a member of the next."""
        context = self._context
        if close.epoch > context.epoch:
            context.epoch, context.step = close.epoch, 0
            self._forget_state()
            for known in (self._closes, self._averages, self._done):
                known.clear()
        named = self._place_in(close) is not None
        if not self._closes or close.step > max(self._closes):
            self.contacts = {member.peer for member in close.members} - {context.me}
            if not self._moving:
                context.liveness.watch({m.peer: m.incarnation for m in close.members})
            context.members = close.members
            context.step = max(context.step, close.step + 1)
        elif not named:
            return  # old
        if close.step in self._closes or (self._moving and not named):
            return
        if named and not self._named_once:
            self._named_once = True
            context.events.emit("admitted", step=close.step + 1)
        if not named:
            self._not_named(close)
        self._closes[close.step] = close
        self._fetch()
        self._catch_up()

    def _not_named(self, close: StepClose) -> None:
        """The average of the closed step does not come to us."""
        loading = self._state_step is not None or self.download is not None
        if loading and self._heard_since is not None and close.step > self._heard_since:
            self._passed_over = True
        self._forget_state()
        self._closes = {step: known for step, known in self._closes.items() if step > close.step}

    def _forget_state(self) -> None:
        self._state_step = None
        self._loads += 1
        self._loading = False
        self._drop_download()

    # -- the download --------------------------------------------------------------------------------------

    def _fetch(self) -> None:
        """Begin with the state of the newest step that we know of, or go on with more donors."""
        if self._state_step is not None or self._loading or not self._closes or self._closed:
            return
        context, step = self._context, max(self._closes) + 1
        named, orphaned = self._place_in(self._closes[step - 1]) is not None, self._orphaned(step)
        if not named and (self._passed_over or orphaned):
            return
        if orphaned:
            self._restore(step)
            return
        donors = [peer for peer in context.living(context.stage) if peer != context.me]
        if self.download is None and donors:
            self.download = Download(
                context,
                context.stage,
                step,
                largest=self._largest_image,
                on_image=self._load,
                on_failed=self._failed,
            )
        if self.download is not None:
            self.download.begin(donors)

    def _orphaned(self, step: int) -> bool:
        """Has our stage no replica in ``step``, so that nothing is learned there?"""
        return step - 1 in self._closes and not self._averagers(step)

    def _restore(self, step: int) -> None:
        """We found the stage: the members admit one newcomer to it, and that is us."""
        if self.restoration is not None:
            return
        self._drop_download()

        def done(digest: str) -> None:
            self.restoration = None
            self._state_step = step
            self._context.lineage = lineage_after("restored", digest)
            self._catch_up()

        def failed(reason: str) -> None:
            self.restoration = None
            self._context.events.emit("restore_failed", reason=reason)
            if reason != self._told:
                self._told = reason
                self._context.say(f"stage {self._context.stage} cannot be restored: {reason}")

        self.restoration = Restoration(self._context, step, self._recalled, on_done=done, on_failed=failed)
        self.restoration.begin()

    def _failed(self, reason: str) -> None:
        """Too late for that step: the next look pins another."""
        self._context.events.emit("download_failed", reason=reason)
        self.download = None

    def _load(self, index: StateIndex, image: bytes) -> None:
        self._loading = True
        self._loads += 1
        load = self._loads
        download, self.download = self.download, None
        sources = download.sources if download is not None else {}

        def done(digest: str) -> None:
            if self._loads != load:
                return
            self._loading = False
            self._context.events.emit(
                "loaded", step=index.step, digest=digest, bytes=len(image), sources=sources
            )
            self._state_step = index.step
            self._averages = {step: parts for step, parts in self._averages.items() if step >= index.step}
            self._done = {step: word for step, word in self._done.items() if step >= index.step}
            self._bereft = self._misses_replica(index.step)
            self._context.lineage = index.lineage
            self._catch_up()

        def refused(error: Exception) -> None:
            if self._loads == load:
                self._loading = False
            for peer in sources:
                self._context.strike(peer, f"unusable state: {error}")

        worker, backend = self._context.worker, self._context.backend
        worker.submit(TaskKind.SYNC, (index.step,), lambda: backend.load_image(image), done, refused)

    def on_lost(self, peer: PeerId) -> None:
        step = self._state_step
        self._bereft = self._bereft or (step is not None and peer in self._averagers(step))
        if self.download is not None:
            self.download.on_lost(peer)
        if self.restoration is not None:
            self.restoration.on_lost(peer)

    # -- catching up ---------------------------------------------------------------------------------------

    def on_average(self, sender: PeerId, message: AverageMessage, tensor: Any) -> None:
        """An average of our stage, for us as a learner."""
        context = self._context
        if message.stage != context.stage or sender not in self._averagers(message.step):
            return
        if self._state_step is not None and message.step < self._state_step:
            return  # it is in our parameters already
        if isinstance(message, AverageResult):
            rounds = self._averages.setdefault(message.step, {})
            rounds.setdefault(message.roster, {})[message.part] = (message.parts, tensor)
        elif isinstance(message, AverageDone):
            self._done[message.step] = message
        self._catch_up()

    def _whole(self, step: int) -> list[Any] | None:
        word = self._done.get(step)
        parts = self._averages.get(step, {}).get(word.roster, {}) if word is not None else {}
        if not parts or len(parts) < next(iter(parts.values()))[0]:
            return None
        return [parts[part][1] for part in sorted(parts)]

    def _catch_up(self) -> None:
        step = self._state_step
        if step is None or self._applying or self._closed:
            return
        if step in self._closes and self._orphaned(step):
            self._skip(max(self._closes) + 1)
            return
        if step in self._closes:
            parts = self._whole(step)
            if parts is not None:
                self._apply(step, parts)
            elif max(self._closes) > step + 1 or self._awaited(step):
                self._start_over(step)
            return
        if self._named(step) and self.ready:
            self.close()
            self._on_ready(step, self._closes[step - 1].members)
        elif self.ready:
            self._send_request(self.contacts)

    def _skip(self, newest: int) -> None:
        """No average comes of steps in which the stage had no replica."""
        self._applying = True
        step = self._state_step
        assert step is not None
        while step < newest and step in self._closes and self._orphaned(step):
            step += 1
        target = step

        def done(_: str) -> None:
            self._applying = False
            self._state_step = target
            self._catch_up()

        worker, backend = self._context.worker, self._context.backend
        worker.submit(TaskKind.SYNC, (target,), lambda: backend.skip_to(target), done)

    def _awaited(self, step: int) -> bool:
        """Has a step closed of which we are a member, and whose averaging waits for us, while we miss the
        average of ``step``?"""
        return any(s in self._closes and self._named(s) for s in (step, step + 1))

    def _place_in(self, close: StepClose | None) -> Member | None:
        """What we are in the step after ``close``, in our present life."""
        context = self._context
        own = (context.me, context.stage, context.incarnation)
        members = close.members if close is not None else ()
        return next((m for m in members if (m.peer, m.stage, m.incarnation) == own), None)

    def _named(self, step: int) -> bool:
        """Do the others count on us as a member of ``step``, and not as a learner?"""
        place = self._place_in(self._closes.get(step - 1))
        return place is not None and not place.learning

    def _request(self) -> JoinRequest:
        context = self._context
        return JoinRequest(
            stage=context.stage,
            incarnation=context.incarnation,
            step=max(self._closes) + 1 if self._closes else 0,
            ready=self.ready,
            holds=self._recalled.step,
        )

    def _send_request(self, to: Iterable[PeerId]) -> None:
        request = self._request()
        for peer in sorted(to):
            if self._context.liveness.alive(peer):
                self._context.transport.send(peer, request)

    def _apply(self, step: int, parts: list[Any]) -> None:
        self._applying = True
        context, backend = self._context, self._context.backend
        word = self._done[step]

        def work() -> tuple[str, dict[str, float]]:
            for number, values in enumerate(parts):
                backend.set_average(number, len(parts), values)
            if backend.average_digest() != word.digest:
                raise ValueError("the parts do not hash to the average's digest")
            return backend.update()

        def done(result: tuple[str, dict[str, float]]) -> None:
            self._applying = False
            self._state_step = step + 1
            self._bereft = self._misses_replica(step + 1)
            context.lineage = lineage_after(context.lineage, word.digest)
            self._averages.pop(step, None)
            self._done.pop(step, None)
            context.events.emit("followed", step=step, stage=context.stage, digest=result[0])
            self._catch_up()

        def refused(error: Exception) -> None:
            self._applying = False
            self._start_over(step)

        context.worker.submit(TaskKind.SYNC, (step,), work, done, refused)

    def _start_over(self, step: int) -> None:
        """An average was missed: the state of a newer step is needed."""
        self._context.events.emit("missed_average", step=step)
        self._state_step = None
        if self._named(max(self._closes) + 1):
            self.close()
            self._on_missed(f"this peer has missed the average of step {step}")
            return
        self._closes = {max(self._closes): self._closes[max(self._closes)]}
        self._fetch()
