"""The event simulator, the routes and the moves of the search, compiled by numba.

Everything is compiled, or loaded from numba's cache, when this module is imported: a daemon's event loop is
never held up by a compiler. It is one file because that cache knows a function's own file only: a change of
``play`` in another one would not reach ``anneal``. Peers, stages and microbatches are positions;
``scheduler.timeline`` and ``scheduler.paths`` put names to them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit, types
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

B, L, F, W = 0, 1, 2, 3
"""Kinds of tasks: input gradient, loss, forward, weight gradient."""
_BACK, _FORWARD, _WEIGHT = 0, 1, 2
"""What a peer's tasks wait in: backward work and losses, forwards, weight gradients."""


class Tables(NamedTuple):
    """An instance of n peers and S stages in arrays."""

    task_s: Floats
    """``[n, 4]``: seconds of B, L, F and W."""
    slots: Ints
    """``[n]``"""
    up_s: Floats
    """``[n]``: seconds that a tensor keeps the uplink busy."""
    down_s: Floats
    """``[n]``: and the downlink."""
    latency_s: Floats
    """``[n, n]``"""
    link_s: Floats
    """``[n, n]``: seconds that a tensor keeps the link busy; infinite where there is none."""
    hop_s: Floats
    """``[n, n]``: seconds from row to column for a tensor that nothing holds up."""
    usable: Flags
    """``[n, n]``: may a path step from row to column, and its gradient come back?"""
    gradient_bytes: Floats
    """``[S]``: what the replicas of a stage average, 0 for nothing."""
    own_rate: Floats
    """``[n]``: bytes a second that a peer can send and get at once."""
    rate: Floats
    """``[n, n]``: bytes a second of a link."""
    stage: Ints
    """``[n]``"""
    replicas: Ints
    """``[S, most]``: the peers of each stage, padded with -1."""
    hosts: Ints
    """``[S]``: how many those are."""


class Scratch(NamedTuple):
    """Room for one simulation after the other."""

    arrives_s: Floats
    after: Ints
    head: Ints
    slots: Ints
    free_s: Floats
    up_free_s: Floats
    down_free_s: Floats
    pair_free_s: Floats
    next_s: Floats
    winner: Ints
    phase: Ints
    heap_s: Floats
    heap: Ints
    sent_hop: Ints
    rest_s: Floats
    finish_s: Floats
    """``[m]``: when each microbatch was committed; infinite if it was not."""


def scratch(peers: int, microbatches: int, hops: int) -> Scratch:
    """Room for ``microbatches`` paths of up to ``hops`` peers."""
    width = 2
    while width < peers:
        width *= 2
    nodes = max(1, microbatches * hops)
    m = max(1, microbatches)
    f, i = np.float64, np.int64
    return Scratch(
        arrives_s=np.zeros(nodes, f),
        after=np.zeros(nodes, i),
        head=np.zeros(3 * peers, i),
        slots=np.zeros(peers, i),
        free_s=np.zeros(peers, f),
        up_free_s=np.zeros(peers, f),
        down_free_s=np.zeros(peers, f),
        pair_free_s=np.zeros((peers, peers), f),
        next_s=np.zeros(width, f),
        winner=np.zeros(2 * width, i),
        phase=np.zeros(m, i),
        heap_s=np.zeros(m, f),
        heap=np.zeros(m, i),
        sent_hop=np.zeros(m, i),
        rest_s=np.zeros(m, f),
        finish_s=np.zeros(m, f),
    )


_f1, _f2 = types.float64[::1], types.float64[:, ::1]
_i1, _i2 = types.int64[::1], types.int64[:, ::1]
_b2 = types.boolean[:, ::1]
_TABLES = types.NamedTuple((_f2, _i1, _f1, _f1, _f2, _f2, _f2, _b2, _f1, _f1, _f2, _i1, _i2, _i1), Tables)
_SCRATCH = types.NamedTuple(
    (_f1, _i1, _i1, _i1, _f1, _f1, _f1, _f2, _f1, _i1, _i1, _f1, _i1, _i1, _f1, _f1), Scratch
)


@njit(types.void(_f1, _i1, types.int64, types.float64), cache=True, forceinline=True)
def _set_next(next_s, winner, p, at_s):  # type: ignore[no-untyped-def]
    """Peer p may start something at ``at_s``: play the matches on its way up the winner tree again."""
    next_s[p] = at_s
    i = (p + next_s.shape[0]) >> 1
    while i:
        a, b = winner[2 * i], winner[2 * i + 1]
        won = a if next_s[a] <= next_s[b] else b
        if winner[i] == won and won != p:
            break
        winner[i] = won
        i >>= 1


