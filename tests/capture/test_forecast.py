"""The forecast of a large run: what is busy, what is in the way, and how long it takes."""

from dataclasses import replace

import pytest

from hashtap.errors import UsageError
from hashtap.estimate import Estimate
from hashtap.forecast import Forecast, Rates

RATES = Rates(prefill_tokens_per_s=5_000, writer=1e9, frame_s=1e-12, disk=2e9, pcie=50e9)
# 87.8 million tokens of 4 x 7,168 bfloat16 elements, as a Kimi-K2-sized model on 8 GPUs.
RUN = Forecast(Estimate(87_800_000, 4, 7168, ratio=1.5), gpus=8, ranks=1, writers=3, rates=RATES)


def test_prefill_sets_the_pace_where_everything_keeps_up() -> None:
    assert RUN.bottleneck == "prefill"
    assert RUN.seconds == pytest.approx(87_800_000 / 40_000)
    assert RUN.raw_bytes_per_s == 40_000 * 57_344
    assert RUN.duties == pytest.approx(
        {"writers": 2.29376 / 3, "disk": 2.29376 / 1.5 / 2, "PCIe": 40_000 * (57_344 + 8) / 50e9}
    )
    assert RUN.writers_needed == 3


@pytest.mark.parametrize(
    ("slow", "name", "tokens_per_s"),
    [
        (replace(RUN, writers=1), "writers", 1e9 / 57_344),
        (replace(RUN, rates=replace(RATES, disk=0.5e9)), "disk", 0.5e9 * 1.5 / 57_344),
        (replace(RUN, rates=replace(RATES, pcie=1e9)), "PCIe", 1e9 / 57_352),
    ],
)
def test_what_cannot_keep_up_sets_the_pace(slow: Forecast, name: str, tokens_per_s: float) -> None:
    assert slow.bottleneck == name
    assert slow.tokens_per_s == pytest.approx(tokens_per_s)
    assert slow.seconds == pytest.approx(87_800_000 / tokens_per_s)
    assert f"bottleneck: {name}, which cannot keep up with 40,000" in str(slow)


def test_data_parallel_ranks_share_writers_and_pcie_but_not_the_disk() -> None:
    spread = replace(RUN, ranks=8)
    for name, share in (("writers", 8), ("PCIe", 8), ("disk", 1)):
        assert spread.duties[name] == pytest.approx(RUN.duties[name] / share), name
    assert spread.writers_needed == 1


def test_short_frames_take_a_writer_longer() -> None:
    """A prompt of 300 tokens takes two frames; of 4 x 576 elements it is 1,382,400 bytes."""
    small = Forecast(Estimate(1, 4, 576), prompt_tokens=300, rates=replace(RATES, frame_s=1e-3))
    assert small.writer_bytes_per_s == pytest.approx(1_382_400 / (1_382_400 / 1e9 + 2e-3))
    assert replace(small, prompt_tokens=256).writer_bytes_per_s > small.writer_bytes_per_s
    assert RUN.writer_bytes_per_s == pytest.approx(1e9)


def test_it_prints_what_it_assumes() -> None:
    assert str(RUN).splitlines()[0] == "time: 37 min at 40,000 tokens/s"
    assumed = str(RUN).splitlines()[-1]
    for text in (
        "8 GPUs of 5,000 prompt tokens/s",
        "3 writers a writing rank, each of 1 GB/s",
        "disk takes 2 GB/s",
        "ratio 1.5",
    ):
        assert text in assumed


@pytest.mark.parametrize("bad", [{"gpus": 0}, {"ranks": 9}, {"ranks": 0}, {"writers": 0}, {"prompt_tokens": 0}])
def test_numbers_out_of_range_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="give"):
        replace(RUN, **bad)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="disk is 0"):
        replace(RATES, disk=0)
