"""Modes that capture cannot do are refused, each by one line that names the option."""

from types import SimpleNamespace
from typing import Any

import pytest

from hashtap.config import CaptureConfig
from hashtap.errors import SetupError
from hashtap.modes import check_modes, most_rows_of_a_forward
from hashtap.targets import TESTED_VERSIONS

PLAIN: dict[str, Any] = {
    "pp_size": 1,
    "attn_cp_size": 1,
    "dcp_size": 1,
    "enable_prefill_cp": False,
    "enable_layernorm_sp": False,
    "enable_two_batch_overlap": False,
    "enable_pdmux": False,
    "speculative_algorithm": None,
    "dllm_algorithm": None,
    "is_embedding": False,
    "enable_return_aux_hidden_states": False,
    "enable_return_hidden_states": False,
    "return_hidden_states_mode": None,
    "disaggregation_mode": "null",
    "encoder_only": False,
    "language_only": False,
    "tokenizer_worker_num": 1,
    "smg_grpc_mode": False,
    "grpc_mode": False,
    "use_ray": False,
    "elastic_ep_backend": None,
    "startup_weight_load_mode": "serial",
    "enable_attn_tp_input_scattered": False,
    "nnodes": 1,
    "flashinfer_allreduce_fusion_backend": None,
    "enable_aiter_allreduce_fusion": False,
    "enable_hierarchical_cache": False,
    "enable_lmcache": False,
    "enable_flexkv": False,
    "radix_cache_backend": None,
    "enable_unified_cache_external_linker": False,
    "disable_radix_cache": True,
    "watchdog_timeout": 300,
}
CONFIG = CaptureConfig(capture_dir="captures")


def check(config: CaptureConfig = CONFIG, **changes: Any) -> None:
    check_modes(SimpleNamespace(**{**PLAIN, **changes}), config, TESTED_VERSIONS[-1])


def test_a_plain_server_passes() -> None:
    check()


@pytest.mark.parametrize(
    ("option", "value", "shown"),
    [
        ("pp_size", 2, "--pp-size 2 "),
        ("attn_cp_size", 2, "--attn-cp-size 2 "),
        ("dcp_size", 2, "--dcp-size 2 "),
        pytest.param(
            "enable_prefill_cp",
            True,
            "--enable-prefill-cp ",
            marks=pytest.mark.cell("context parallelism of prefills", "refused", "at start"),
        ),
        pytest.param(
            "enable_layernorm_sp",
            True,
            "--enable-layernorm-sp ",
            marks=pytest.mark.cell("norms in parallel over a sequence", "refused", "at start"),
        ),
        pytest.param(
            "enable_two_batch_overlap",
            True,
            "--enable-two-batch-overlap ",
            marks=pytest.mark.cell("two-batch overlap", "refused", "at start; SGLang refuses it itself on a CPU"),
        ),
        pytest.param(
            "enable_pdmux",
            True,
            "--enable-pdmux ",
            marks=pytest.mark.cell("multiplexed prefill and decode", "refused", "at start"),
        ),
        ("speculative_algorithm", "EAGLE3", "--speculative-algorithm EAGLE3 "),
        ("speculative_algorithm", "NGRAM", "--speculative-algorithm NGRAM "),
        pytest.param(
            "dllm_algorithm",
            "x",
            "--dllm-algorithm x ",
            marks=pytest.mark.cell("diffusion models", "refused", "at start"),
        ),
        ("is_embedding", True, "--is-embedding "),
        ("enable_return_aux_hidden_states", True, "--enable-return-aux-hidden-states "),
        ("enable_return_hidden_states", True, "--enable-return-hidden-states "),
        ("return_hidden_states_mode", "last", "--return-hidden-states-mode last "),
        pytest.param(
            "disaggregation_mode",
            "prefill",
            "--disaggregation-mode prefill ",
            marks=pytest.mark.cell("prefill and decode on different servers", "refused", "at start"),
        ),
        pytest.param(
            "encoder_only",
            True,
            "--encoder-only ",
            marks=pytest.mark.cell("an encoder alone", "refused", "at start"),
        ),
        pytest.param(
            "language_only",
            True,
            "--language-only ",
            marks=pytest.mark.cell("a language model behind an encoder elsewhere", "refused", "at start"),
        ),
        pytest.param(
            "tokenizer_worker_num",
            2,
            "--tokenizer-worker-num 2 ",
            marks=pytest.mark.cell("several tokenizer processes", "refused", "at start"),
        ),
        ("smg_grpc_mode", True, "--smg-grpc-mode "),
        pytest.param(
            "grpc_mode",
            True,
            "--grpc-mode ",
            marks=pytest.mark.cell("gRPC", "refused", "at start"),
        ),
        pytest.param(
            "use_ray",
            True,
            "--use-ray ",
            marks=pytest.mark.cell("Ray", "refused", "at start"),
        ),
        pytest.param(
            "elastic_ep_backend",
            "mooncake",
            "--elastic-ep-backend mooncake ",
            marks=pytest.mark.cell("elastic expert parallelism", "refused", "at start"),
        ),
        pytest.param(
            "startup_weight_load_mode",
            "overlap",
            "--startup-weight-load-mode overlap ",
            marks=pytest.mark.cell("weights that load beside the start", "refused", "at start"),
        ),
        pytest.param(
            "enable_attn_tp_input_scattered",
            True,
            "--enable-attn-tp-input-scattered ",
            marks=pytest.mark.cell("attention inputs spread over ranks", "refused", "at start"),
        ),
        pytest.param("nnodes", 2, "--nnodes 2 ", marks=pytest.mark.cell("several nodes", "refused", "at start")),
    ],
)
def test_refused(option: str, value: Any, shown: str) -> None:
    with pytest.raises(SetupError, match="does not go together with capture") as raised:
        check(**{option: value})
    message = str(raised.value)
    assert message.startswith(shown)
    assert "\n" not in message