@njit(
    types.void(_SCRATCH, types.int64, types.int64, types.int64, types.float64), cache=True, forceinline=True
)
def _deliver(room, node, q, waits, at_s):  # type: ignore[no-untyped-def]
    """The input of a task is at peer q from ``at_s`` on."""
    room.after[node] = room.head[3 * q + waits]
    room.head[3 * q + waits] = node
    room.arrives_s[node] = at_s
    if waits != _FORWARD or room.slots[q] > 0:
        starts_s = max(at_s, room.free_s[q])
        if starts_s < room.next_s[q]:
            _set_next(room.next_s, room.winner, q, starts_s)


@njit(types.void(_f1, _i1, types.int64, types.int64, types.float64), cache=True)
def _push(heap_s, heap, size, mb, at_s):  # type: ignore[no-untyped-def]
    i = size
    while i:
        up = (i - 1) >> 1
        if heap_s[up] < at_s or (heap_s[up] == at_s and heap[up] < mb):
            break
        heap_s[i], heap[i] = heap_s[up], heap[up]
        i = up
    heap_s[i], heap[i] = at_s, mb


@njit(types.void(_f1, _i1, types.int64), cache=True)
def _pop(heap_s, heap, size):  # type: ignore[no-untyped-def]
    """Take the first of ``size`` entries out."""
    last_s, last = heap_s[size - 1], heap[size - 1]
    i = 0
    while True:
        child = 2 * i + 1
        if child >= size - 1:
            break
        other = child + 1
        if other < size - 1 and (
            heap_s[other] < heap_s[child] or (heap_s[other] == heap_s[child] and heap[other] < heap[child])
        ):
            child = other
        if last_s < heap_s[child] or (last_s == heap_s[child] and last < heap[child]):
            break
        heap_s[i], heap[i] = heap_s[child], heap[child]
        i = child
    heap_s[i], heap[i] = last_s, last


@njit(types.void(_i2, _i1, _TABLES, _SCRATCH), cache=True)
def _begin(paths, lengths, tables, room):  # type: ignore[no-untyped-def]
    """All origins' forwards wait, and nothing has happened yet."""
    n = tables.slots.shape[0]
    width = room.next_s.shape[0]
    room.head[:] = -1
    room.slots[:] = tables.slots
    room.free_s[:] = 0.0
    room.up_free_s[:] = 0.0
    room.down_free_s[:] = 0.0
    room.next_s[:] = np.inf
    room.phase[:] = 0
    room.finish_s[:] = np.inf
    for p in range(width):
        room.winner[width + p] = p
    for i in range(width - 1, 0, -1):
        room.winner[i] = room.winner[2 * i]
    for mb in range(paths.shape[0]):
        before = paths[mb, 0]
        for hop in range(1, lengths[mb] + 1):
            q = paths[mb, hop] if hop < lengths[mb] else paths[mb, 0]
            room.pair_free_s[before, q] = 0.0
            room.pair_free_s[q, before] = 0.0
            before = q
    for mb in range(paths.shape[0] - 1, -1, -1):
        node = mb * paths.shape[1]
        p = paths[mb, 0]
        room.after[node] = room.head[3 * p + _FORWARD]
        room.head[3 * p + _FORWARD] = node
        room.arrives_s[node] = 0.0
    for p in range(n):
        if room.head[3 * p + _FORWARD] >= 0:
            _set_next(room.next_s, room.winner, p, 0.0)


