"""What hashtap relies on in SGLang: which functions it hooks, which names it reads, in which releases."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import zip_longest

__all__ = [
    "HOOKS",
    "SINCE",
    "TARGETS",
    "TESTED_VERSIONS",
    "WEIGHT_UPDATES",
    "Hook",
    "Kind",
    "Names",
    "Process",
]

TESTED_VERSIONS = ("0.5.16", "0.5.18", "0.5.20", "0.5.23")


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
    """A function of SGLang that hashtap hooks, and the names of its first parameters, which the hook reads."""

    process: Process
    module: str
    function: str  # "name" or "Class.name"
    kind: Kind
    names: tuple[str, ...]

    @property
    def path(self) -> str:
        """The dotted path that SGLang's hook registry takes."""
        return f"{self.module}.{self.function}"

    def missing_in(self, parameters: Sequence[str]) -> list[str]:
        """What a function with these parameters lacks, as dotted paths with the parameter in parentheses."""
        pairs = zip_longest(self.names, parameters[: len(self.names)])
        return [f"{self.path}({name})" for name, found in pairs if name != found]


@dataclass(frozen=True, slots=True)
class Names:
    """A class whose fields hashtap reads, or (``owner`` empty) names of a module."""

    module: str
    owner: str
    names: tuple[str, ...]

    @property
    def path(self) -> str:
        """The dotted path of the class or module."""
        return f"{self.module}.{self.owner}".rstrip(".")

    def missing_in(self, names: Sequence[str]) -> list[str]:
        """What a class or module with these names lacks, as dotted paths."""
        return [f"{self.path}.{name}" for name in self.names if name not in names]


_SRT = "sglang.srt"
_SCHEDULER = f"{_SRT}.managers.scheduler"
_UPDATER = f"{_SRT}.managers.scheduler_components.weight_updater"
_RUNNER = f"{_SRT}.model_executor.model_runner"

WEIGHT_UPDATES = (
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
    "begin_weight_update",
    "end_weight_update",
    "resume_memory_occupation",
    "check_weights",
)
"""Methods of SGLang's weight updater that change the weights of a model that it serves, or can."""

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
    "flush_cache": Hook(Process.RANK, _SCHEDULER, "Scheduler.flush_cache", Kind.AFTER, ("self",)),
} | {
    name: Hook(Process.RANK, _UPDATER, f"SchedulerWeightUpdaterManager.{name}", Kind.AROUND, ("self", "recv_req"))
    for name in WEIGHT_UPDATES
}

_NAMES = (
    Names(f"{_SRT}.plugins.hook_registry", "", ("HookRegistry", "HookType")),
    Names(f"{_SRT}.plugins.hook_registry", "HookRegistry", ("register", "apply_hooks")),
    Names(f"{_SRT}.server_args", "ServerArgs", ("add_cli_args", "from_cli_args", "resolve_once")),
    Names(f"{_SRT}.arg_groups.overrides", "", ("resolving_view",)),
    Names(f"{_SRT}.runtime_context", "", ("get_parallel",)),
    Names(f"{_SRT}.environ", "", ("envs",)),
    Names(f"{_SRT}.environ", "Envs", ("SGLANG_RUST_SERVER",)),
    Names(f"{_SRT}.constants", "", ("GPU_MEMORY_TYPE_WEIGHTS", "HEALTH_CHECK_RID_PREFIX")),
    Names(f"{_SRT}.entrypoints.http_server", "", ("app",)),
    Names(f"{_SRT}.entrypoints.engine", "SchedulerInitResult", ("scheduler_infos",)),
    Names(f"{_SRT}.managers.data_parallel_controller", "DataParallelController", ("_scheduler_init_infos",)),
    Names(f"{_SRT}.managers.io_struct", "", ("ShutdownReq", "sock_send")),
    Names(f"{_SRT}.managers.io_struct", "GetInternalStateReqOutput", ("internal_state",)),
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
            "beam_group",
        ),
    ),
    Names(f"{_SRT}.sampling.sampling_params", "SamplingParams", ("custom_params",)),
    Names(f"{_SRT}.layers.logits_processor", "LogitsProcessorOutput", ("customized_info",)),
    Names(
        f"{_SRT}.model_executor.forward_batch_info",
        "ForwardBatch",
        ("rids", "forward_mode", "extend_seq_lens_cpu", "extend_prefix_lens_cpu", "input_ids", "positions"),
    ),
    Names(_UPDATER, "SchedulerWeightUpdaterManager", ("tp_worker", "_session")),
    Names(_RUNNER, "ModelRunnerOutput", ("logits_output",)),
    Names(_RUNNER, "ModelRunner", ("model", "model_config", "device", "server_args", "is_draft_worker")),
    Names(
        f"{_SRT}.configs.model_config",
        "ModelConfig",
        ("hf_config", "dtype", "num_hidden_layers", "hidden_size", "vocab_size", "context_len", "model_path"),
    ),
)

TARGETS: tuple[Hook | Names, ...] = (*HOOKS.values(), *_NAMES)

SINCE: Mapping[str, str] = {
    # Before them: no data parallelism, as its controller cannot hand on what the ranks report.
    f"{_SRT}.managers.data_parallel_controller.DataParallelController.get_init_info": "0.5.23",
    f"{_SRT}.managers.data_parallel_controller.DataParallelController._scheduler_init_infos": "0.5.23",
    # Before them: no update of the weights in several steps.
    f"{_UPDATER}.SchedulerWeightUpdaterManager.begin_weight_update": "0.5.23",
    f"{_UPDATER}.SchedulerWeightUpdaterManager.end_weight_update": "0.5.23",
    f"{_UPDATER}.SchedulerWeightUpdaterManager._session": "0.5.23",
    # Before it: arguments are resolved as they are made, and where they stand.
    f"{_SRT}.server_args.ServerArgs.resolve_once": "0.5.20",
    f"{_SRT}.arg_groups.overrides.resolving_view": "0.5.20",
    # Before it: the mark to hold back prompts rides with the requests.
    f"{HOOKS['broadcast'].path}(local_reqs)": "0.5.20",
    # Before it: 15 s to seal when the server ends, which hashtap cannot lengthen.
    f"{_SRT}.managers.tokenizer_manager._SCHEDULER_EXIT_TIMEOUT_SECS": "0.5.20",
    # Before it: no beam search.
    f"{_SRT}.managers.schedule_batch.Req.beam_group": "0.5.20",
    # Before them: no such server, no such salt.
    f"{_SRT}.environ.Envs.SGLANG_RUST_SERVER": "0.5.18",
    f"{_SRT}.managers.schedule_batch.Req.cache_salt": "0.5.18",
}
"""Targets that earlier tested releases lack, and the first tested one that has them."""
