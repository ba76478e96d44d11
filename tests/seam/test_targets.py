"""What hashtap hooks and reads is there in the installed SGLang: compared with its sources, nothing is imported."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hashtap.errors import SetupError
from hashtap.targets import (
    HOOKS,
    NAMES,
    TESTED_VERSIONS,
    check_sglang,
    classes_with_setter,
    installed_sglang,
    missing_targets,
)

FOUND, ROOT = installed_sglang()


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the sources that the tables name, to be damaged."""
    for module in {hook.module for hook in HOOKS.values()} | {names.module for names in NAMES}:
        path = Path(*module.split(".")[1:]).with_suffix(".py")
        target = tmp_path / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, target)
    return tmp_path


def edit(root: Path, file: str, old: str, new: str) -> None:
    path = root / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_nothing_is_missing() -> None:
    assert list(missing_targets(ROOT)) == []
    check_sglang(FOUND, ROOT)


def test_looking_imports_no_sglang() -> None:
    code = (
        "import sys; from hashtap.targets import *; found, root = installed_sglang(); check_sglang(found, root); "
        "assert classes_with_setter(root); print(sorted({'torch', 'triton', 'sglang'} & set(sys.modules)))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def test_renamed_function(copy: Path) -> None:
    edit(copy, "srt/managers/scheduler.py", "def get_new_batch_prefill(", "def next_prefill(")
    assert list(missing_targets(copy)) == ["sglang.srt.managers.scheduler.Scheduler.get_new_batch_prefill"]


def test_renamed_parameter(copy: Path) -> None:
    edit(
        copy,
        "srt/layers/logits_processor.py",
        "aux_hidden_states: Optional[AuxHiddenStates] = None,\n        hidden_states_before_norm",
        "extra_states: Optional[AuxHiddenStates] = None,\n        hidden_states_before_norm",
    )
    expected = "sglang.srt.layers.logits_processor.LogitsProcessor.forward(aux_hidden_states)"
    assert list(missing_targets(copy)) == [expected]


def test_renamed_field(copy: Path) -> None:
    edit(
        copy, "srt/model_executor/forward_batch_info.py", "    rids: Optional[List[str]] = None", "    ids: list = None"
    )
    assert list(missing_targets(copy)) == ["sglang.srt.model_executor.forward_batch_info.ForwardBatch.rids"]


def test_a_version_without_a_target_is_refused_by_name(copy: Path) -> None:
    edit(copy, "srt/managers/io_struct.py", "class ShutdownReq(", "class StopReq(")
    with pytest.raises(
        SetupError, match=r"SGLang 0\.5\.24 lacks sglang\.srt\.managers\.io_struct\.ShutdownReq"
    ) as raised:
        check_sglang("0.5.24", copy, allow_unknown=True)
    assert TESTED_VERSIONS[-1] in str(raised.value)


@pytest.mark.parametrize("version", ["0.5.15", "0.5.24", "0.6.0", "unknown"])
def test_an_unknown_version_is_refused_unless_allowed(version: str) -> None:
    with pytest.raises(
        SetupError, match=f"SGLang {version} was never tested.*0\\.5\\.23.*HASHTAP_ALLOW_UNKNOWN_SGLANG=1"
    ):
        check_sglang(version, ROOT)
    check_sglang(version, ROOT, allow_unknown=True)


def test_classes_that_can_hand_out_layers() -> None:
    classes = classes_with_setter(ROOT)
    assert {"LlamaForCausalLM", "Qwen3ForCausalLM", "DeepseekV2ForCausalLM", "KimiK25ForConditionalGeneration"} <= set(
        classes
    )


def test_kimi_k25_hands_the_setter_on_to_its_language_model() -> None:
    source = (ROOT / "srt" / "models" / "kimi_k25.py").read_text()
    setter = source[source.index("def set_eagle3_layers_to_capture") :]
    body = setter[: setter.index("\n    def ", 10)]
    assert "self.language_model.set_eagle3_layers_to_capture(layer_ids)" in body
    assert "layers_to_capture =" not in body
