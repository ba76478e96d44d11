"""What does not run on a CPU: batches of SGLang's own classes, changed as SGLang changes them, through a real rank."""

import warnings
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.capture.build import states_of

from hashtap.config import CaptureConfig
from hashtap.errors import SetupError
from hashtap.identity import NEEDS_RECOMPUTE
from hashtap.rank import Rank
from hashtap.reader import Reader
from hashtap_kernels.layout import Geometry

pytestmark = pytest.mark.slow  # to import SGLang takes long

GEOMETRY = Geometry(4, 64)
GARBAGE = 0x7FC0  # a NaN: no row that holds it may be stored
Part = tuple[Any, int, int]
"""Rows ``[prefix, prefix + extend)`` of a request: its prompt, then tokens that it generated."""


@pytest.fixture(scope="module")
def sglang() -> SimpleNamespace:
    """SGLang's own classes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchvision warns when it is imported
        from sglang.srt.layers.logits_processor import LogitsProcessorOutput
        from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
        from sglang.srt.sampling.sampling_params import SamplingParams
    return SimpleNamespace(
        FINISH_ABORT=FINISH_ABORT,
        Req=Req,
        SamplingParams=SamplingParams,
        ForwardBatch=ForwardBatch,
        ForwardMode=ForwardMode,
        LogitsProcessorOutput=LogitsProcessorOutput,
    )


class Runner:
    """A rank, and the model runner's part of SGLang around it."""

    def __init__(self, path: Path, sglang: SimpleNamespace, **config: Any) -> None:
        self.path = path
        self.sglang = sglang
        self.rank = Rank(CaptureConfig(capture_dir=str(path), capture_ring_gib=0.01, **config), "HEALTH_CHECK")
        model = SimpleNamespace(hidden_size=64, model_path="m", vocab_size=512, context_len=4096)
        facts = self.rank.plan(model, "bfloat16", (1, 4, 6), rank=0, flags={})
        self.rank.start(facts, "w", {"sglang": "x"}, device="cpu", max_forward_tokens=1024)

    def request(self, length: int, **fields: Any) -> Any:
        """A tagged prompt that has reached the scheduler; ``fields`` of ``Req`` besides."""
        ids = array("q", np.random.default_rng(length).integers(3, 512, length).tolist())
        params = self.sglang.SamplingParams(max_new_tokens=9, custom_params={"hashtap": True})
        req = self.sglang.Req(f"r-{length}", "", ids, params, vocab_size=512)
        for name, value in fields.items():
            assert hasattr(req, name)
            setattr(req, name, value)
        self.rank.admit(req)
        return req

    def batch(self, mode: str, parts: Sequence[Part]) -> Any:
        """A batch as SGLang's scheduler makes it."""
        ids = [token for req, prefix, extend in parts for token in with_output(req)[prefix : prefix + extend]]
        positions = [np.arange(prefix, prefix + extend) for _, prefix, extend in parts]
        ends = torch.tensor([prefix + extend for _, prefix, extend in parts])
        rows = sum(extend for *_, extend in parts)
        return self.sglang.ForwardBatch(
            forward_mode=self.sglang.ForwardMode[mode],
            batch_size=len(parts),
            input_ids=torch.tensor(ids, dtype=torch.int64),
            req_pool_indices=torch.arange(len(parts)),
            seq_lens=ends,
            out_cache_loc=torch.arange(rows),
            seq_lens_sum=int(ends.sum()),
            rids=[req.rid for req, *_ in parts],
            positions=torch.from_numpy(np.concatenate(positions)) if parts else torch.zeros(0, dtype=torch.int64),
            extend_seq_lens_cpu=[extend for *_, extend in parts],
            extend_prefix_lens_cpu=[prefix for _, prefix, _ in parts],
        )

    def forward(
        self,
        batch: Any,
        parts: Sequence[Part],
        change: Callable[[Any], None] = lambda batch: None,
        embedded: bool = False,
    ) -> list[dict[str, Any] | None] | None:
        """A forward pass; ``change`` is what SGLang does to the batch between scheduler and logits. The receipts.

        Where the prompt comes to the language model ``embedded``, that has no ids to hand on.
        """
        if not self.rank.begin_forward(batch):
            return None
        states = [states_of(with_output(req), GEOMETRY)[p : p + n] for req, p, n in parts]
        change(batch)
        rows = np.full((len(batch.input_ids), GEOMETRY.layers, GEOMETRY.hidden), GARBAGE, np.uint16)
        together = np.concatenate(states)
        rows[: len(together)] = together
        layers = torch.from_numpy(rows).view(torch.bfloat16).unbind(1)
        ids = None if embedded else batch.input_ids
        self.rank.take(ids, batch.positions, [layers[-1]], list(layers[:-1]))
        output = self.sglang.LogitsProcessorOutput(next_token_logits=None)
        self.rank.end_forward(output)
        return output.customized_info["hashtap"] if output.customized_info else None

    def assert_stored(self, *requests: Any) -> None:
        """These prompts are sealed, with their own rows, and nothing else is."""
        self.rank.close()
        reader = Reader(self.path)
        assert len(reader) == len(requests)
        for req in requests:
            ids = list(req.origin_input_ids)
            wanted = states_of(with_output(req), GEOMETRY)[: len(ids)]
            np.testing.assert_array_equal(reader.by_token_ids(ids).hidden_states, wanted)


