"""Exports read back with torch, safetensors and pyarrow alone: every value, what is refused, resuming, memory."""

import json
import pickle
import re
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.capture.build import GEOMETRY, TORCH_DTYPE, Host, states_of
from torch import Tensor

from hashtap.__main__ import main
from hashtap.errors import FormatError, MismatchError, UsageError
from hashtap.identity import prompt_key
from hashtap.manifest import Manifest
from hashtap.reader import Reader
from hashtap.samples import Sample
from hashtap.trainers import arrow
from hashtap.trainers import export as export_module
from hashtap.trainers.export import export
from hashtap.trainers.source import Choice, TrainerSource
from hashtap.trainers.targets import TARGETS
from hashtap_kernels.layout import Dtype, Geometry

ROOT = Path(__file__).parents[2]
H = GEOMETRY.hidden
# The first has as many tokens as there are layers: axes that were swapped would fit too.
PROMPTS = [[n + 1, *range(length - 1)] for n, length in enumerate([4, 300, 1, 17, 256, 5])]
NAMES = ["a/b", "0", "s 2", "…", "s4", "again"]  # of samples; the last has the prompt of the second


def mask_of(ids: list[int]) -> list[int]:
    return [(position + ids[0]) % 2 for position in range(len(ids))]


def write_manifest(host: Host, prompts: list[list[int]], names: list[str], masks: bool = True) -> None:
    samples = [
        Sample(
            name,
            line,
            prompt_key(ids),
            np.array(ids, np.int32),
            np.array(mask_of(ids), np.uint8) if masks else None,
        )
        for line, (name, ids) in enumerate(zip(names, prompts, strict=True), 1)
    ]
    Manifest.merge(host.directory.path, samples, epoch="weights-1", directory_uuid=host.directory.uuid)


def capture(path: Path, geometry: Geometry = GEOMETRY, **changes: Any) -> Path:
    """A capture directory of :data:`PROMPTS` with a manifest of samples and masks."""
    with Host(path, geometry, changes=changes, threads=1) as host:
        host.capture(PROMPTS)
    write_manifest(host, [*PROMPTS[:5], PROMPTS[1]], NAMES)
    return path


@pytest.fixture(scope="module")
def post(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return capture(tmp_path_factory.mktemp("post"))


@pytest.fixture(scope="module")
def pre(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return capture(tmp_path_factory.mktemp("pre"), final_norm="pre")


def wanted(index: int, geometry: Geometry = GEOMETRY) -> tuple[list[int], Tensor]:
    """Ids and states ``[T, L, H]`` of sample ``index``."""
    ids = [*PROMPTS[:5], PROMPTS[1]][index]
    bits = {1: np.uint8, 2: np.int16, 4: np.int32}[geometry.dtype.element_bytes]
    return ids, torch.from_numpy(states_of(ids, geometry).view(bits)).view(TORCH_DTYPE[geometry.dtype])


def load(path: Path) -> dict[str, Any]:
    fields: dict[str, Any] = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
    return fields


def model_dir(path: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    path.mkdir(exist_ok=True)
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"model_type": "llama"} | config))
    return path


