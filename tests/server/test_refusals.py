"""A server that cannot capture as asked does not serve: it ends with one clear line and a non-zero status."""

from pathlib import Path

import pytest
from bench.server import Server
from tests import models
from tests.capture.build import Host
from tests.server.conftest import COMMON_FLAGS, capture_flags
from tests.server.waiting import wait_until

from hashtap.releases import installed_sglang, predates

pytestmark = pytest.mark.server


def refused(model: Path, *flags: object, environment: dict[str, str] | None = None) -> str:
    """The line that a server ends with which must not come up."""
    server = Server(model, *COMMON_FLAGS, *flags, threads=1, environment=environment)
    server.start()
    try:
        wait_until(lambda: server.process is not None and server.process.poll() is not None, 300, "the server to end")
    finally:
        status = server.kill()
    log = server.log_text()
    assert status != 0
    assert "ready to roll" not in log
    lines = [line for line in log.splitlines() if "hashtap: " in line]
    assert len(lines) == 1, log[-4000:]
    return lines[0]


@pytest.mark.cell("`--enable-return-hidden-states`", "refused", "at start")
def test_a_mode_that_cannot_be_captured(tmp_path: Path) -> None:
    line = refused(models.llama(), *capture_flags(tmp_path / "c"), "--enable-return-hidden-states")
    assert "--enable-return-hidden-states does not go together with capture" in line


@pytest.mark.cell("a boundary that the model does not have", "refused", "at start")
def test_a_boundary_that_the_model_does_not_have(tmp_path: Path) -> None:
    line = refused(models.llama(), *capture_flags(tmp_path / "c", 2, 4, 8))
    assert "--capture-layers 8: this model has boundaries 0 to 7" in line


@pytest.mark.slow
@pytest.mark.skipif(predates(installed_sglang()[0], "0.5.18"), reason="its layers are whole")
@pytest.mark.cell("Gemma 3", "refused", "at start: since SGLang 0.5.18 its layers are handed out without the residual")
def test_layers_without_their_residual(tmp_path: Path) -> None:
    stub = {"PYTHONPATH": str(models.vllm_stub())}
    line = refused(models.gemma3(), *capture_flags(tmp_path / "c", 2, 4, 5), environment=stub)
    assert "Gemma3TextModel of this SGLang hands out what a layer made before it is added" in line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "named"),
    [
        pytest.param(
            ("--pp-size", 2), "--pp-size 2", marks=pytest.mark.cell("pipeline parallelism", "refused", "at start")
        ),
        pytest.param(
            ("--is-embedding",), "--is-embedding", marks=pytest.mark.cell("embedding server", "refused", "at start")
        ),
        (("--tokenizer-worker-num", 2), "--tokenizer-worker-num 2"),
        pytest.param(
            ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", 4),
            "--speculative-algorithm NGRAM",
            marks=pytest.mark.cell("speculative decoding", "refused", "at start"),
        ),
        pytest.param(
            ("--dcp-size", 2, "--tp-size", 2),
            "--dcp-size 2",
            marks=pytest.mark.cell("context parallelism", "refused", "at start"),
        ),
        pytest.param(
            ("--enable-return-aux-hidden-states", "--speculative-algorithm", "EAGLE3"),
            "--enable-return-aux-hidden",
            marks=pytest.mark.cell("`--enable-return-aux-hidden-states`", "refused", "at start"),
        ),
        (("--capture-wait-s", 200), "--capture-wait-s 200"),
        (("--capture-ring-gib", 0.002, "--chunked-prefill-size", 2048), "--capture-ring-gib 0.002"),
    ],
    ids=str,
)
def test_more_that_is_refused(tmp_path: Path, flags: tuple[object, ...], named: str) -> None:
    assert named in refused(models.llama(), *capture_flags(tmp_path / "c"), *flags)


@pytest.mark.skipif(not predates(installed_sglang()[0], "0.5.23"), reason="its ranks can tell that they capture")
def test_ranks_that_cannot_tell(tmp_path: Path) -> None:
    line = refused(models.llama(), *capture_flags(tmp_path / "c"), "--dp-size", 2)
    assert "--dp-size 2 does not go together with capture on SGLang 0.5." in line


@pytest.mark.slow
def test_no_default_boundaries_on_four_layers(tmp_path: Path) -> None:
    line = refused(models.llama(layers=4), *capture_flags(tmp_path / "c"))
    assert "on a model of 4 layers" in line
    assert "--capture-layers" in line


@pytest.mark.slow
def test_a_directory_of_another_model(tmp_path: Path) -> None:
    with Host(tmp_path / "c") as host:
        host.capture([[1, 2, 3]])
    line = refused(models.llama(), *capture_flags(tmp_path / "c"))
    assert "of another server" in line
    assert "--capture-dir" in line


@pytest.mark.slow
def test_a_directory_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "c").touch()
    assert "is not a directory" in refused(models.llama(), *capture_flags(tmp_path / "c"))


@pytest.mark.slow
def test_ranks_without_the_plugin(tmp_path: Path) -> None:
    # The launching process has hashtap, the processes that it spawns are told to leave it out.
    code = "import os, sys\nif 'spawn_main' in str(sys.orig_argv): os.environ['SGLANG_PLUGINS'] = 'none'\n"
    (tmp_path / "sitecustomize.py").write_text(code)
    line = refused(models.llama(), *capture_flags(tmp_path / "c"), environment={"PYTHONPATH": str(tmp_path)})
    assert "1 of 1 scheduler processes run without hashtap" in line