def with_output(req: Any) -> list[int]:
    """A prompt and tokens that it might generate."""
    return [*req.origin_input_ids, *[5] * 9]


@pytest.fixture
def runner(tmp_path: Path, sglang: SimpleNamespace) -> Iterator[Runner]:
    runner = Runner(tmp_path / "captures", sglang)
    yield runner
    runner.rank.close()


def padded_to(tokens: int, requests: int) -> Callable[[Any], None]:
    """SGLang's own padding of a batch, as on a rank of attention data parallelism."""
    backend = SimpleNamespace(get_cpu_graph_seq_len_fill_value=lambda: 1, get_cuda_graph_seq_len_fill_value=lambda: 1)

    def change(batch: Any) -> None:
        batch._pad_inputs_to_size(SimpleNamespace(attn_backend=backend), tokens, requests)
        batch.extend_seq_lens_cpu.extend([1] * (requests - len(batch.extend_seq_lens_cpu)))
        batch.extend_prefix_lens_cpu.extend([0] * (requests - len(batch.extend_prefix_lens_cpu)))

    return change


@pytest.mark.cell("text to a model of images and text", "exact", "its layers get embeddings, their ids are the batch's")
def test_prompts_that_are_embedded_before_the_language_model(runner: Runner) -> None:
    """SGLang's general_mm_embed_routine calls the language model with ``input_ids=None``, also for its own warm-up."""
    stranger = runner.sglang.Req("w", "", array("q", [7, 8]), runner.sglang.SamplingParams(), vocab_size=512)
    assert runner.forward(runner.batch("EXTEND", [(stranger, 0, 2)]), [(stranger, 0, 2)], embedded=True) is None
    req = runner.request(30)
    for part in ((req, 0, 20), (req, 20, 10)):
        runner.forward(runner.batch("EXTEND", [part]), [part], embedded=True)
    runner.assert_stored(req)


@pytest.mark.parametrize("flush", ["before", "after", "never"])
def test_the_cache_holds_old_weights_rows_until_it_is_flushed(
    tmp_path: Path, sglang: SimpleNamespace, flush: str
) -> None:
    runner = Runner(tmp_path / "captures", sglang, capture_prefix_cache="on")

    def serve(req: Any, prefix: int) -> str:
        part = (req, prefix, len(req.origin_input_ids) - prefix)
        (receipt,) = runner.forward(runner.batch("EXTEND", [part]), [part]) or [None]
        assert receipt is not None
        return str(receipt["state"])

    assert serve(runner.request(7), 0) == "captured"
    if flush == "before":
        runner.rank.cache_flushed()
    runner.rank.end_epoch()
    runner.rank.begin_epoch(b"w")
    if flush == "after":
        runner.rank.cache_flushed()
    donor = runner.request(40)
    later = runner.request(41, origin_input_ids=array("q", [*donor.origin_input_ids[:30], *range(3, 14)]))
    assert serve(donor, 0) == (NEEDS_RECOMPUTE if flush == "never" else "captured")
    assert serve(later, 30) == (NEEDS_RECOMPUTE if flush == "never" else "captured")
    runner.rank.close()


@pytest.mark.cell("attention data parallelism", "exact", "ranks padded to one length; the padding is nobody's")
def test_padding_of_attention_data_parallelism(runner: Runner) -> None:
    requests = [runner.request(length) for length in (7, 8, 9, 10, 11)]
    parts = [(req, 0, len(req.origin_input_ids)) for req in requests]
    receipts = runner.forward(runner.batch("EXTEND", parts), parts, padded_to(64, 8))
    assert receipts is not None
    assert [receipt and receipt["rows"] for receipt in receipts] == [7, 8, 9, 10, 11]
    runner.assert_stored(*requests)


@pytest.mark.cell("idle rank", "exact", "a rank without requests runs made-up rows: none is captured")
def test_an_idle_rank(runner: Runner) -> None:
    req = runner.request(30)
    assert runner.forward(runner.batch("IDLE", []), []) is None
    dummy = runner.batch("EXTEND", [])
    dummy.extend_seq_lens_cpu, dummy.extend_prefix_lens_cpu = [64], [0]
    assert runner.forward(dummy, []) is None
    runner.forward(runner.batch("EXTEND", [(req, 0, 30)]), [(req, 0, 30)])
    runner.assert_stored(req)