@pytest.mark.parametrize(
    "option",
    [
        "enable_hierarchical_cache",
        "enable_lmcache",
        "enable_flexkv",
        "radix_cache_backend",
        "enable_unified_cache_external_linker",
    ],
)
@pytest.mark.cell(
    "prefix cache on, hierarchical or external", "refused", "at start: what it brings back may be of other weights"
)
def test_rows_that_another_server_may_have_computed_are_refused(option: str) -> None:
    check(**{option: "x"})
    with pytest.raises(SetupError, match=f"--{option.replace('_', '-')} x .*may be of other weights"):
        check(CaptureConfig(capture_dir="captures", capture_prefix_cache="on"), **{option: "x"})


@pytest.mark.parametrize("option", ["flashinfer_allreduce_fusion_backend", "enable_aiter_allreduce_fusion"])
@pytest.mark.cell(
    "all-reduces fused into norms", "refused", "at start, before SGLang 0.5.23; since then layers are handed out whole"
)
def test_a_sum_over_ranks_that_is_put_off_is_refused_where_layers_lack_it(option: str) -> None:
    """sgl-project/sglang#28343: before 0.5.23 gpt-oss, GLM4-MoE and GLM4-MoE-Lite hand out one rank's part of it."""
    arguments = SimpleNamespace(**{**PLAIN, option: "x"})
    for sglang in ("0.5.16", "0.5.18", "0.5.20"):
        with pytest.raises(SetupError, match=f"--{option.replace('_', '-')} x .*before the sum over ranks"):
            check_modes(arguments, CONFIG, sglang)
    check_modes(arguments, CONFIG, "0.5.23")


def test_the_radix_cache_must_be_off() -> None:
    with pytest.raises(SetupError, match="--disable-radix-cache"):
        check(disable_radix_cache=False)


@pytest.mark.parametrize("sglang", [*TESTED_VERSIONS, "0.5.24", "unknown"])
def test_an_argument_that_sglang_does_not_have_is_refused(sglang: str) -> None:
    arguments = {name: value for name, value in PLAIN.items() if name != "enable_pdmux"}
    with pytest.raises(SetupError, match=f"SGLang {sglang} has no argument 'enable_pdmux'"):
        check_modes(SimpleNamespace(**arguments), CONFIG, sglang)


def test_an_argument_that_came_later_may_be_absent() -> None:
    arguments = {name: value for name, value in PLAIN.items() if name != "enable_layernorm_sp"}
    for sglang in ("0.5.16", "0.5.18", "0.5.19.post1"):
        check_modes(SimpleNamespace(**arguments), CONFIG, sglang)
    for sglang in ("0.5.15", "0.5.20", "0.5.23", "0.5.24", "unknown"):
        with pytest.raises(SetupError, match="no argument 'enable_layernorm_sp'"):
            check_modes(SimpleNamespace(**arguments), CONFIG, sglang)


def test_waiting_must_stay_well_below_the_watchdog() -> None:
    long = CaptureConfig(capture_dir="captures", capture_wait_s=151)
    with pytest.raises(SetupError, match=r"--capture-wait-s 151.*--watchdog-timeout 300.*at most 150"):
        check(long)
    check(long, watchdog_timeout=302)
    check(long, watchdog_timeout=None)
    check(CaptureConfig(capture_dir="captures", capture_wait_s=151, capture_when_full="drop"))


def test_rows_of_a_forward() -> None:
    assert most_rows_of_a_forward(8192, 16384, 131072) == 8192
    assert most_rows_of_a_forward(-1, 16384, 4096) == 16384 + 4096
    assert most_rows_of_a_forward(None, 100, 50) == 150