@njit(
    types.int64(_i2, _i1, _TABLES, types.float64, _SCRATCH, _i2, _f2),
    cache=True,
)
def play(paths, lengths, tables, cutoff_s, room, log, log_s):  # type: ignore[no-untyped-def]
    """Play one step of ``paths`` ``[m, hops]``; returns how many microbatches were committed.

    Fewer than all: they wait for each other's memory slots; -1: the step was given up at ``cutoff_s``. Times
    of commits are in ``room.finish_s``, the end of each peer's last task in ``room.free_s``. If ``log``
    ``[tasks, 3]`` has room, it gets (peer, kind, microbatch) and ``log_s`` ``[tasks, 2]`` the start and end
    of each task.
    """
    _begin(paths, lengths, tables, room)
    hops = paths.shape[1]
    sent, done, logged = 0, 0, 0
    head, after, arrives_s, slots = room.head, room.after, room.arrives_s, room.slots
    while True:
        p = room.winner[1]
        now_s = room.next_s[p]
        if sent and room.heap_s[0] <= now_s:
            # The first byte of a tensor has come to a peer whose downlink takes one after the other.
            mb, at_s = room.heap[0], room.heap_s[0]
            _pop(room.heap_s, room.heap, sent)
            sent -= 1
            hop = room.sent_hop[mb]
            q = paths[mb, hop]
            room.down_free_s[q] = max(at_s, room.down_free_s[q]) + tables.down_s[q]
            waits = _FORWARD if room.phase[mb] == 0 else _BACK
            _deliver(room, mb * hops + hop, q, waits, max(at_s + room.rest_s[mb], room.down_free_s[q]))
            continue
        if now_s == np.inf:
            return done
        if now_s > cutoff_s:
            return -1

        best, best_before, waits = -1, -1, -1
        while best < 0:
            waits += 1
            if waits == _FORWARD and slots[p] == 0:
                continue
            before, node = -1, head[3 * p + waits]
            while node >= 0:
                if arrives_s[node] <= now_s and (best < 0 or node < best):
                    best, best_before = node, before
                before = node
                node = after[node]
        if best_before < 0:
            head[3 * p + waits] = after[best]
        else:
            after[best_before] = after[best]
        mb = best // hops
        hop = best - mb * hops
        last = lengths[mb] - 1
        kind = W
        if waits == _FORWARD:
            kind = F
        elif waits == _BACK:
            kind = L if room.phase[mb] == 1 else B
        end_s = now_s + tables.task_s[p, kind]
        room.free_s[p] = end_s
        if log.shape[0]:
            log[logged, 0], log[logged, 1], log[logged, 2] = p, kind, mb
            log_s[logged, 0], log_s[logged, 1] = now_s, end_s
            logged += 1

        target_hop = -1
        if kind == F:
            slots[p] -= 1
            target_hop = hop + 1
            if hop == last:
                target_hop = 0
                room.phase[mb] = 1
        elif kind == L:
            target_hop = last
            room.phase[mb] = 2
        elif kind == B:
            slots[p] += 1
            target_hop = hop - 1
            if hop == 0:
                room.finish_s[mb] = end_s
                done += 1
                for h in range(last + 1):
                    q = paths[mb, h]
                    if tables.task_s[q, W] > 0:
                        word_s = end_s + (tables.latency_s[p, q] if h else 0.0)
                        _deliver(room, mb * hops + h, q, _WEIGHT, word_s)
        if target_hop >= 0:
            q = paths[mb, target_hop]
            node = mb * hops + target_hop
            waits = _FORWARD if room.phase[mb] == 0 else _BACK
            if q == p:
                _deliver(room, node, q, waits, end_s)
            else:
                link_s, up_s = tables.link_s[p, q], tables.up_s[p]
                leaves_s = max(end_s, room.up_free_s[p])
                room.up_free_s[p] = leaves_s + up_s
                starts_s = max(leaves_s, room.pair_free_s[p, q])
                room.pair_free_s[p, q] = starts_s + link_s
                reaches_s = starts_s + tables.latency_s[p, q]
                if tables.down_s[q] > 0:
                    room.sent_hop[mb] = target_hop
                    room.rest_s[mb] = max(link_s, up_s)
                    _push(room.heap_s, room.heap, sent, mb, reaches_s)
                    sent += 1
                else:
                    _deliver(room, node, q, waits, reaches_s + max(link_s, up_s))

        next_s = np.inf
        for waits in range(3):
            if waits == _FORWARD and slots[p] == 0:
                continue
            node = head[3 * p + waits]
            while node >= 0 and next_s > end_s:
                next_s = min(next_s, max(end_s, arrives_s[node]))
                node = after[node]
        _set_next(room.next_s, room.winner, p, next_s)


@njit(types.float64(_i1, types.float64, _TABLES), cache=True)
def averaging_s(group, size, tables):  # type: ignore[no-untyped-def]
    """Seconds in which the replicas ``group`` of a stage average ``size`` bytes.

    A butterfly: each member sends and gets 2 (n-1)/n of the gradient, and waits twice for the farthest.
    Pairs that cannot reach each other are left out; a member's own rate counts though it reaches nobody.
    """
    n = len(group)
    if n < 2 or size == 0:
        return 0.0
    rate, latency_s = np.inf, 0.0
    for p in group:
        rate = min(rate, tables.own_rate[p])
        for q in group:
            if p != q and tables.usable[p, q]:
                rate = min(rate, tables.rate[p, q])
                latency_s = max(latency_s, tables.latency_s[p, q])
    return 2 * (n - 1) / n * size / rate + 2 * latency_s