@pytest.mark.cell("prefill CUDA graph", "exact", "the static batch of a replay: longer buffers with old ids behind")
def test_replay_of_a_prefill_graph(runner: Runner) -> None:
    first, second = runner.request(65), runner.request(100)
    parts = [(first, 0, 65), (second, 0, 31)]
    static_ids, static_positions = torch.full((128,), 77), torch.arange(1000, 1128)

    def replay(batch: Any) -> None:
        rows = len(batch.input_ids)
        static_ids[:rows], static_positions[:rows] = batch.input_ids, batch.positions
        batch.input_ids, batch.positions = static_ids, static_positions
        batch.extend_seq_lens_cpu = [65, 31 + 32]  # what a padded batch might say

    runner.forward(runner.batch("EXTEND", parts), parts, replay)
    rest = [(second, 31, 69)]
    runner.forward(runner.batch("EXTEND", rest), rest, replay)
    runner.assert_stored(first, second)


@pytest.mark.cell("mixed batch under its own mode", "exact", "MIXED: the decode rows of others come last")
def test_a_mixed_batch(runner: Runner) -> None:
    running, prompt = runner.request(20), runner.request(50)
    start = [(running, 0, 20)]
    runner.forward(runner.batch("EXTEND", start), start)
    parts = [(prompt, 0, 50), (running, 20, 1)]
    receipts = runner.forward(runner.batch("MIXED", parts), parts)
    assert receipts is not None
    assert [receipt and receipt["rows"] for receipt in receipts] == [50, 20]
    runner.assert_stored(running, prompt)


@pytest.mark.cell("batches of speculation", "exact", "TARGET_VERIFY, DRAFT_EXTEND and DECODE bring no prompt rows")
@pytest.mark.parametrize("mode", ["TARGET_VERIFY", "DRAFT_EXTEND_V2", "DECODE"])
def test_batches_without_prompt_rows(runner: Runner, mode: str) -> None:
    req = runner.request(40)
    parts = [(req, 0, 40)]
    runner.forward(runner.batch("EXTEND", parts), parts)
    more = [(req, 40, 4)]
    assert runner.forward(runner.batch(mode, more), more) is None
    runner.assert_stored(req)


@pytest.mark.cell(
    "rows of a cache that outlives the server", "marked", "hierarchical cache: `incomplete` in the receipt"
)
def test_a_hit_on_a_fresh_server(runner: Runner) -> None:
    req = runner.request(60)
    receipts = runner.forward(runner.batch("EXTEND", [(req, 48, 12)]), [(req, 48, 12)])
    assert receipts is not None
    assert receipts[0] is not None
    assert (receipts[0]["state"], receipts[0]["rows"]) == ("incomplete", 0)
    assert receipts[0]["reason"] == "48 rows from position 0 came from the prefix cache"
    runner.assert_stored()


@pytest.mark.cell("split prefill", "refused", "the server does not start; were it to, the answer had no receipt")
def test_a_mode_in_which_rows_are_not_looked_for(runner: Runner) -> None:
    req = runner.request(40)
    assert runner.forward(runner.batch("SPLIT_PREFILL", [(req, 0, 40)]), [(req, 0, 40)]) is None
    runner.assert_stored()


@pytest.mark.cell("a pass that hashtap does not see", "refused", "the server ends rather than serve on")
def test_a_pass_that_never_comes_to_the_logits(runner: Runner) -> None:
    req = runner.request(40)
    assert runner.rank.begin_forward(runner.batch("EXTEND", [(req, 0, 40)]))
    with pytest.raises(SetupError, match="without coming to the point"):
        runner.rank.end_forward(runner.sglang.LogitsProcessorOutput(next_token_logits=None))


@pytest.mark.cell("images", "refused", "`multimodal_inputs`: the receipt says it, rows are not stored")
@pytest.mark.cell("embeddings in place of some tokens", "refused", "`positional_embed_overrides`")
@pytest.mark.cell("token types", "refused", "`token_type_ids`")
@pytest.mark.parametrize(
    "fields",
    [{"positional_embed_overrides": object()}, {"token_type_ids": [0, 1]}, {"multimodal_inputs": object()}],
    ids=list,
)
def test_what_the_ids_do_not_say(runner: Runner, fields: dict[str, Any]) -> None:
    req = runner.request(20, **fields)
    parts = [(req, 0, 20)]
    receipts = runner.forward(runner.batch("EXTEND", parts), parts)
    assert receipts is not None
    assert receipts[0] is not None
    assert (receipts[0]["state"], receipts[0]["rows"]) == ("refused", 0)
    runner.assert_stored()


def test_an_aborted_prompt_that_sglang_keeps_is_over(runner: Runner) -> None:
    req = runner.request(40)
    runner.forward(runner.batch("EXTEND", [(req, 0, 16)]), [(req, 0, 16)])
    assert runner.rank.state()["counters"]["aborted"] == 0
    req.finished_reason = runner.sglang.FINISH_ABORT("Aborted")
    counters = runner.rank.state()["counters"]
    assert (counters["admitted"], counters["captured"], counters["aborted"]) == (1, 0, 1)
    runner.assert_stored()
