"""Runs many jobs side by side, so that what they ask at the same time is answered in one call.

A job is a generator: it yields a question, is sent the answer, and returns its result. Where the answer is an error,
that is raised in the job.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import islice
from typing import Generic, TypeVar

__all__ = ["together"]

Q = TypeVar("Q")
A = TypeVar("A")
R = TypeVar("R")


def together(
    jobs: Iterable[Generator[Q, A, R]], answer: Callable[[list[Q]], Sequence[A | Exception]], width: int
) -> Iterator[R]:
    """The results of ``jobs``, in their order; ``width`` of them run at a time. What a job raises is raised here."""
    jobs = iter(jobs)
    while running := [_Running(job) for job in islice(jobs, width)]:
        while asking := [one for one in running if one.questions]:
            for one, reply in zip(asking, answer([one.questions[0] for one in asking]), strict=True):
                one.hear(reply)
        yield from (one.results[0] for one in running)


class _Running(Generic[Q, A, R]):
    """A job that has begun: it has one question, or a result."""

    def __init__(self, job: Generator[Q, A, R]) -> None:
        self._job = job
        self.questions: list[Q] = []
        self.results: list[R] = []
        self._go_on(lambda: next(job))

    def hear(self, reply: A | Exception) -> None:
        job = self._job
        self._go_on(lambda: job.throw(reply) if isinstance(reply, Exception) else job.send(reply))

    def _go_on(self, step: Callable[[], Q]) -> None:
        try:
            self.questions = [step()]
        except StopIteration as end:
            self.questions, self.results = [], [end.value]
