"""What hashtap relies on in SGLang: which functions it hooks, which names it reads, in which versions.

The tables are compared with the *sources* of an SGLang, without importing it, so that a renamed
function or field is found before a model is loaded, and by a test.
"""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from hashtap.errors import SetupError

__all__ = [
    "HOOKS",
    "NAMES",
    "TESTED_VERSIONS",
    "Hook",
    "Kind",
    "Names",
    "Process",
    "check_sglang",
    "classes_with_setter",
    "installed_sglang",
    "missing_targets",
]

TESTED_VERSIONS = ("0.5.23",)
SETTER = "set_eagle3_layers_to_capture"


class Kind(Enum):
    """When a hook runs; the values are SGLang's ``HookType``."""

    BEFORE = "before"
    AFTER = "after"
    AROUND = "around"


class Process(Enum):
    """Where a hook belongs. The value is the module whose presence tells that a process is of that sort."""

    LAUNCHER = "sglang.srt.entrypoints.engine"
    CONTROLLER = "sglang.srt.managers.data_parallel_controller"
    RANK = "sglang.srt.managers.scheduler"
    DETOKENIZER = "sglang.srt.managers.detokenizer_manager"


@dataclass(frozen=True, slots=True)
class Hook:
    """A function of SGLang that hashtap hooks, and the parameters that the hook reads."""

    process: Process
    module: str
    function: str  # "name" or "Class.name"
    kind: Kind
    parameters: tuple[str, ...]

    @property
    def path(self) -> str:
        """The dotted path that SGLang's hook registry takes."""
        return f"{self.module}.{self.function}"


@dataclass(frozen=True, slots=True)
class Names:
    """A class whose fields hashtap reads, or (``owner`` empty) names of a module."""

    module: str
    owner: str
    names: tuple[str, ...]


_SRT = "sglang.srt"
_SCHEDULER = f"{_SRT}.managers.scheduler"
_UPDATER = f"{_SRT}.managers.scheduler_components.weight_updater"
_RUNNER = f"{_SRT}.model_executor.model_runner"

HOOKS: Mapping[str, Hook] = {
    "launch": Hook(
        Process.LAUNCHER,
        f"{_SRT}.entrypoints.engine",
        "Engine._launch_subprocesses",
        Kind.AROUND,
        ("cls", "server_args"),
    ),
    "serve": Hook(
        Process.LAUNCHER,
        f"{_SRT}.entrypoints.http_server",
        "_setup_and_run_http_server",
        Kind.AROUND,
        ("server_args", "tokenizer_manager"),
    ),
    "generate": Hook(
        Process.LAUNCHER,
        f"{_SRT}.managers.tokenizer_manager",
        "TokenizerManager.generate_request",
        Kind.BEFORE,
        ("self", "obj"),
    ),
    "shut_down": Hook(Process.LAUNCHER, f"{_SRT}.entrypoints.engine", "Engine.shutdown", Kind.BEFORE, ("self",)),
    "controller_info": Hook(
        Process.CONTROLLER,
        f"{_SRT}.managers.data_parallel_controller",
        "DataParallelController.get_init_info",
        Kind.AFTER,
        ("self",),
    ),
    "controller_loop": Hook(
        Process.CONTROLLER,
        f"{_SRT}.managers.data_parallel_controller",
        "DataParallelController.event_loop",
        Kind.BEFORE,
        ("self",),
    ),
    "detokenizer_loop": Hook(
        Process.DETOKENIZER,
        f"{_SRT}.managers.detokenizer_manager",
        "DetokenizerManager.event_loop",
        Kind.BEFORE,
        ("self",),
    ),
    "load_model": Hook(Process.RANK, _RUNNER, "ModelRunner.load_model", Kind.AROUND, ("self",)),
    "backends": Hook(Process.RANK, _RUNNER, "ModelRunner.init_attention_backends", Kind.AFTER, ("self",)),
    "forward": Hook(Process.RANK, _RUNNER, "ModelRunner.forward", Kind.AROUND, ("self", "forward_batch")),
    "logits": Hook(
        Process.RANK,
        f"{_SRT}.layers.logits_processor",
        "LogitsProcessor.forward",
        Kind.BEFORE,
        ("self", "input_ids", "hidden_states", "lm_head", "logits_metadata", "aux_hidden_states"),
    ),
    "rank_info": Hook(Process.RANK, _SCHEDULER, "Scheduler.get_init_info", Kind.AFTER, ("self",)),
    "rank_state": Hook(Process.RANK, _SCHEDULER, "Scheduler.get_internal_state", Kind.AFTER, ("self",)),
    "rank_loop": Hook(Process.RANK, _SCHEDULER, "Scheduler.run_event_loop", Kind.AROUND, ("self",)),
    "queue": Hook(Process.RANK, _SCHEDULER, "Scheduler._add_request_to_queue", Kind.BEFORE, ("self", "req")),
    "prefill": Hook(
        Process.RANK, _SCHEDULER, "Scheduler.get_new_batch_prefill", Kind.AROUND, ("self", "running_batch")
    ),
    "broadcast": Hook(
        Process.RANK,
        f"{_SRT}.managers.scheduler_components.request_receiver",
        "SchedulerRequestReceiver._broadcast_reqs_across_ranks",
        Kind.AROUND,
        ("self", "recv_reqs", "local_reqs"),
    ),
} | {
    name: Hook(Process.RANK, _UPDATER, f"SchedulerWeightUpdaterManager.{name}", Kind.AFTER, ("self", "recv_req"))
    for name in (
        "update_weights_from_disk",
        "update_weights_from_distributed",
        "update_weights_from_tensor",
        "update_weights_from_ipc",
        "end_weight_update",
    )
}