class Search(NamedTuple):
    """Paths that a search changes, and what it must keep to. ``stage`` and ``replicas`` change with
    placements."""

    paths: Ints
    """``[m, hops]`` in send order, padded with -1."""
    lengths: Ints
    """``[m]``"""
    stage: Ints
    """``[n]``"""
    replicas: Ints
    hosts: Ints
    visits: Ints
    """``[S]``"""
    spread: Ints
    """``[1]``: by how many visits living stages may differ."""
    best_paths: Ints
    best_lengths: Ints
    best_stage: Ints
    random: NDArray[np.uint64]
    """``[1]``: xorshift state."""
    score: Floats
    """``[4]``: cost now, least makespan, its total, averaging now (seconds)."""


_SEARCH = types.NamedTuple((_i2, _i1, _i1, _i2, _i1, _i1, _i1, _i2, _i1, _i1, types.uint64[::1], _f1), Search)

_REPLICA, _STAGE, _ORIGINS, _EXCHANGE, _EXCHANGE_STAGES, _ORDER, _INSERT, _PLACES = range(8)
_ODDS = np.array(
    [_REPLICA] * 6 + [_STAGE] * 2 + [_ORIGINS] * 3 + [_EXCHANGE] * 8 + [_EXCHANGE_STAGES] * 3
    + [_ORDER] * 6 + [_INSERT] * 4 + [_PLACES] * 2
)  # fmt: skip
_PATHS_ONLY = len(_ODDS) - 2

MEAN_WEIGHT = 0.05
"""What the mean time of commit weighs beside the makespan while the search climbs: most moves leave the
makespan as it is, and this tells which of them make room."""


@njit(types.int64(types.uint64[::1], types.int64), cache=True, forceinline=True)
def _draw(random, n):  # type: ignore[no-untyped-def]
    """One of 0..n-1, n below 2**31 (xorshift64: Marsaglia 2003, Xorshift RNGs)."""
    x = random[0]
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    random[0] = x
    return np.int64(((x >> np.uint64(33)) * np.uint64(n)) >> np.uint64(31))


@njit(types.boolean(_i2, _i1, types.int64, _i1, _b2), cache=True)
def _settle(paths, lengths, i, stage, usable):  # type: ignore[no-untyped-def]
    """Put row i in order of stages; False if it visits a stage twice or has no way."""
    n = lengths[i]
    for a in range(2, n):
        p = paths[i, a]
        b = a
        while b > 1 and stage[paths[i, b - 1]] > stage[p]:
            paths[i, b] = paths[i, b - 1]
            b -= 1
        paths[i, b] = p
    for a in range(n):
        p, q = paths[i, a], paths[i, a + 1 if a + 1 < n else 0]
        if n > 1 and (not usable[p, q] or (a + 1 < n and stage[p] >= stage[q])):
            return False
    return True


@njit(types.void(_SEARCH, types.int64, types.int64), cache=True)
def _trade_places(search, p, q):  # type: ignore[no-untyped-def]
    """Peers p and q host each other's stage, and take each other's place in all paths. Its own inverse."""
    for i in range(search.paths.shape[0]):
        for a in range(search.lengths[i]):
            if search.paths[i, a] == p:
                search.paths[i, a] = q
            elif search.paths[i, a] == q:
                search.paths[i, a] = p
    s, t = search.stage[p], search.stage[q]
    search.stage[p], search.stage[q] = t, s
    for a in range(search.hosts[s]):
        if search.replicas[s, a] == p:
            search.replicas[s, a] = q
            break
    for a in range(search.hosts[t]):
        if search.replicas[t, a] == q:
            search.replicas[t, a] = p
            break


@njit(types.boolean(_SEARCH, _TABLES), cache=True)
def _walkable(search, tables):  # type: ignore[no-untyped-def]
    for i in range(search.paths.shape[0]):
        if not _settle(search.paths, search.lengths, i, search.stage, tables.usable):
            return False
    return True


@njit(types.void(_i2, _i1, types.int64, types.int64), cache=True)
def _send_later(paths, lengths, i, j):  # type: ignore[no-untyped-def]
    """Row i is sent at place j, those between move up or down."""
    step = 1 if j > i else -1
    length = lengths[i]
    for a in range(paths.shape[1]):
        moved = paths[i, a]
        k = i
        while k != j:
            paths[k, a] = paths[k + step, a]
            k += step
        paths[j, a] = moved
    k = i
    while k != j:
        lengths[k] = lengths[k + step]
        k += step
    lengths[j] = length


