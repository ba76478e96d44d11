"""Captures beside what transformers computes: right ones pass, noise is a warning, other states are named."""

import json
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import models
from tests.capture.build import GEOMETRY, Host
from tests.capture.tamper import Tampered
from tests.capture.test_cli import Hashtap, hashtap, only_line  # noqa: F401
from tests.server.prompts import random_prompts

from hashtap.errors import UsageError
from hashtap.recompute import FOREIGN_RUN, spread
from hashtap.report import Report
from hashtap.set_aside import add_set_aside
from hashtap.verify import verify
from hashtap_kernels.layout import HEADER_BYTES, Dtype, Geometry

N = models.TINY_LAYERS
PROMPTS = random_prompts([300, 5, 1, 130, 64], seed=1)
SAMPLES = [(f"s-{n}", ids, b"") for n, ids in enumerate(PROMPTS)]
FINALS = {"pre": (N,), "post": (N + 1,), "both": (N, N + 1)}
BOUNDARIES = (1, 4, 6)
CHUNK = 100


def model(seed: int = 0) -> Path:
    return models.llama(plain=True, seed=seed)


def whole_model(seed: int) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers and torchvision warn when they are imported
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(model(seed), dtype=torch.bfloat16).eval()


@cache
def decoder_of(seed: int) -> Any:
    return whole_model(seed).model


@torch.no_grad()
def states(ids: Sequence[int], *, chunk: int = 1 << 30, seed: int = 0) -> torch.Tensor:
    """transformers' own ``hidden_states``, ``[T, n + 2, H]``: boundaries, then the states before and after the norm."""
    decoder, past, parts = decoder_of(seed), None, []
    before: list[torch.Tensor] = []
    hook = decoder.norm.register_forward_pre_hook(lambda _, inputs: before.append(inputs[0]))
    for first in range(0, len(ids), chunk):
        part = torch.tensor([list(ids[first : first + chunk])])
        output = decoder(part, past_key_values=past, use_cache=True, output_hidden_states=True)
        past = output.past_key_values
        layers = [*output.hidden_states[:N], before.pop(), output.hidden_states[N]]
        parts.append(torch.stack([layer[0] for layer in layers], dim=1))
    hook.remove()
    return torch.cat(parts)


def capture(
    path: Path,
    change: Callable[[torch.Tensor, list[int]], torch.Tensor] = lambda rows, ids: rows,
    *,
    boundaries: tuple[int, ...] = BOUNDARIES,
    final: str = "post",
    prompts: Sequence[list[int]] = PROMPTS,
    **options: Any,
) -> Path:
    """Capture the prompts in chunks, of the right states ``[T, n + 2, H]`` what ``change`` makes of them."""
    layers = [*boundaries, *FINALS[final]]
    changes = {"boundaries": boundaries, "final_norm": final}
    with Host(path, Geometry(len(layers), models.TINY_HIDDEN), changes=changes, threads=1, **options) as host:
        for ids in prompts:
            rows = change(states(ids), ids)[:, layers].contiguous().view(torch.uint16).numpy()
            record = host.record(ids)
            for first in range(0, len(ids), CHUNK):
                host.forward([(record, rows, first, min(CHUNK, len(ids) - first))])
    return path


def found(report: Report) -> set[tuple[str, str | None]]:
    """Samples and layers of the problems, which must all be of one kind."""
    assert {problem.kind for problem in report.problems} <= {"recomputed"}
    return {(problem.sample_ids[0], problem.layer) for problem in report.problems}


@pytest.mark.parametrize(
    ("boundaries", "final", "layers"),
    [
        ((1, 4, 6), "post", ["boundary 1", "boundary 4", "boundary 6", "final (post-norm)"]),
        ((3,), "pre", ["boundary 3", "final (pre-norm)"]),
        ((0, 7), "both", ["boundary 0", "boundary 7", "final (pre-norm)", "final (post-norm)"]),
        ((), "post", ["final (post-norm)"]),
    ],
)
def test_what_transformers_gives_by_itself_is_what_is_computed_again(
    tmp_path: Path, boundaries: tuple[int, ...], final: str, layers: list[str]
) -> None:
    report = verify(capture(tmp_path, boundaries=boundaries, final=final), SAMPLES, recompute=model())
    assert report.ok
    assert (report.verified, report.recomputed_records, report.warnings) == (5, 5, [])
    assert [each.layer for each in report.recomputed] == layers
    assert {(each.rows, each.max) for each in report.recomputed} == {(500, 0.0)}


