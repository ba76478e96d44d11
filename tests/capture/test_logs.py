"""A message that repeats is counted, not printed for ever."""

import logging

from hashtap.logs import RepeatLimit


def test_repeats_are_counted() -> None:
    now = 0.0
    limit = RepeatLimit(most=3, window_s=60.0, clock=lambda: now)

    def shown(text: str, *values: object) -> str | None:
        record = logging.LogRecord("hashtap", logging.ERROR, __file__, 1, text, values, None)
        return record.getMessage() if limit.filter(record) else None

    assert [shown("prompt %s is lost", n) for n in range(10)][2:5] == ["prompt 2 is lost", None, None]
    assert shown("something else") == "something else"
    now = 61.0
    assert shown("prompt %s is lost", 10) == "prompt 10 is lost (7 more like this since then)"
    assert shown("prompt %s is lost", 11) == "prompt 11 is lost"