NAMES: tuple[Names, ...] = (
    Names(f"{_SRT}.plugins.hook_registry", "", ("HookRegistry", "HookType")),
    Names(f"{_SRT}.plugins.hook_registry", "HookRegistry", ("register", "apply_hooks")),
    Names(f"{_SRT}.server_args", "ServerArgs", ("add_cli_args", "from_cli_args", "resolve_once")),
    Names(f"{_SRT}.arg_groups.overrides", "", ("resolving_view",)),
    Names(f"{_SRT}.runtime_context", "", ("get_parallel", "get_schedule")),
    Names(f"{_SRT}.environ", "", ("envs",)),
    Names(f"{_SRT}.environ", "Envs", ("SGLANG_RUST_SERVER",)),
    Names(f"{_SRT}.constants", "", ("HEALTH_CHECK_RID_PREFIX",)),
    Names(f"{_SRT}.entrypoints.http_server", "", ("app",)),
    Names(f"{_SRT}.managers.io_struct", "", ("ShutdownReq", "sock_send")),
    Names(f"{_SRT}.managers.tokenizer_manager", "", ("ServerStatus", "_SCHEDULER_EXIT_TIMEOUT_SECS")),
    Names(
        f"{_SRT}.managers.tokenizer_manager",
        "TokenizerManager",
        ("server_status", "model_config", "send_to_scheduler", "_subprocess_watchdog"),
    ),
    Names(f"{_SRT}.managers.tokenizer_control_mixin", "TokenizerControlMixin", ("get_internal_state",)),
    Names(f"{_SRT}.utils.cudacore_pyspy_dump_utils", "", ("collect_scheduler_processes",)),
    Names(f"{_SRT}.managers.schedule_batch", "NextBatchPlan", ("batch_to_run", "running_batch")),
    Names(
        f"{_SRT}.managers.schedule_batch",
        "Req",
        (
            "rid",
            "origin_input_ids",
            "sampling_params",
            "to_finish",
            "finished_reason",
            "lora_id",
            "extra_key",
            "cache_salt",
            "session",
            "input_embeds",
            "positional_embed_overrides",
            "token_type_ids",
            "multi_item_delimiter_indices",
            "multimodal_inputs",
        ),
    ),
    Names(f"{_SRT}.sampling.sampling_params", "SamplingParams", ("custom_params",)),
    Names(f"{_SRT}.layers.logits_processor", "LogitsProcessorOutput", ("customized_info",)),
    Names(
        f"{_SRT}.model_executor.forward_batch_info",
        "ForwardBatch",
        ("rids", "forward_mode", "extend_seq_lens_cpu", "extend_prefix_lens_cpu", "input_ids", "positions"),
    ),
    Names(_RUNNER, "ModelRunner", ("model", "model_config", "device", "server_args", "is_draft_worker")),
    Names(
        f"{_SRT}.configs.model_config",
        "ModelConfig",
        ("hf_config", "dtype", "num_hidden_layers", "hidden_size", "vocab_size", "context_len", "model_path"),
    ),
)


