"""Jobs side by side: results in order, questions in one call, errors in the job whose question it was."""

from collections.abc import Generator

import pytest

from hashtap.together import together


def job(name: str, questions: int) -> Generator[str, int, list[int | str]]:
    """Asks so many times, and returns the answers; an error counts as one."""
    answers: list[int | str] = []
    for number in range(questions):
        try:
            answers.append((yield f"{name}{number}"))
        except ValueError as error:
            answers.append(str(error))
    return answers


def test_results_are_in_order_and_questions_together() -> None:
    asked: list[list[str]] = []

    def answer(questions: list[str]) -> list[int | Exception]:
        asked.append(questions)
        return [ValueError(f"not {question}") if question == "c1" else ord(question[0]) for question in questions]

    jobs = [job("a", 2), job("b", 0), job("c", 3), job("d", 1)]
    assert list(together(jobs, answer, 3)) == [[97, 97], [], [99, "not c1", 99], [100]]
    assert asked == [["a0", "c0"], ["a1", "c1"], ["c2"], ["d0"]]


def test_no_job_asks_nothing() -> None:
    assert list(together([], lambda questions: pytest.fail("asked"), 4)) == []


def test_what_a_job_does_not_catch_is_raised() -> None:
    with pytest.raises(KeyError, match="broken"):
        list(together([job("a", 1)], lambda questions: [KeyError("broken")], 4))
