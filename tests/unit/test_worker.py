"""The compute queue: urgency, order, one at a time, and whose fault a failure is."""

from __future__ import annotations

from typing import Any

from peer.worker import SimExecutor, TaskKind, Worker
from swarm.clock import SimClock


def make(failures: list[Exception]) -> tuple[SimClock, Worker]:
    clock = SimClock()
    return clock, Worker(SimExecutor(clock, lambda kind: 1.0), clock, failed=failures.append)


def test_the_most_urgent_goes_first_then_the_order_then_who_came_first() -> None:
    clock, worker = make([])
    ran: list[str] = []
    tasks = [
        (TaskKind.FORWARD, (0, 9), "begun at once"),
        (TaskKind.WEIGHT, (0, 0), "weight"),
        (TaskKind.FORWARD, (0, 2), "forward 2"),
        (TaskKind.FORWARD, (0, 1), "forward 1"),
        (TaskKind.FORWARD, (0, 1), "forward 1 later"),
        (TaskKind.BACKWARD, (0, 5), "backward"),
    ]
    for kind, order, name in tasks:
        worker.submit(kind, order, lambda name=name: name, ran.append)  # type: ignore[misc]
    clock.run_for(10)
    expected = ["begun at once", "backward", "forward 1", "forward 1 later", "forward 2", "weight"]
    assert ran == expected
    assert worker.progress == len(tasks)
    assert worker.median_s(TaskKind.FORWARD) == 1.0
    assert worker.median_s(TaskKind.LOSS) is None


def test_unusable_input_is_its_senders_fault_anything_else_is_ours() -> None:
    failures: list[Exception] = []
    clock, worker = make(failures)
    refused: list[Exception] = []
    done: list[Any] = []

    def raises(error: Exception) -> Any:
        raise error

    worker.submit(TaskKind.FORWARD, (0,), lambda: raises(ValueError("NaN")), done.append, refused.append)
    worker.submit(TaskKind.FORWARD, (1,), lambda: raises(RuntimeError("bug")), done.append, refused.append)
    worker.submit(TaskKind.FORWARD, (2,), lambda: raises(ValueError("no one to blame")), done.append)
    worker.submit(TaskKind.FORWARD, (3,), lambda: "goes on", done.append)
    clock.run_for(10)
    assert [str(error) for error in refused] == ["NaN"]
    assert [str(error) for error in failures] == ["bug", "no one to blame"]
    assert done == ["goes on"]


def test_a_closed_worker_answers_nobody() -> None:
    clock, worker = make([])
    done: list[Any] = []
    worker.submit(TaskKind.FORWARD, (0,), lambda: 1, done.append)
    worker.submit(TaskKind.FORWARD, (1,), lambda: 2, done.append)
    worker.close()
    clock.run_for(10)
    assert done == []