@njit(types.boolean(_SEARCH, types.int64, types.int64, types.int64), cache=True)
def _even(search, s, t, spread):  # type: ignore[no-untyped-def]
    """May stage t have a visit of stage s?"""
    least, most = np.int64(1 << 40), np.int64(0)
    for u in range(1, search.hosts.shape[0]):
        if search.hosts[u]:
            visits = search.visits[u] - (u == s) + (u == t)
            least, most = min(least, visits), max(most, visits)
    return most - least <= spread


@njit(types.int64(_SEARCH, types.int64), cache=True)
def _any_replica(search, s):  # type: ignore[no-untyped-def]
    return search.replicas[s, _draw(search.random, search.hosts[s])]


@njit(types.boolean(_SEARCH, _TABLES, types.int64, types.int64, types.int64), cache=True)
def _change_hops(search, tables, move, i, j):  # type: ignore[no-untyped-def]
    """Change the hops of rows i and j as ``move`` says; False if nothing could come of it."""
    paths, lengths, stage = search.paths, search.lengths, search.stage
    if lengths[i] < 2 or lengths[j] < 2:
        return False
    a, b = 1 + _draw(search.random, lengths[i] - 1), 1 + _draw(search.random, lengths[j] - 1)
    p, q = paths[i, a], paths[j, b]
    if move == _REPLICA:
        paths[i, a] = _any_replica(search, stage[p])
        return paths[i, a] != p and _settle(paths, lengths, i, stage, tables.usable)
    if move == _STAGE:
        t = 1 + _draw(search.random, search.hosts.shape[0] - 1)
        if search.hosts[t] == 0 or t == stage[p] or not _even(search, stage[p], t, search.spread[0]):
            return False
        paths[i, a] = _any_replica(search, t)
        return _settle(paths, lengths, i, stage, tables.usable)
    if i == j:
        return False
    if move == _ORIGINS:
        paths[i, 0], paths[j, 0] = paths[j, 0], paths[i, 0]
        return (
            paths[i, 0] != paths[j, 0]
            and lengths[i] == lengths[j]
            and _settle(paths, lengths, i, stage, tables.usable)
            and _settle(paths, lengths, j, stage, tables.usable)
        )
    if p == q:
        return False
    paths[i, a], paths[j, b] = q, p
    if move == _EXCHANGE_STAGES:
        paths[i, a], paths[j, b] = _any_replica(search, stage[q]), _any_replica(search, stage[p])
    return _settle(paths, lengths, i, stage, tables.usable) and _settle(
        paths, lengths, j, stage, tables.usable
    )


@njit(types.float64(_SEARCH, _TABLES), cache=True)
def _averaging_of_all(search, tables):  # type: ignore[no-untyped-def]
    longest_s = 0.0
    for s in range(search.hosts.shape[0]):
        if tables.gradient_bytes[s] > 0:
            group = search.replicas[s, : search.hosts[s]]
            longest_s = max(longest_s, averaging_s(group, tables.gradient_bytes[s], tables))
    return longest_s