def test_chunks_that_attend_to_a_cache_differ_by_no_more_than_rounding(tmp_path: Path) -> None:
    chunked = capture(tmp_path, lambda _, ids: states(ids, chunk=CHUNK))
    report = verify(chunked, SAMPLES, recompute=model())
    assert report.ok
    assert report.warnings == []
    # How many rows come to other bits is the processor's matter; that some do is not.
    assert all(each.median <= each.p99 <= each.max < each.bound for each in report.recomputed[1:])
    assert all(each.mean > 0 for each in report.recomputed[1:])


def test_some_records_are_chosen_evenly(tmp_path: Path) -> None:
    capture(tmp_path)
    report = verify(tmp_path, recompute=model(), recompute_records=2)
    assert (report.recomputed_records, report.verified) == (2, 5)
    assert {each.rows for each in report.recomputed} == {len(PROMPTS[0]) + len(PROMPTS[2])}
    assert verify(tmp_path).recomputed == []
    assert [spread(range(10), most) for most in (1, 3, 10, 11)] == [[0], [0, 3, 6], [*range(10)], [*range(10)]]
    assert spread([], 8) == []


ALL = {"boundary 1", "boundary 4", "boundary 6", "final (post-norm)"}


@pytest.mark.parametrize(
    ("change", "layers"),
    [
        pytest.param(lambda _, ids: states(ids[::-1]), ALL, id="another prompt"),
        pytest.param(lambda _, ids: states(ids, seed=1), ALL, id="other weights"),
        pytest.param(lambda rows, _: rows.roll(1, 0), ALL, id="one row late"),
        pytest.param(lambda rows, _: rows.roll(1, 1), ALL, id="one boundary early"),
        pytest.param(
            lambda rows, _: rows[:, [0, 6, 2, 3, 4, 5, 1, 7, 8, 9]], {"boundary 1", "boundary 6"}, id="layers swapped"
        ),
        pytest.param(lambda rows, _: rows[:, [*range(N + 1), N]], {"final (post-norm)"}, id="before the norm"),
    ],
)
def test_other_states_are_named(
    tmp_path: Path, change: Callable[[torch.Tensor, list[int]], torch.Tensor], layers: set[str]
) -> None:
    report = verify(capture(tmp_path, change, prompts=[PROMPTS[0]]), SAMPLES[:1], recompute=model())
    assert found(report) == {("s-0", layer) for layer in layers}
    assert (report.verified, len(report.warnings)) == (0, len(layers))
    assert all(problem.key and problem.serial for problem in report.problems)


def test_rows_of_one_chunk_are_named(tmp_path: Path) -> None:
    def second_chunk(rows: torch.Tensor, ids: list[int]) -> torch.Tensor:
        if len(ids) > CHUNK:
            rows[CHUNK : 2 * CHUNK] = states(ids[::-1])[CHUNK : 2 * CHUNK]
        return rows

    report = verify(capture(tmp_path, second_chunk), SAMPLES, recompute=model())
    assert found(report) == {(sample, layer) for sample in ("s-0", "s-3") for layer in ALL}
    assert {problem.rows for problem in report.problems} == {((100, 200),), ((100, 130),)}
    assert report.verified == 3
    assert f"{model()} computes other states for this prompt: they differ by 1." in str(report.problems[0])


@pytest.mark.parametrize(
    ("away", "warned", "wrong"), [(0.02, False, False), (0.18, True, False), (0.4, True, True)], ids=str
)
def test_noise_is_borne_then_warned_of_then_wrong(tmp_path: Path, away: float, warned: bool, wrong: bool) -> None:
    def noisy(rows: torch.Tensor, _: list[int]) -> torch.Tensor:
        signs = torch.randn(rows.shape, generator=torch.Generator().manual_seed(0)).sign()
        return rows * (1 + away * signs).bfloat16()

    report = verify(capture(tmp_path, noisy), SAMPLES, recompute=model())
    assert [each.median for each in report.recomputed] == pytest.approx(
        [away] * 4, rel=0.1
    )  # its own rounding to bfloat16 included
    assert len(report.warnings) == 4 * warned
    assert found(report) == {(sample, layer) for sample, *_ in SAMPLES for layer in ALL if wrong}


