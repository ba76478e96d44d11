"""The sides as data: what starts them, what is asked of them, and how what they gave is counted."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from hashtap.bench.counted import Got, count_dump, count_json
from hashtap.bench.dump import make_hook
from hashtap.bench.prompts import Lengths, cut_prompts, random_prompts, sample_prompts
from hashtap.bench.sides import RID_PREFIX, Case, Side, make_sides, split_flags
from hashtap.errors import UsageError
from hashtap.model_config import ModelShape

GOLDEN = Path(__file__).parents[1] / "golden" / "captures"


def sides(work: Path, *against: str, layers: tuple[int, ...] | None = (1, 4, 6)) -> dict[str, Side]:
    case = Case("/models/m", work, ("--device", "cpu"), ("--capture-ring-gib", "0.25"), layers)
    return {side.name: side for side in make_sides(case, against)}


def test_three_sides_are_always_measured_and_peers_on_demand(tmp_path: Path) -> None:
    assert list(sides(tmp_path)) == ["plain", "aux", "hashtap"]
    assert list(sides(tmp_path, "dump", "http")) == ["plain", "aux", "hashtap", "http", "dump"]
    with pytest.raises(UsageError, match="--against vllm: choose from http, dump, transformers"):
        sides(tmp_path, "vllm")


def test_servers_differ_in_capture_alone(tmp_path: Path) -> None:
    """One command, to which each side adds its own; capture flags go to no other."""
    found = sides(tmp_path, "http", "dump", "transformers")
    plain = found["plain"].command
    assert plain[-2:] == ("--device", "cpu")
    assert "--disable-radix-cache" in plain
    for name in ("aux", "hashtap", "http", "dump"):
        assert found[name].command[: len(plain)] == plain, name
        assert ("--capture-ring-gib" in found[name].command) == (name == "hashtap"), name
    assert {name for name, side in found.items() if side.gives_states} == {"hashtap", "http", "dump", "transformers"}


def test_all_sides_mean_the_same_layers(tmp_path: Path) -> None:
    """Boundary b is the output of decoder layer b - 1, which is how SGLang's own flag counts."""
    found = sides(tmp_path)
    assert found["aux"].command[-4:] == ("--return-aux-hidden-state-layer-ids", "0", "3", "5")
    assert " ".join(found["hashtap"].command).endswith("--capture-layers 1 4 6 --capture-ring-gib 0.25")
    default = sides(tmp_path, layers=None)
    assert default["aux"].command[-1] == "EAGLE3"
    assert "--capture-layers" not in default["hashtap"].command
    with pytest.raises(UsageError, match="--layers 0"):
        sides(tmp_path, layers=(0, 4))


def test_capture_flags_are_told_from_sglangs() -> None:
    flags = ("--capture-layers", "1", "4", "--tp", "2", "--capture-codec=none", "--disable-radix-cache")
    assert split_flags(flags) == (
        ("--tp", "2", "--disable-radix-cache"),
        ("--capture-layers", "1", "4", "--capture-codec=none"),
    )


def test_json_states_are_counted_without_those_of_generated_tokens() -> None:
    matrix, generated = np.zeros((91, 12)).tolist(), np.zeros(12).tolist()
    answer = json.dumps({"meta_info": {"hidden_states": [matrix, generated]}}).encode()
    assert count_json(answer) == Got(91, 12, len(answer))
    assert count_json(b'{"meta_info": {}}').rows == 0


def test_what_came_is_as_wide_as_its_narrowest_part() -> None:
    assert sum([Got(3, 12, 5), Got(), Got(4, 8, 6)], Got()) == Got(7, 8, 11)


class Pass:
    """What the hook reads of a forward pass: two requests, the second one's last rows of 5."""

    rids = (RID_PREFIX + "a", RID_PREFIX + "b", "uncounted-c")
    extend_seq_lens_cpu = (3, 2, 1)
    extend_prefix_lens_cpu = (0, 3, 0)
    forward_mode = type("Mode", (), {"is_extend": staticmethod(lambda: True)})


@pytest.mark.parametrize("packed", [False, True])
def test_the_minimal_dump_writes_each_request_and_layer(tmp_path: Path, packed: bool) -> None:
    final = torch.arange(6 * 4, dtype=torch.bfloat16).reshape(6, 4)
    aux = [final + 100 * layer for layer in (1, 2, 3)]
    states = torch.cat(aux, -1) if packed else aux
    make_hook({"folder": str(tmp_path)})(None, (None, final, None, Pass, states), None)
    assert len(list(tmp_path.iterdir())) == 2 * 4
    assert torch.equal(torch.load(tmp_path / f"{RID_PREFIX}b-3-1.pt"), aux[1][3:5])
    assert torch.equal(torch.load(tmp_path / f"{RID_PREFIX}a-0-3.pt"), final[:3])
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert count_dump(tmp_path, []) == Got(5, 16, size)
    (tmp_path / f"{RID_PREFIX}b-3-1.pt").unlink()
    assert count_dump(tmp_path, []).rows == 3, "a row counts where all of its layers are there"


def test_prompts_are_repeatable_and_within_bounds(tmp_path: Path) -> None:
    prompts = random_prompts(512, 40, Lengths(3, 9, seed=5))
    assert prompts == random_prompts(512, 40, Lengths(3, 9, seed=5))
    assert {len(prompt) for prompt in prompts} == set(range(3, 10))
    assert all(0 <= token < 512 for prompt in prompts for token in prompt)
    assert list(cut_prompts(range(6), [1, 3])) == [[0], [1, 2, 3]]
    with pytest.raises(UsageError, match="9 to 3"):
        Lengths(9, 3).draw(1)
    samples = tmp_path / "s.jsonl"
    samples.write_text("\n".join(json.dumps({"input_ids": ids}) for ids in ([5, 6], [7], [5, 6], [])))
    assert sample_prompts(samples) == [[5, 6], [7]]


def test_the_shape_of_a_model(tmp_path: Path) -> None:
    text = {"num_hidden_layers": 61, "hidden_size": 7168, "vocab_size": 163840}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": text}))
    assert ModelShape.read(tmp_path) == ModelShape(61, 7168, 163840)
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 7168}))
    with pytest.raises(UsageError, match="does not say 'num_hidden_layers'"):
        ModelShape.read(tmp_path / "config.json")
    with pytest.raises(UsageError, match=r"is no model's config\.json"):
        ModelShape.read(tmp_path / "none")
