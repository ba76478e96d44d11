"""What hashtap hooks and reads is there in every tested SGLang: compared with its sources, nothing is imported."""

import logging
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.seam.signatures import read_committed

from hashtap.errors import SetupError
from hashtap.releases import check_sglang, classes_with_setter, installed_sglang, lacking, predates, read_signatures
from hashtap.targets import SINCE, TARGETS, TESTED_VERSIONS

FOUND, ROOT = installed_sglang()
COMMITTED = read_committed()
NEWER = "0.5.99"  # must have everything


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the sources that the tables name, to be damaged."""
    for module in {target.module for target in TARGETS}:
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


def missing(root: Path) -> list[str]:
    return lacking(NEWER, read_signatures(root))


def test_the_signatures_written_down_are_the_installed_ones() -> None:
    assert read_signatures(ROOT) == COMMITTED[FOUND], "run tests/seam/signatures.py with all tested releases"


@pytest.mark.parametrize("version", TESTED_VERSIONS)
def test_nothing_is_missing(version: str) -> None:
    assert lacking(version, COMMITTED[version]) == []


@pytest.mark.parametrize("version", TESTED_VERSIONS)
def test_what_came_later_is_what_a_release_lacks(version: str) -> None:
    later = {path for path, since in SINCE.items() if predates(version, since)}
    assert set(lacking(NEWER, COMMITTED[version])) == later


def test_every_target_is_named_once() -> None:
    paths = [target.path for target in TARGETS]
    assert len(paths) == len(set(paths))


def test_what_came_later_came_with_a_tested_release() -> None:
    assert set(SINCE.values()) <= set(TESTED_VERSIONS[1:])


def test_releases_in_order() -> None:
    assert predates("0.5.16", "0.5.18")
    assert predates("0.5.17.post1", "0.5.18")
    assert predates("0.5.19rc1", "0.5.20")
    for version in ("0.5.20", "0.5.100", "0.6.0", "1.0", "0.5.15", "0.0.0.dev1+g0123", "unknown", ""):
        assert not predates(version, "0.5.20"), version


def test_looking_imports_no_sglang() -> None:
    code = (
        "import sys; from hashtap.releases import *; found, root = installed_sglang(); check_sglang(found, root); "
        "assert classes_with_setter(root); print(sorted({'torch', 'triton', 'sglang'} & set(sys.modules)))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def test_renamed_function(copy: Path) -> None:
    edit(copy, "srt/managers/scheduler.py", "def get_new_batch_prefill(", "def next_prefill(")
    assert missing(copy) == ["sglang.srt.managers.scheduler.Scheduler.get_new_batch_prefill"]


def test_renamed_parameter(copy: Path) -> None:
    edit(
        copy,
        "srt/layers/logits_processor.py",
        "aux_hidden_states: Optional[AuxHiddenStates] = None,\n        hidden_states_before_norm",
        "extra_states: Optional[AuxHiddenStates] = None,\n        hidden_states_before_norm",
    )
    expected = "sglang.srt.layers.logits_processor.LogitsProcessor.forward(aux_hidden_states)"
    assert missing(copy) == [expected]


def test_parameter_in_another_place(copy: Path) -> None:
    edit(
        copy,
        "srt/managers/scheduler_components/request_receiver.py",
        "self, recv_reqs: Optional[List], local_reqs:",
        "self, recv_reqs: Optional[List], ranks: list, local_reqs:",
    )
    (path,) = [target.path for target in TARGETS if target.path.endswith("._broadcast_reqs_across_ranks")]
    assert missing(copy) == [f"{path}(local_reqs)"]


def test_a_local_variable_is_no_name_of_a_module(copy: Path) -> None:
    edit(copy, "srt/entrypoints/http_server.py", "\napp = ", "\ndef make():\n    app = None\n\nother = ")
    assert missing(copy) == ["sglang.srt.entrypoints.http_server.app"]


def test_renamed_field(copy: Path) -> None:
    edit(
        copy, "srt/model_executor/forward_batch_info.py", "    rids: Optional[List[str]] = None", "    ids: list = None"
    )
    assert missing(copy) == ["sglang.srt.model_executor.forward_batch_info.ForwardBatch.rids"]


@pytest.mark.parametrize("version", [FOUND, "0.5.24"])
def test_a_release_without_a_target_is_refused_by_name(copy: Path, version: str) -> None:
    edit(copy, "srt/managers/io_struct.py", "class ShutdownReq(", "class StopReq(")
    lacks = rf"SGLang {version} lacks sglang\.srt\.managers\.io_struct\.ShutdownReq, .*{TESTED_VERSIONS[-1]}"
    with pytest.raises(SetupError, match=lacks):
        check_sglang(version, copy)


def test_a_newer_release_must_have_what_came_later(copy: Path) -> None:
    edit(copy, "srt/server_args.py", "def resolve_once(", "def resolve(")
    with pytest.raises(SetupError, match=r"SGLang 0\.5\.24 lacks sglang\.srt\.server_args\.ServerArgs\.resolve_once"):
        check_sglang("0.5.24", copy)
    check_sglang("0.5.19", copy)


@pytest.mark.parametrize("version", ["0.5.17", "0.5.24"])
def test_an_unknown_release_with_all_targets_is_warned_of(version: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "hashtap"):
        check_sglang(version, ROOT)
    (record,) = caplog.records
    assert f"SGLang {version} was never tested with this hashtap, which knows 0.5.16" in record.getMessage()


def test_a_tested_release_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    check_sglang(FOUND, ROOT)
    assert not caplog.records


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