@pytest.mark.parametrize(("together", "wrong"), [(FOREIGN_RUN - 1, False), (FOREIGN_RUN, True)])
def test_rounding_may_decide_single_rows(tmp_path: Path, together: int, wrong: bool) -> None:
    def spoil(rows: torch.Tensor, _: list[int]) -> torch.Tensor:
        rows[10 : 10 + together] *= -1
        rows[20::2] *= -1
        return rows

    report = verify(capture(tmp_path, spoil, prompts=[PROMPTS[0]]), SAMPLES[:1], recompute=model())
    assert [problem.rows for problem in report.problems] == [((10, 10 + together),)] * 4 * wrong


def test_all_of_a_short_prompt_is_judged(tmp_path: Path) -> None:
    capture(tmp_path, lambda rows, ids: -rows if len(ids) == 1 else rows)
    assert found(verify(tmp_path, SAMPLES, recompute=model())) == {("s-2", layer) for layer in ALL}


def test_weights_that_are_no_numbers_give_no_match(tmp_path: Path) -> None:
    broken = tmp_path / "model"
    whole = whole_model(0)
    whole.model.layers[5].mlp.down_proj.weight.data.fill_(float("nan"))
    whole.save_pretrained(broken)
    report = verify(capture(tmp_path / "captures"), SAMPLES, recompute=broken)
    assert found(report) == {(sample, layer) for sample, *_ in SAMPLES for layer in ("boundary 6", "final (post-norm)")}
    json.loads(json.dumps(report.to_json(), allow_nan=False))


def test_records_that_are_damaged_are_left_to_the_other_checks(tmp_path: Path) -> None:
    def spoil(rows: torch.Tensor, ids: list[int]) -> torch.Tensor:
        rows[:, :, 5] = float("nan") if len(ids) == 5 else rows[:, :, 5]
        return rows

    capture(tmp_path, spoil)
    report = verify(tmp_path, SAMPLES, recompute=model())
    assert {problem.kind for problem in report.problems} == {"nan"}
    assert (report.recomputed_records, report.verified) == (4, 4)


def test_quick_and_recompute_together(tmp_path: Path) -> None:
    capture(tmp_path)
    assert verify(tmp_path, quick=True, recompute=model()).recomputed_records == 5
    # A frame whose checksum is right and whose values cannot be decoded: only who reads them sees it.
    tampered = Tampered(next(tmp_path.glob("*.safetensors")))
    tampered.frames[tampered.of_serial(1)[0]][HEADER_BYTES : HEADER_BYTES + 8] = 0
    tampered.reseal()
    assert verify(tmp_path, quick=True).ok
    report = verify(tmp_path, SAMPLES, quick=True, recompute=model())
    assert [(problem.kind, problem.sample_ids) for problem in report.problems] == [("stored_sum", ("s-0",))]
    assert (report.recomputed_records, report.verified) == (4, 4)


