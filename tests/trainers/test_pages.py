"""``docs/trainers/*.md``, word for word: a real server, captures, export, the trainer's first steps.

The commands are those of the page. Shell functions of the same names add what a small model on a CPU needs, and send
each to its environment: the server's or the trainer's.
"""

import json
import math
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.capture.test_extract import free_port
from tests.models import smollm2
from tests.trainers.page import run_script, script_of

ROOT = Path(__file__).parents[2]
PAGES = {path.stem: path for path in (ROOT / "docs" / "trainers").glob("*.md") if path.stem != "README"}
ENVIRONMENT = {"specforge": "readers", "angelslim": "readers", "speculators": "speculators", "modelopt": "modelopt"}

WORDS = """
sglang() {
  OMP_WAIT_POLICY=PASSIVE $server/sglang "$@" --device cpu --port $port --max-total-tokens 16384 --sleep-on-idle \\
    --capture-ring-gib 0.25 --capture-seal-after-s 0.3 > server.log 2>&1 &
  until curl --silent --fail http://127.0.0.1:$port/health; do kill -0 $!; sleep 1; done
}
hashtap() { $server/python -m hashtap "${@/:30000/:$port}"; }
export OMP_NUM_THREADS=1 TRANSFORMERS_OFFLINE=1 COLUMNS=1000
"""

TRAINERS = {
    "angelslim": """
python() { $trainer/python "$@"; }
""",
    "modelopt": """
python() { $trainer/python "$@" 2; }
""",
    # The script in place of both only keeps speculators from asking for an accelerator.
    "speculators": """
python() { speculators "${@:3}"; }
speculators() {
  $trainer/python examples/speculators_on_cpu.py "$@" --draft-vocab-size 2048 --num-layers 1 --epochs 1 \\
    --draft-attn-impl sdpa --loss-implementation eager --hidden-states-dtype float32 --total-seq-len 256 \\
    --num-workers 0 --optimizer adamw >> train.log 2>&1
}
""",
    # What ends it on a CPU is what the page says; until then it has read the features and built drafter and teacher.
    "specforge": """
python() { $trainer/python "$@"; }
specforge() {
  $trainer/specforge "$@" --plan
  ! PYTHONPATH=only $trainer/specforge "$@" training.attention_backend=sdpa model.target_model_path=PLAIN \\
    model.lm_head_key=model.embed_tokens.weight > train.log 2>&1
  grep "FSDP needs a non-CPU accelerator device" train.log
}
""",
}


def lay_out(run: Path) -> None:
    """What the pages name and do not make: MODEL, samples.jsonl, examples."""
    (run / "MODEL").symlink_to(smollm2())
    (run / "examples").symlink_to(ROOT / "examples")
    command = [sys.executable, ROOT / "examples" / "text_samples.py", smollm2(), "8", "256"]
    with (run / "samples.jsonl").open("w") as samples:
        subprocess.run(command, stdout=samples, check=True)


def lay_out_for_specforge(run: Path) -> None:
    """SmolLM2 as SpecForge reads models, with an index and plain RoPE; and triton, which torch brings but on a CPU."""
    plain = run / "PLAIN"
    plain.mkdir()
    for file in smollm2().iterdir():
        (plain / file.name).symlink_to(file)
    config = json.loads((plain / "config.json").read_text())
    rope = config.pop("rope_parameters")
    (plain / "config.json").unlink()
    (plain / "config.json").write_text(json.dumps(config | {"rope_theta": rope["rope_theta"]}))
    index = {"weight_map": {"model.embed_tokens.weight": "model.safetensors"}}
    (plain / "model.safetensors.index.json").write_text(json.dumps(index))
    triton = find_spec("triton")
    assert triton is not None
    assert triton.submodule_search_locations is not None
    (run / "only").mkdir()
    (run / "only" / "triton").symlink_to(triton.submodule_search_locations[0])


def assert_trained(page: str, run: Path) -> None:
    """A first step was taken, where the trainer takes one on a CPU, or what it would begin with lies there."""
    if page == "modelopt":
        losses = json.loads((run / "out" / "losses.json").read_text())
        assert len(losses) == 2
        assert all(map(math.isfinite, losses))
    elif page == "speculators":
        losses = re.findall(r"train/loss=([\d.]+)", (run / "train.log").read_text())
        assert len(losses) == 14
        assert losses[7:] == losses[:7], "states from files and from shards"
        for checkpoints in ("checkpoints", "from_files"):
            config = json.loads((run / checkpoints / "checkpoint_best" / "config.json").read_text())
            assert config["eagle_aux_hidden_state_layer_ids"] == [2, 15, 27]
    else:
        samples = (run / "features" / "hashtap-samples.jsonl").read_text().splitlines()
        assert len(samples) == len(list((run / "features").rglob("*.ckpt"))) == 8


@pytest.mark.slow
@pytest.mark.server
@pytest.mark.trainer
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", sorted(PAGES))
def test_every_command(page: str, tmp_path: Path) -> None:
    trainer = ROOT / ".cache" / "trainers" / ENVIRONMENT[page]
    if not (trainer / ".installed").exists():
        pytest.skip(f"make test-trainer-{ENVIRONMENT[page]} makes the environment of this page")
    lay_out(tmp_path)
    if page == "specforge":
        lay_out_for_specforge(tmp_path)
    places = f"server={Path(sys.executable).parent} trainer={trainer / 'bin'} port={free_port()}"
    script = script_of(PAGES[page])
    output = tmp_path / "output"
    status = run_script("\n".join([places, WORDS, TRAINERS[page], script]), tmp_path, output, 840)
    logs = [path.read_text()[-3000:] for path in sorted(tmp_path.glob("*.log"))]
    assert status == 0, "\n".join([output.read_text()[-3000:], *logs])
    assert_trained(page, tmp_path)


def test_a_page_ends_at_the_first_command_that_fails(tmp_path: Path) -> None:
    page, output = tmp_path / "page.md", tmp_path / "output"
    page.write_text("```sh\necho one\n```\n```python\nprint('two')\n```\n```sh\nfalse\necho three\n```\n")
    assert run_script(f'python() {{ {sys.executable} "$@"; }}\n' + script_of(page), tmp_path, output, 60) == 1
    assert [line for line in output.read_text().splitlines() if "+" not in line] == ["one", "two"]
    page.write_text("```yaml\na: b\n```\n")
    with pytest.raises(AssertionError, match=r"page\.md has a block of 'yaml'"):
        script_of(page)