def installed_sglang() -> tuple[str, Path]:
    """Version and source folder of the installed SGLang, without importing it.

    Raises:
        SetupError: when it is not installed.
    """
    spec = find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise SetupError("SGLang is not installed in this environment: hashtap captures from a running SGLang")
    try:
        found = version("sglang")
    except PackageNotFoundError:
        found = "unknown"
    return found, Path(spec.submodule_search_locations[0])


def check_sglang(found: str, root: Path, *, allow_unknown: bool = False) -> None:
    """Refuse an SGLang that hashtap was not tested with or that lacks one of its targets.

    Args:
        found: its version.
        root: the folder of the package ``sglang``.
        allow_unknown: let a version pass that was never tested, if no target is missing.

    Raises:
        SetupError: naming version and targets.
    """
    missing = list(missing_targets(root))
    if missing:
        raise SetupError(
            f"SGLang {found} lacks {', '.join(missing)}, which hashtap needs: install SGLang {_tested()}, or a hashtap "
            f"that knows {found}"
        )
    if found not in TESTED_VERSIONS and not allow_unknown:
        raise SetupError(
            f"SGLang {found} was never tested with this hashtap, which knows {_tested()}: install that one, or set "
            "HASHTAP_ALLOW_UNKNOWN_SGLANG=1 (everything that hashtap hooks is there) and verify what is captured"
        )


def missing_targets(root: Path) -> Iterator[str]:
    """The targets that the SGLang sources under ``root`` lack, as dotted paths."""
    targets: list[Hook | Names] = [*HOOKS.values(), *NAMES]
    modules = {target.module: _parse(root, target.module) for target in targets}
    for hook in HOOKS.values():
        function = _find(modules[hook.module], hook.function)
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            yield hook.path
            continue
        arguments = function.args
        names = {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
        yield from (f"{hook.path}({name})" for name in hook.parameters if name not in names)
    for names_of in NAMES:
        owner = _find(modules[names_of.module], names_of.owner)
        there = _names_in(owner) if owner is not None else set()
        prefix = ".".join(filter(None, (names_of.module, names_of.owner)))
        yield from (f"{prefix}.{name}" for name in names_of.names if name not in there)


def classes_with_setter(root: Path) -> list[str]:
    """Model classes of the SGLang under ``root`` that can be told which layers to capture, sorted."""
    classes = set()
    for path in sorted((root / "srt" / "models").glob("*.py")):
        text = path.read_text()
        if SETTER in text:
            for node in ast.parse(text).body:
                if isinstance(node, ast.ClassDef) and "For" in node.name and _find(node, SETTER):
                    classes.add(node.name)
    return sorted(classes)


def _tested() -> str:
    return " or ".join(TESTED_VERSIONS)


def _parse(root: Path, module: str) -> ast.Module:
    path = root.joinpath(*module.split(".")[1:])
    file = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
    return ast.parse(file.read_text() if file.is_file() else "")


def _find(tree: ast.Module | ast.ClassDef, path: str) -> ast.AST | None:
    """The class or function ``path`` ("Class.method") in ``tree``; the tree itself for an empty path."""
    found: ast.AST | None = tree
    for name in filter(None, path.split(".")):
        body = getattr(found, "body", [])
        found = next((node for node in body if getattr(node, "name", None) == name), None)
    return found


def _names_in(owner: ast.AST) -> set[str]:
    """Names that a module or a class body binds or imports, and attributes of ``self`` that its methods set."""
    names: set[str] = set()
    for node in ast.walk(owner):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
    return names