def assert_equal(found: Any, expected: Any) -> None:
    """Bit by bit, shape and dtype included."""
    assert type(found) is type(expected)
    if isinstance(expected, Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert (
            found.numpy(force=True).tobytes() == expected.numpy(force=True).tobytes()
            if (expected.dtype != torch.bfloat16)
            else torch.equal(found.view(torch.int16), expected.view(torch.int16))
        )
    else:
        assert found == expected


def as_written(target: str, index: int, prenorm: bool, geometry: Geometry = GEOMETRY) -> dict[str, Any]:
    """What the trainer's file must hold, said once more."""
    ids, states = wanted(index, geometry)
    tokens, mask = torch.tensor(ids), torch.tensor(mask_of(ids))
    aux, final = torch.cat([states[:, 0], states[:, 1], states[:, 2]], dim=1), states[:, 3]
    if target == "specforge":
        return {"input_ids": tokens, "loss_mask": mask, "aux_hidden_state": aux[None], "hidden_state": final[None]}
    if target == "speculators":
        return {"hidden_states": states, "token_ids": tokens}
    if target == "modelopt":
        return {
            "conversation_id": NAMES[index],
            "input_ids": tokens,
            "hidden_states": final,
            "aux_hidden_states": aux,
            "hidden_states_prenorm": prenorm,
            "loss_mask": mask,
        }
    if target == "angelslim":
        return {
            "input_ids": tokens[None],
            "loss_mask": mask[None],
            "hidden_states": aux[None],
            "target_hiddens": final[None],
        }
    return {"input_ids": tokens, "hidden_states": states, "loss_mask": mask.to(torch.uint8)}


@pytest.mark.parametrize(
    ("target", "norm"),
    [
        ("specforge", "post"),
        ("speculators", "pre"),
        ("modelopt", "post"),
        ("modelopt", "pre"),
        ("angelslim", "post"),
        ("safetensors", "pre"),
    ],
)
def test_every_value_is_the_captured_one(post: Path, pre: Path, tmp_path: Path, target: str, norm: str) -> None:
    source = TrainerSource(post if norm == "post" else pre, target)
    exported = export(source, tmp_path / "out", threads=3)
    assert (exported.samples, exported.written, exported.skipped, exported.missing) == (6, 6, 0, 0)
    lines = [json.loads(line) for line in (tmp_path / "out" / "hashtap-samples.jsonl").read_text().splitlines()]
    assert [line["sample_id"] for line in lines] == NAMES
    assert [line["tokens"] for line in lines] == [4, 300, 1, 17, 256, 300]
    for index, line in enumerate(lines):
        path = tmp_path / "out" / line["file"]
        found, expected = load(path), as_written(target, index, norm == "pre")
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert_equal(found[name], value)
        # A view would drag the storage of the whole sample into the file.
        values = sum(value.nbytes for value in expected.values() if isinstance(value, Tensor))
        assert path.stat().st_size < values + 8192
    assert not [path for path in (tmp_path / "out").rglob("*") if path.name.endswith(".partial")]


@pytest.mark.parametrize("dtype", [Dtype.FP16, Dtype.FP32])
def test_other_types_stay_what_they_are(tmp_path: Path, dtype: Dtype) -> None:
    geometry = Geometry(4, 24, dtype)
    source = TrainerSource(capture(tmp_path, geometry), "specforge")
    for name, value in as_written("specforge", 1, False, geometry).items():
        assert_equal(source[1][name], value)


def test_the_same_without_files_and_in_another_process(pre: Path) -> None:
    source = pickle.loads(pickle.dumps(TrainerSource(pre, "speculators")))
    for index in range(6):
        for name, value in as_written("speculators", index, True).items():
            assert_equal(source[index][name], value)


def test_other_weights_that_come_later_change_nothing(tmp_path: Path) -> None:
    source = TrainerSource(capture(tmp_path, final_norm="pre"), "speculators")
    with Host(tmp_path, changes={"final_norm": "pre", "epoch": "weights-2"}, threads=1) as host:
        host.capture(PROMPTS)
    for index, prompt in enumerate(PROMPTS[:3]):
        for each in (source, pickle.loads(pickle.dumps(source))):
            assert each.token_ids(index).tolist() == prompt
            assert len(each.view(index).states) == len(prompt)


def test_row_p_belongs_to_token_p(tmp_path: Path) -> None:
    """Nothing is shifted: ids 0 to 9, states that say their position, a mask that differs at each end."""
    ids = list(range(10))
    with Host(tmp_path) as host:
        values = torch.arange(10.0).bfloat16().view(10, 1, 1).expand(10, 4, H)
        states = values.contiguous().view(torch.int16).numpy().view(np.uint16)
        host.forward([(host.record(ids), states, 0, 10)])
    mask = [1, 0, 0, 0, 1, 1, 0, 1, 1, 0]
    (tmp_path / "s.jsonl").write_text(json.dumps({"id": "ten", "input_ids": ids, "loss_mask": mask}))
    for target, names in (
        ("specforge", ("aux_hidden_state", "hidden_state")),
        ("modelopt", ("aux_hidden_states", "hidden_states")),
        ("angelslim", ("hidden_states", "target_hiddens")),
    ):
        fields: Any = TrainerSource(tmp_path, target, Choice(samples=tmp_path / "s.jsonl"))[0]
        for name in names:
            rows = fields[name].reshape(10, -1)[:, [0, -1]]
            assert rows.tolist() == [[p, p] for p in range(10)], (target, name)
        assert fields["input_ids"].flatten().tolist() == ids
        assert fields["loss_mask"].flatten().tolist() == mask


def test_speculators_dataset(pre: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut into batches, as the 32-bit offsets of a large one demand."""
    monkeypatch.setattr(arrow, "_BATCH_TOKENS", 300)
    export(TrainerSource(pre, "speculators"), tmp_path)
    with pa.ipc.open_stream(tmp_path / "data-00000-of-00001.arrow") as stream:
        table = stream.read_all()
    ids = [wanted(index)[0] for index in range(6)]
    assert table["input_ids"].to_pylist() == ids
    assert table["loss_mask"].to_pylist() == [mask_of(row) for row in ids]
    assert table["seq_len"].to_pylist() == [len(row) for row in ids]
    assert [len(chunk) for chunk in table["input_ids"].chunks] == [1, 1, 3, 1]
    state = json.loads((tmp_path / "state.json").read_text())
    assert state["_format_type"] == "torch"
    counted: dict[int, int] = {}
    for row in ids:
        for token, real in zip(row, mask_of(row), strict=True):
            if real:
                counted[token] = counted.get(token, 0) + 1
    assert torch.load(tmp_path / "token_freq.pt", weights_only=True) == counted


def test_notes_say_how_to_read_it(pre: Path, post: Path, tmp_path: Path) -> None:
    for target, layer_ids, means in (
        ("specforge", [1, 2, 3], "output of decoder layer i"),
        ("angelslim", [1, 2, 3], "output of decoder layer i"),
        ("modelopt", [1, 2, 3], "output of decoder layer i"),
        ("speculators", [2, 3, 4], "boundary"),
        ("safetensors", [2, 3, 4], "boundary"),
    ):
        directory = pre if target == "speculators" else post
        exported = export(TrainerSource(directory, target), tmp_path / target)
        notes = json.loads(Path(exported.notes).read_text())
        assert (notes["target"], notes["layer ids"], notes["boundaries"]) == (target, layer_ids, [2, 3, 4])
        assert means in notes["layer id means"]
        assert " ".join(map(str, layer_ids)) in notes["tell the trainer"]
        assert notes["directory"] == Reader(directory).directory.uuid
        assert notes["final state"]["done"] == "copied bit by bit"
        where = "before" if target == "speculators" else "after"
        assert notes["final state"]["written"] == notes["final state"]["captured"] == f"{where} the final norm"
        assert notes["fields"].keys() >= as_written(target, 0, False).keys()
        assert (notes["samples"], notes["tokens"], notes["weights"]) == (6, 878, "weights-1")


# The final norm.


def test_a_norm_is_undone_for_who_applies_it(post: Path, tmp_path: Path) -> None:
    weight = torch.rand(H) * 3 + 0.5
    model = model_dir(tmp_path / "model", {"model.norm.weight": weight, "model.layers.0.norm.weight": weight + 1})
    source = TrainerSource(post, "speculators", Choice(model=model))
    exported = export(source, tmp_path / "out")
    for index in range(6):
        states = load(tmp_path / "out" / TARGETS["speculators"].file(index))["hidden_states"]
        _, captured = wanted(index)
        assert_equal(states[:, :-1].contiguous(), captured[:, :-1].contiguous())
        assert_equal(states[:, -1].contiguous(), (captured[:, -1].float() / weight).bfloat16())
    final = json.loads(Path(exported.notes).read_text())["final state"]
    assert final["captured"] == "after the final norm"
    assert final["written"] == "before the final norm"
    assert final["done"] == f"divided by model.norm.weight of {model}, in float32"


# Refusals.


@pytest.mark.parametrize(
    ("target", "norm", "choice", "message"),
    [
        (
            "speculators",
            "post",
            {},
            r"reads the final state before .* give --model DIR .* --capture-final pre",
        ),
        ("specforge", "pre", {}, r"reads the final state after .* capture with --capture-final post"),
        ("angelslim", "pre", {}, r"reads the final state after .* capture with --capture-final post"),
        ("eagle", "post", {}, r"'eagle' is no trainer .* take one of specforge, speculators"),
        ("modelopt", "post", {"layers": (2, 3)}, r"reads 3 auxiliary layers, and these are 2: choose 3 of \[2, 3, 4\]"),
        ("modelopt", "post", {"layers": (3, 2, 4)}, r"not in rising order.* --layers 2,3,4"),
        ("modelopt", "post", {"layers": (2, 3, 3)}, r"not in rising order.* --layers 2,3"),
        ("modelopt", "post", {"layers": (2, 3, 5)}, r"boundary 5 is not captured; the captures have \[2, 3, 4\]"),
        ("modelopt", "post", {"epoch": "weights-9"}, r"nothing is captured"),
    ],
)
def test_wrong_combinations(
    post: Path, pre: Path, target: str, norm: str, choice: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        TrainerSource(post if norm == "post" else pre, target, Choice(**choice))


def test_layers_in_another_order_are_put_in_order(tmp_path: Path) -> None:
    """What a server of odd habits captured as 9, 2, 4 is refused as it is, and taken rightly when asked for."""
    capture(tmp_path, boundaries=(9, 2, 4))
    with pytest.raises(UsageError, match=r"layers \[9, 2, 4\] are not in rising order.*--layers 2,4,9"):
        TrainerSource(tmp_path, "modelopt")
    source = TrainerSource(tmp_path, "modelopt", Choice(layers=(2, 4, 9)))
    _, states = wanted(1)
    assert_equal(source[1]["aux_hidden_states"], torch.cat([states[:, 1], states[:, 2], states[:, 0]], dim=1))
    assert_equal(source[1]["hidden_states"], states[:, 3])
    assert source.layer_ids == [1, 3, 8]


def test_three_of_more_layers(tmp_path: Path) -> None:
    geometry = Geometry(6, 24)
    capture(tmp_path, geometry, boundaries=(0, 2, 4, 5, 6))
    with pytest.raises(UsageError, match="reads 3 auxiliary layers, and these are 5"):
        TrainerSource(tmp_path, "specforge")
    with pytest.raises(UsageError, match="boundary 0, the embeddings, is no decoder layer's output"):
        TrainerSource(tmp_path, "specforge", Choice(layers=(0, 2, 4)))
    source = TrainerSource(tmp_path, "specforge", Choice(layers=(2, 5, 6)))
    _, states = wanted(3, geometry)
    assert_equal(source[3]["aux_hidden_state"], states[None, :, [1, 3, 4]].flatten(2))
    assert_equal(source[3]["hidden_state"], states[None, :, 5])
    assert source.layer_ids == [1, 4, 5]


def test_each_takes_the_final_state_that_it_reads(tmp_path: Path) -> None:
    geometry = Geometry(5, 24)
    capture(tmp_path, geometry, boundaries=(2, 3, 4), final_norm="both")
    _, states = wanted(3, geometry)
    for target, name, final in (
        ("specforge", "hidden_state", states[None, :, 4]),
        ("angelslim", "target_hiddens", states[None, :, 4]),
        ("modelopt", "hidden_states", states[:, 4]),
        ("speculators", "hidden_states", states[:, [0, 1, 2, 3]]),
        ("safetensors", "hidden_states", states),
    ):
        source = TrainerSource(tmp_path, target)
        assert_equal(source[3][name], final)
        assert source.prenorm == (target == "speculators")
    assert source[3].keys() == {"input_ids", "hidden_states", "loss_mask"}


def test_float8_is_for_no_trainer(tmp_path: Path) -> None:
    capture(tmp_path, Geometry(4, 24, Dtype.FP8_E4M3))
    with pytest.raises(UsageError, match="reads no float8 states"):
        TrainerSource(tmp_path, "modelopt")
    assert TrainerSource(tmp_path, "safetensors")[0]["hidden_states"].dtype == torch.float8_e4m3fn  # type: ignore[union-attr]


def test_samples_without_masks(tmp_path: Path) -> None:
    with Host(tmp_path / "c", threads=1) as host:
        host.capture(PROMPTS[:2])
    with pytest.raises(UsageError, match=r"no loss mask, which specforge needs: .* --samples FILE, .* --loss-on-all"):
        TrainerSource(tmp_path / "c", "specforge")
    source = TrainerSource(tmp_path / "c", "specforge", Choice(loss_on_all=True))
    assert [sample.sample_id for sample in source.samples] == [prompt_key(ids).hex() for ids in PROMPTS[:2]]
    assert source[1]["loss_mask"].tolist() == [1] * 300  # type: ignore[union-attr]
    assert "loss_mask" not in TrainerSource(tmp_path / "c", "modelopt")[0]
    write_manifest(host, PROMPTS[:2], ["x", "y"], masks=False)
    with pytest.raises(UsageError, match="sample 'x' has no loss mask"):
        TrainerSource(tmp_path / "c", "angelslim")
    lines = [json.dumps({"id": "y", "input_ids": PROMPTS[1], "loss_mask": [0, *[1] * 299]})]
    (tmp_path / "s.jsonl").write_text("\n".join(lines))
    chosen = TrainerSource(tmp_path / "c", "angelslim", Choice(samples=tmp_path / "s.jsonl"))
    assert [sample.sample_id for sample in chosen.samples] == ["y"]
    assert chosen[0]["loss_mask"].tolist() == [[0, *[1] * 299]]  # type: ignore[union-attr]


def test_samples_that_are_missing_or_unusable(post: Path, tmp_path: Path) -> None:
    lines = [{"id": "m", "input_ids": [7, 7]}, {"id": "a", "input_ids": PROMPTS[0]}, {"id": "bad", "input_ids": []}]
    samples = tmp_path / "s.jsonl"
    samples.write_text("\n".join(map(json.dumps, lines[:2])))
    with pytest.raises(UsageError, match=r"1 of 2 samples are not captured, the first is 'm': .* --skip-missing"):
        TrainerSource(post, "modelopt", Choice(samples=samples))
    samples.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(UsageError, match=r"1 lines of .* the first is line 3 \(empty prompt"):
        TrainerSource(post, "modelopt", Choice(samples=samples))
    source = TrainerSource(post, "modelopt", Choice(samples=samples, skip_missing=True))
    assert ([sample.sample_id for sample in source.samples], source.missing) == (["a"], ["m"])
    samples.write_text(json.dumps(lines[0]))
    with pytest.raises(UsageError, match="none of the 1 samples is captured"):
        TrainerSource(post, "modelopt", Choice(samples=samples, skip_missing=True))


def test_a_mask_of_another_length(tmp_path: Path) -> None:
    path = capture(tmp_path)
    manifest = Manifest.load(path)
    table = manifest._table
    masks = table["loss_mask"].to_pylist()
    masks[0] = masks[0][:-1]
    Manifest(table.set_column(4, table.schema.field(4), pa.array(masks, pa.list_(pa.uint8()))))._write(path)
    with pytest.raises(MismatchError, match="the loss mask of sample 'a/b' has 3 elements and its capture 4 tokens"):
        TrainerSource(path, "modelopt")


def test_notes_keep_the_tokenizer_and_no_leave_to_run_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t").mkdir()
    monkeypatch.chdir(tmp_path)
    choice = Choice(tokenizer="t", chat_template=Path("c.jinja"), trust_remote_code=True)
    plain = json.loads(json.dumps(choice.to_json()))
    kept = Choice(tokenizer=str(tmp_path / "t"), chat_template=tmp_path / "c.jinja")
    assert Choice.from_json(plain) == Choice.from_json(plain | {"trust_remote_code": True}) == kept
    assert Choice(tokenizer="org/name").to_json()["tokenizer"] == "org/name"


# Resuming.


def stamps(out: Path) -> dict[str, int]:
    return {str(path.relative_to(out)): path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}


@pytest.mark.parametrize("target", ["specforge", "speculators"])
def test_what_was_finished_is_not_written_again(
    post: Path, pre: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    source = TrainerSource(pre if target == "speculators" else post, target)
    whole, out = tmp_path / "whole", tmp_path / "out"
    export(source, whole)
    write = export_module._write_sample

    def stop_at_three(source: TrainerSource, index: int, out: Path) -> None:
        if index == 3:
            (out / source.target.file(2)).with_name(".torn.partial").write_bytes(b"half a file")
            raise KeyboardInterrupt
        write(source, index, out)

    monkeypatch.setattr(export_module, "_write_sample", stop_at_three)
    with pytest.raises(KeyboardInterrupt):
        export(source, out, threads=1)
    monkeypatch.undo()
    assert not (out / "state.json").exists(), "the dataset could be loaded before it is whole"
    before = {name: stamp for name, stamp in stamps(out).items() if not name.endswith(".partial")}
    exported = export(source, out)
    after = stamps(out)
    there = sum(name.endswith((".ckpt", ".safetensors")) for name in before)
    assert 3 <= there < 6
    assert (exported.written, exported.skipped) == (6 - there, there)
    del before["hashtap-export.json"]
    assert {name: after[name] for name in before} == before
    assert set(after) == set(stamps(whole))
    for name in after:
        assert (out / name).read_bytes() == (whole / name).read_bytes(), name
    assert export(source, out).written == 0
    again = stamps(out)
    assert again.pop("hashtap-export.json") >= after.pop("hashtap-export.json")
    assert again == after


def test_a_folder_that_holds_something_else(post: Path, tmp_path: Path) -> None:
    source = TrainerSource(post, "modelopt")
    export(source, tmp_path / "out")
    with pytest.raises(MismatchError, match=r"holds another export: it differs in target, .*fields"):
        export(TrainerSource(post, "specforge"), tmp_path / "out")
    with pytest.raises(MismatchError, match=r"it differs in loss masks"):
        export(TrainerSource(post, "modelopt", Choice(loss_on_all=True)), tmp_path / "out")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(UsageError, match=r"is not empty, thesis.tex is in it"):
        export(source, tmp_path / "mine")
    with pytest.raises(UsageError, match=r"cannot write to .*thesis.tex: "):
        export(source, tmp_path / "mine" / "thesis.tex")
    with export_module._alone(tmp_path / "out"), pytest.raises(UsageError, match="another export is writing to"):
        export(source, tmp_path / "out")


def test_a_damaged_capture_ends_it(tmp_path: Path) -> None:
    path = capture(tmp_path / "c")
    (shard,) = path.glob("*.safetensors")
    source = TrainerSource(path, "modelopt")
    reader = Reader(path)
    at = reader.shards[0].frames_at + int(reader.shards[0].index[1, 0]) + 300
    data = bytearray(shard.read_bytes())
    data[at] ^= 1
    shard.write_bytes(data)
    with pytest.raises(FormatError, match="Restore the shard from a copy"):
        export(source, tmp_path / "out", threads=1)
    assert (tmp_path / "out" / "sample_00000000.pt").exists()
    assert not (tmp_path / "out" / "sample_00000001.pt").exists()


def peak_bytes(path: Path, out: Path, samples: int) -> int:
    with Host(path) as host:
        host.capture([[n, *range(255)] for n in range(samples)])
    source = TrainerSource(path, "safetensors", Choice(loss_on_all=True))
    tracemalloc.start()
    try:
        assert export(source, out).written == samples
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_does_not_grow_with_the_samples(tmp_path: Path) -> None:
    """Two at a time, each 256 x 4 x 72 bfloat16 = 147 kB; what each sample leaves behind is its name and key."""
    few = peak_bytes(tmp_path / "few", tmp_path / "few-out", 20)
    many = peak_bytes(tmp_path / "many", tmp_path / "many-out", 220)
    assert few > 2 * 147_000
    assert many - few < 200 * 2_000


@pytest.mark.slow
def test_five_thousand_samples_in_flat_memory(tmp_path: Path) -> None:
    """The process's own memory does not grow from the 1,000th to the last of 5,000 samples; shards are mapped files."""
    with Host(tmp_path / "c", Geometry(4, 576)) as host:
        for first in range(0, 5000, 250):
            host.capture([[n, *range(4 + n % 32)] for n in range(first, first + 250)])
    source = TrainerSource(tmp_path / "c", "specforge", Choice(loss_on_all=True))
    own_kib: dict[int, int] = {}

    def note(done: int, samples: int, tokens: int, seconds: float) -> None:
        if done in (1000, samples):
            status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
            own_kib[done] = int(status["RssAnon"].split()[0])

    assert export(source, tmp_path / "out", progress=note).written == 5000
    print(f"own memory: {own_kib[1000]:,} KiB after 1,000 samples, {own_kib[5000]:,} KiB after 5,000")
    assert own_kib[5000] - own_kib[1000] < 8 * 1024
    assert len(list((tmp_path / "out").rglob("*.ckpt"))) == 5000


# The command line.


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs ``hashtap export`` in this process: exit code, standard output, standard error."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["hashtap", "export", *map(str, arguments)])
        with pytest.raises(SystemExit) as ending:
            main()
        return int(ending.value.code or 0), *capsys.readouterr()

    return run


def unmasked(home: Path) -> Path:
    path = home / "unmasked.jsonl"
    path.write_text(json.dumps({"input_ids": PROMPTS[1]}))
    return path


@pytest.mark.parametrize("page", ["speculators", "modelopt", "specforge", "angelslim"])
def test_the_commands_in_the_docs(
    post: Path, pre: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run, page: str
) -> None:
    """With captures as the page's own launch command makes them."""
    text = (ROOT / "docs" / "trainers" / f"{page}.md").read_text()
    (tmp_path / "captures").symlink_to(pre if "--capture-final pre" in text else post)
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"hashtap export (captures .*? --to \w+(?: --no-states)?)", text)
    assert commands
    for command in commands:
        assert run(*command.split())[0] == 0, command


def test_command_line(post: Path, tmp_path: Path, run: Run) -> None:
    code, out, err = run(post, tmp_path / "out", "--to", "modelopt")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        f"6 samples, 878 tokens for modelopt in {tmp_path}/out",
        f"  layer ids [1, 2, 3]; what they mean, and the norm: {tmp_path}/out/hashtap-export.json",
    ]
    code, out, err = run(post, tmp_path / "out", "--to", "modelopt", "--json")
    assert (code, json.loads(out)["skipped"], json.loads(out)["layer_ids"]) == (0, 6, [1, 2, 3])
    assert "  written before: 6" in run(post, tmp_path / "out", "--to", "modelopt")[1]
    assert "--loss-on-all" in run(post, tmp_path / "x", "--to", "specforge", "--samples", unmasked(tmp_path))[2]
    code, out, err = run(post, tmp_path / "other", "--to", "speculators")
    assert (code, out) == (2, "")
    assert err.startswith("hashtap: speculators reads the final state before the final norm")
    assert not (tmp_path / "other").exists()