@njit(types.int64(_SEARCH, _TABLES, _SCRATCH, types.boolean, types.float64, types.int64), cache=True)
def anneal(search, tables, room, free, temperature_s, evaluations):  # type: ignore[no-untyped-def]
    """Up to ``evaluations`` changed schedules, each kept if it costs less, or by chance at a temperature
    above 0 (Kirkpatrick et al. 1983, Optimization by Simulated Annealing). ``free``: places change too.

    The best schedule is kept in ``search.best_*``. Returns how many were evaluated: fewer where changes that
    can be made are rare.
    """
    paths, lengths, stage = search.paths, search.lengths, search.stage
    m, hops = paths.shape
    n = stage.shape[0]
    old = np.empty((2, hops), np.int64)
    log, log_s = np.empty((0, 3), np.int64), np.empty((0, 2), np.float64)
    evaluated = 0
    for _ in range(8 * evaluations):
        if evaluated == evaluations:
            break
        move = _ODDS[_draw(search.random, len(_ODDS) if free else _PATHS_ONLY)]
        i, j = _draw(search.random, m), _draw(search.random, m)
        averaging_now_s = search.score[3]
        p = q = 0
        old[0], old[1] = paths[i], paths[j]
        possible = True
        if move in (_ORDER, _INSERT):
            if i == j:
                continue
            if move == _ORDER:
                paths[i], paths[j] = old[1], old[0]
                lengths[i], lengths[j] = lengths[j], lengths[i]
            else:
                _send_later(paths, lengths, i, j)
        elif move == _PLACES:
            p, q = _draw(search.random, n), _draw(search.random, n)
            if stage[p] == stage[q]:
                continue
            _trade_places(search, p, q)
            possible = _walkable(search, tables)
            averaging_now_s = _averaging_of_all(search, tables)
        else:
            possible = _change_hops(search, tables, move, i, j)

        accepted = False
        if possible:
            evaluated += 1
            limit_s = search.score[0]
            if temperature_s > 0:
                limit_s -= temperature_s * np.log((_draw(search.random, 1 << 30) + 1) / (1 << 30))
            if play(paths, lengths, tables, limit_s - averaging_now_s, room, log, log_s) == m:
                total_s, last_s = 0.0, averaging_now_s + room.free_s.max()
                for k in range(m):
                    total_s += room.finish_s[k]
                cost_s = last_s + MEAN_WEIGHT * total_s / m
                accepted = cost_s <= limit_s
                if accepted:
                    search.score[0], search.score[3] = cost_s, averaging_now_s
                    better = last_s < search.score[1]
                    if better or (last_s == search.score[1] and total_s < search.score[2]):
                        search.score[1], search.score[2] = last_s, total_s
                        search.best_paths[:] = paths
                        search.best_lengths[:] = lengths
                        search.best_stage[:] = stage
        if accepted:
            if move == _STAGE:
                for k in range(1, hops):
                    if k < lengths[i]:
                        search.visits[stage[old[0, k]]] -= 1
                        search.visits[stage[paths[i, k]]] += 1
        elif move == _PLACES:
            _trade_places(search, p, q)
        elif move == _INSERT:
            _send_later(paths, lengths, j, i)
        else:
            if move == _ORDER:
                lengths[i], lengths[j] = lengths[j], lengths[i]
            paths[i], paths[j] = old[0], old[1]
    return evaluated


@njit(types.boolean(types.int64, _TABLES, _i1, _f1, types.float64, _i1), cache=True)
def route(origin, tables, filled, free_s, load_weight, path):  # type: ignore[no-untyped-def]
    """Fill ``path`` ``[length]`` with the way of exactly that many stages from ``origin`` that is filled
    least, then has the least predicted time; False if there is none.

    Dynamic programme over (hops so far, peer). ``filled`` ``[S]`` is what a visit to each stage counts,
    ``free_s`` ``[n]`` when each peer has done what it was given so far.
    """
    n, length = tables.slots.shape[0], path.shape[0]
    many = np.int64(1) << 62
    sums = np.full((length, n), many)
    ends_s = np.full((length, n), np.inf)
    came_from = np.full((length, n), -1)
    sums[0, origin] = 0
    ends_s[0, origin] = free_s[origin] + tables.task_s[origin, F]
    for hop in range(1, length):
        for p in range(n):
            if sums[hop - 1, p] == many:
                continue
            for s in range(max(1, tables.stage[p] + 1), tables.hosts.shape[0]):
                total = sums[hop - 1, p] + filled[s]
                for k in range(tables.hosts[s]):
                    q = tables.replicas[s, k]
                    if total > sums[hop, q] or not tables.usable[p, q]:
                        continue
                    begins_s = max(ends_s[hop - 1, p] + tables.hop_s[p, q], free_s[q])
                    # The gradient's way back counts as if it followed at once.
                    end_s = begins_s + tables.task_s[q, F] + tables.task_s[q, B] + tables.hop_s[q, p]
                    end_s += load_weight * free_s[q]
                    if total < sums[hop, q] or end_s < ends_s[hop, q]:
                        sums[hop, q], ends_s[hop, q], came_from[hop, q] = total, end_s, p
    last, least, least_s = -1, many, np.inf
    for p in range(n):
        total = sums[length - 1, p]
        if total < many and (p == origin or tables.usable[p, origin]):
            home_s = ends_s[length - 1, p] + tables.hop_s[p, origin] + tables.hop_s[origin, p]
            if total < least or (total == least and home_s < least_s):
                last, least, least_s = p, total, home_s
    if last < 0:
        return False
    for hop in range(length - 1, -1, -1):
        path[hop] = last
        last = came_from[hop, last]
    return True