def test_the_command_line(tmp_path: Path, hashtap: Hashtap, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    right, noisy, wrong = tmp_path / "right", tmp_path / "noisy", tmp_path / "wrong"
    samples = tmp_path / "samples.jsonl"
    samples.write_text("".join(json.dumps({"id": name, "input_ids": ids}) + "\n" for name, ids, _ in SAMPLES))
    capture(right)
    capsys.readouterr()  # the bar of this test's own loading
    code, out, err = hashtap("verify", right, "--samples", samples, "--recompute", model())
    *layers, summary = out.splitlines()
    assert (code, err) == (0, "")
    assert layers[0] == "compared: boundary 1: 500 rows, relative difference median 0, 99 % 0, max 0, mean 0"
    assert len(layers) == 4
    assert "5/5 verified" in summary
    assert "5 records recomputed" in summary

    capture(noisy, lambda rows, _: rows * torch.tensor(1.1875).bfloat16())
    command = ("verify", noisy, "--recompute", model(), "--recompute-records", 1)
    code, out, _ = hashtap(*command)
    assert code == 0
    assert "warning: boundary 4: 99 % of the rows differ by up to 0.188, and rounding explains 0.125: " in out
    answer = json.loads(hashtap(*command, "--json")[1])
    assert (answer["ok"], answer["recomputed_records"], len(answer["warnings"])) == (True, 1, 4)
    assert answer["recomputed"][3]["layer"] == "final (post-norm)"
    assert answer["recomputed"][3]["p99"] == pytest.approx(0.19, abs=0.01)

    capture(wrong, lambda rows, ids: states(ids[::-1]) if len(ids) == 130 else rows)
    command = ("verify", wrong, "--samples", samples, "--recompute", model(), "--set-aside")
    code, out, _ = hashtap(*command)
    assert code == 1
    assert "recomputed: sample s-3, key " in out
    assert "1 records set aside" in out
    code, out, _ = hashtap("verify", wrong, "--recompute", model())
    assert (code, "4/4 verified" in out, "1 set aside" in out) == (0, True, True)


def config_only(path: Path, **changes: object) -> Path:
    """A model directory without weights."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(json.loads((model() / "config.json").read_text()) | changes))
    return path


def test_what_is_not_the_model_is_one_clear_line(
    tmp_path: Path,
    hashtap: Hashtap,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    captures = capture(tmp_path / "captures", prompts=PROMPTS[1:3])
    capsys.readouterr()
    torn = config_only(tmp_path / "torn")
    weights = (model() / "model.safetensors").read_bytes()
    (torn / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    cases: list[tuple[Path, str]] = [
        (tmp_path / "none", "is no model's config.json"),
        (config_only(tmp_path / "wide", hidden_size=512), "has a hidden size of 512, what was captured 256"),
        (config_only(tmp_path / "low", num_hidden_layers=6), "has 6 decoder layers, so no boundary 6"),
        (config_only(tmp_path / "empty"), "cannot load"),
        (torn, "cannot load"),
        (config_only(tmp_path / "unknown", model_type="nonesuch", architectures=["Nonesuch"]), "cannot load"),
    ]
    for directory, message in cases:
        code, out, err = hashtap("verify", captures, "--recompute", directory)
        assert (code, out) == (2, "")
        assert message in only_line(err)
        assert "give the directory of the model that was served" in err or directory.name == "none"


def test_weights_that_are_not_all_there(tmp_path: Path) -> None:
    deeper = config_only(tmp_path / "deeper", num_hidden_layers=N + 1)
    shutil.copy(model() / "model.safetensors", deeper)
    captures = capture(tmp_path / "captures", prompts=PROMPTS[1:2])
    with pytest.raises(UsageError, match=r"9 of its weights are missing, model\.layers\.8\."):
        verify(captures, recompute=deeper)


def test_ids_that_the_model_does_not_have(tmp_path: Path) -> None:
    small = tmp_path / "model"
    whole = whole_model(0)
    whole.resize_token_embeddings(min(PROMPTS[1]))
    whole.save_pretrained(small)
    captures = capture(tmp_path / "captures", prompts=PROMPTS[1:2])
    report = verify(captures, recompute=small)
    (problem,) = report.problems
    assert re.search(r"cannot compute the 5 tokens of [0-9a-f]{32}: ", str(problem))
    assert (report.recomputed, report.recomputed_records) == ([], 0)
    assert add_set_aside(captures, report.problems) == 0  # nothing is known to be wrong with the record


def test_captures_of_several_weights(tmp_path: Path) -> None:
    for epoch in ("e0", "e1"):
        with Host(tmp_path, GEOMETRY, changes={"epoch": epoch}) as host:
            host.capture(PROMPTS[1:2])
    with pytest.raises(UsageError, match="captures of 2 weights: choose --epoch to recompute"):
        verify(tmp_path, recompute=model())


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_a_package_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    captures = capture(tmp_path, prompts=PROMPTS[1:2])
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(UsageError, match=f"--recompute needs {missing}: pip install torch transformers"):
        verify(captures, recompute=model())


def test_what_no_model_computes_in(tmp_path: Path) -> None:
    geometry = Geometry(GEOMETRY.layers, models.TINY_HIDDEN, Dtype.FP8_E4M3)
    with Host(tmp_path, geometry) as host:
        host.capture([[1, 2, 3]])
    with pytest.raises(UsageError, match="no model computes in float8_e4m3fn"):
        verify(tmp_path, recompute=model())


def test_an_empty_directory_has_nothing_to_recompute(tmp_path: Path) -> None:
    Host(tmp_path).writer.close()
    report = verify(tmp_path, recompute=tmp_path)
    assert [problem.kind for problem in report.problems] == ["missing"]
    assert report.recomputed_records == 0
