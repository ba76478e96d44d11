"""The one module that imports SGLang: hashtap's hooks, and what they ask of SGLang's own state.

SGLang only logs what goes wrong in a plugin. So every failure here ends the process, and the launching
process serves only after every rank has reported that its hooks are in place.
"""

import inspect
import pkgutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from hashtap import __version__
from hashtap.config import CaptureConfig
from hashtap.errors import HashtapError, SetupError, UsageError
from hashtap.handshake import REPORT_KEY, RankReport, collect_reports
from hashtap.logs import log
from hashtap.releases import check_sglang, classes_with_setter, installed_sglang
from hashtap.requests import check_ids, check_no_beams, mark_as_warm_up
from hashtap.targets import HOOKS, SINCE, WEIGHT_UPDATES, Hook, Kind, Process

if TYPE_CHECKING:
    from hashtap.final_states import FinalStates
    from hashtap.rank import Rank

__all__ = ["register_hooks"]

EXIT_TIMEOUT = "_SCHEDULER_EXIT_TIMEOUT_SECS"  # of sglang.srt.managers.tokenizer_manager
EXIT_TIMEOUT_S = 120  # for ranks that seal what they captured; SGLang's own is 15
RESET = "reset_tensors"  # the check of the weights that overwrites them
HOLD = "hashtap: hold back new prompts"  # rides with the requests from the first rank to the others
FLAG_HOOKS = (
    Hook(Process.LAUNCHER, "sglang.srt.server_args", "ServerArgs.add_cli_args", Kind.AFTER, ("parser",)),
    Hook(Process.LAUNCHER, "sglang.srt.server_args", "ServerArgs.from_cli_args", Kind.AROUND, ("args",)),
)
RECORDED_ARGUMENTS = (
    *("tp_size", "dp_size", "attn_dp_size", "ep_size", "dtype", "quantization", "kv_cache_dtype"),
    *("attention_backend", "chunked_prefill_size", "max_prefill_tokens", "enable_mixed_chunk", "page_size"),
)

_originals: dict[Hook, Any] = {}


def register_hooks() -> None:
    """Register what this process needs: the launch flags, and the hooks if the environment turns capture on."""
    launcher = _Launcher()
    _register(FLAG_HOOKS[0], launcher.add_cli_args)
    _register(FLAG_HOOKS[1], launcher.from_cli_args)
    try:
        config = CaptureConfig.from_env()
    except UsageError:
        # The flags may still complete it; if not, the launching process will say so.
        launcher.register_engine_hooks()
        return
    if config is not None:
        launcher.register_engine_hooks()
        _register_spawned_hooks(config)


class _Launcher:
    """Hooks of the launching process."""

    def __init__(self) -> None:
        self._config: CaptureConfig | None = None
        self._command_line = False
        self._reports: list[RankReport] = []

    def register_engine_hooks(self) -> None:
        """For ``sglang.Engine``, whose module is loaded by now; a command line comes to :meth:`from_cli_args`."""
        if Process.LAUNCHER.value in sys.modules:
            _register(HOOKS["launch"], self.launch)
            _register(HOOKS["shut_down"], self.shut_down)

    def add_cli_args(self, result: Any, parser: Any) -> None:
        CaptureConfig.add_arguments(parser)
        if unhooked := _unhooked():
            _exit(SetupError(f"SGLang did not apply the hooks on {', '.join(unhooked)}: its log says why"))

    def from_cli_args(self, original: Callable[..., Any], cls: Any, args: Any) -> Any:
        self._command_line = True
        with self._refusing():
            self._config = CaptureConfig.from_args(args)
        if self._config is None:
            return original(cls, args)
        with self._refusing():
            _check_version()
            self._config.export()
        _turn_off(args, self._config)
        server_args = original(cls, args)
        for name, hook in (("launch", self.launch), ("serve", self.serve), ("generate", self.generate)):
            _register(HOOKS[name], hook)
        _apply()
        with self._refusing():
            if unhooked := _unhooked():
                raise SetupError(f"SGLang did not apply the hooks on {', '.join(unhooked)}: its log says why")
        return server_args

    def launch(self, original: Callable[..., Any], cls: Any, *args: Any, **kwargs: Any) -> Any:
        """Around the start of the other processes: refuse before, and serve only if every rank captures."""
        server_args = kwargs["server_args"] if "server_args" in kwargs else args[0]
        with self._refusing():
            config = self._config or CaptureConfig.from_env()
        if config is None:
            return original(cls, *args, **kwargs)
        _turn_off(server_args, config)
        if hasattr(server_args, "resolve_once"):  # else it is resolved since it was made
            server_args.resolve_once()
        with self._refusing():
            self._config = config
            if not self._command_line:
                _check_version()
            _check_arguments(server_args, config)
            from hashtap.directory import CaptureDirectory

            CaptureDirectory.create(config.capture_dir)
            config.export()
        _lengthen_exit()
        result = original(cls, *args, **kwargs)
        with self._refusing():
            self._reports = collect_reports(result[3].scheduler_infos, __version__)
        return result

    def serve(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Around the life of the HTTP server: adds the routes, and lets the ranks seal however it ends."""
        tokenizer_manager = kwargs["tokenizer_manager"] if "tokenizer_manager" in kwargs else args[1]
        from sglang.srt.entrypoints.http_server import app

        from hashtap.routes import add_routes

        async def epoch() -> str:
            states = await tokenizer_manager.get_internal_state()
            return str(states[0]["hashtap"]["epoch"])

        add_routes(app, next(report.info for report in self._reports if report.writes), epoch)
        try:
            return original(*args, **kwargs)
        finally:
            _stop_ranks(tokenizer_manager)

    def generate(self, manager: Any, obj: Any, *args: Any, **kwargs: Any) -> None:
        """Before each request: refuses what must not reach the ranks; what comes before it is up is warm-up."""
        from sglang.srt.managers.tokenizer_manager import ServerStatus

        check_ids(obj.input_ids, manager.model_config.vocab_size)
        check_no_beams(obj.sampling_params)
        if manager.server_status == ServerStatus.Starting:
            mark_as_warm_up(obj)

    def shut_down(self, engine: Any) -> None:
        """Before an engine kills its processes."""
        manager = getattr(engine, "tokenizer_manager", None)
        if manager is not None and self._reports:
            _stop_ranks(manager)

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """A failure ends a command line with one line; whoever builds an ``Engine`` gets the error itself."""
        try:
            yield
        except HashtapError as error:
            if not self._command_line:
                raise
            _exit(error)


def _register_spawned_hooks(config: CaptureConfig) -> None:
    """Hooks of the processes that SGLang spawns, each told by the module that it runs."""
    if Process.CONTROLLER.value in sys.modules:
        _register(HOOKS["controller_info"], _controller_info)
        _register(HOOKS["controller_loop"], _leave_signals_to_launcher)
    if Process.DETOKENIZER.value in sys.modules:
        _register(HOOKS["detokenizer_loop"], _leave_signals_to_launcher)
    if Process.RANK.value in sys.modules:
        from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX

        from hashtap.rank import Rank

        _RankHooks(Rank(config, HEALTH_CHECK_RID_PREFIX)).register()


class _RankHooks:
    """Hooks of a scheduler process."""

    def __init__(self, rank: "Rank") -> None:
        self._rank = rank
        self._final_states: FinalStates | None = None

    def register(self) -> None:
        for name in ("load_model", "backends", "forward", "logits", "queue", "prefill", "broadcast"):
            _register(HOOKS[name], getattr(self, name))
        for name in ("rank_info", "rank_state", "rank_loop", "flush_cache"):
            _register(HOOKS[name], getattr(self, name))
        for name in WEIGHT_UPDATES:
            _register(HOOKS[name], self.update_weights)

    def load_model(self, original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
        """Around the loading: settle the layers and the directory before it, begin to capture after it."""
        if runner.is_draft_worker:
            return original(runner, *args, **kwargs)
        from sglang.srt.runtime_context import get_parallel

        from hashtap.epoch import epoch_name
        from hashtap.final_states import FinalStates
        from hashtap.layers import capture_boundaries, choose_boundaries
        from hashtap.modes import most_rows_of_a_forward

        rank, config, parallel = self._rank, runner.model_config, get_parallel()
        with _ending():
            arguments = _check_arguments(runner.server_args, rank.config)
            boundaries = choose_boundaries(rank.config.capture_layers, config.num_hidden_layers)
            flags = {name: getattr(arguments, name, None) for name in RECORDED_ARGUMENTS}
            facts = rank.plan(
                config, str(config.dtype).removeprefix("torch."), boundaries, rank=parallel.tp_rank, flags=flags
            )
        result = original(runner, *args, **kwargs)
        with _ending():
            _, root = installed_sglang()
            capture_boundaries(runner.model, boundaries, known=classes_with_setter(root))
            self._final_states = FinalStates(runner.model, facts.finals, lambda: rank.takes)
            epoch = epoch_name(_fingerprint(runner), 0)
            if parallel.attn_tp_rank == 0:
                rows = most_rows_of_a_forward(
                    arguments.chunked_prefill_size, arguments.max_prefill_tokens, config.context_len
                )
                rank.start(
                    facts,
                    epoch,
                    _versions(),
                    device=runner.device,
                    max_forward_tokens=rows,
                    metrics=runner.server_args.enable_metrics,
                )
                log.info("%s", rank.summary())
        return result

    def backends(self, result: Any, runner: Any) -> None:
        """After the last call of SGLang's own that may set layers, and before graphs are captured."""
        if runner.is_draft_worker:
            return
        from hashtap.layers import read_boundaries

        with _ending():
            found = read_boundaries(runner.model)
            if found != self._rank.boundaries:
                raise SetupError(f"something set the layers to {found} after hashtap set {self._rank.boundaries}")

    def forward(self, original: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Around a forward pass: notes the real batch (a graph replay shows another one) and hands out receipts."""
        if runner.is_draft_worker or not self._rank.begin_forward(forward_batch):
            return original(runner, forward_batch, *args, **kwargs)
        output = original(runner, forward_batch, *args, **kwargs)
        with _ending():
            self._rank.end_forward(output.logits_output)
        return output

    def logits(
        self,
        processor: Any,
        input_ids: Any,
        hidden_states: Any,
        lm_head: Any,
        logits_metadata: Any,
        aux_hidden_states: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Before the logits: the one place where all tensors of a pass are alive."""
        if self._final_states is not None and self._rank.takes:
            with _ending():
                final = self._final_states.of(hidden_states)
                self._rank.take(input_ids, getattr(logits_metadata, "positions", None), final, aux_hidden_states)

    def queue(self, scheduler: Any, req: Any, *args: Any, **kwargs: Any) -> None:
        self._rank.admit(req)

    def broadcast(self, original: Callable[..., Any], receiver: Any, recv_reqs: Any, *local_reqs: Any) -> list[Any]:
        """Around the broadcast of requests: all ranks of a group must hold back prompts in the same step."""
        if self._rank.holds_back():
            # With what this rank itself has to say, where SGLang has a list for that.
            if local_reqs:
                local_reqs = ([*(local_reqs[0] or ()), HOLD],)
            else:
                recv_reqs = [*recv_reqs, HOLD]
        requests = original(receiver, recv_reqs, *local_reqs)
        self._rank.held = HOLD in requests
        return [request for request in requests if request != HOLD] if self._rank.held else requests

    def prefill(
        self, original: Callable[..., Any], scheduler: Any, running_batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Around the choice of the next prefill batch; decodes go on while prompts are held back."""
        if not self._rank.held:
            return original(scheduler, running_batch, *args, **kwargs)
        from sglang.srt.managers.schedule_batch import NextBatchPlan

        return NextBatchPlan(batch_to_run=None, running_batch=running_batch)

    def update_weights(
        self, original: Callable[..., Any], manager: Any, recv_req: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Around any update, failed ones too: they may have changed a part."""
        if not _changes_weights(recv_req):
            return original(manager, recv_req, *args, **kwargs)
        with _ending():
            self._rank.end_epoch()
        result = original(manager, recv_req, *args, **kwargs)
        with _ending():
            # Since 0.5.23 an update may take several steps, between which weights move without a call.
            unfinished = getattr(manager, "_session", None) is not None
            self._rank.begin_epoch(_fingerprint(manager.tp_worker.model_runner), weights_move=unfinished)
        return result

    def flush_cache(self, result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        if result:
            self._rank.cache_flushed()

    def rank_info(self, info: dict[str, Any], scheduler: Any) -> None:
        # SGLang refuses, or cuts with --allow-auto-truncate, a prompt of that length.
        info[REPORT_KEY] = [self._rank.report(_unhooked(), info["max_req_input_len"] - 1)]

    def rank_state(self, output: Any, scheduler: Any, recv_req: Any) -> None:
        output.internal_state["hashtap"] = self._rank.state()

    def rank_loop(self, original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        """Around the scheduler's life: however it ends, what was captured is sealed."""
        _leave_signals_to_launcher()
        try:
            return original(scheduler, *args, **kwargs)
        finally:
            self._rank.close()


def _leave_signals_to_launcher(*args: Any) -> None:
    """A signal for the whole process group is the launching process's to act on: it lets the ranks seal first."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _controller_info(info: dict[str, Any], controller: Any) -> None:
    """The data-parallel controller makes a new dict of its ranks' and would drop their reports."""
    reports = [report for rank in controller._scheduler_init_infos for report in rank.get(REPORT_KEY, ())]
    info[REPORT_KEY] = reports


def _stop_ranks(tokenizer_manager: Any) -> None:
    """Ask the scheduler processes to end and wait until they have sealed; nothing to do where they have ended."""
    import zmq
    from sglang.srt.managers.io_struct import ShutdownReq, sock_send
    from sglang.srt.utils.cudacore_pyspy_dump_utils import collect_scheduler_processes

    if not collect_scheduler_processes():
        return
    if tokenizer_manager._subprocess_watchdog is not None:
        tokenizer_manager._subprocess_watchdog.stop()  # their end is no crash
    # The event loop that the socket belongs to may be closed: send past it.
    sock_send(zmq.Socket.shadow(tokenizer_manager.send_to_scheduler.underlying), ShutdownReq())
    deadline = time.monotonic() + EXIT_TIMEOUT_S
    while collect_scheduler_processes():
        if time.monotonic() > deadline:
            log.error(
                "the ranks did not seal within %d s: what is whole in their .partial files is sealed at the next "
                "start on this host, or by hashtap recover",
                EXIT_TIMEOUT_S,
            )
            return
        time.sleep(0.1)


def _check_version() -> None:
    check_sglang(*installed_sglang())


def _check_arguments(server_args: Any, config: CaptureConfig) -> Any:
    """SGLang's resolved arguments, checked."""
    import sglang.srt.arg_groups.overrides as overrides
    from sglang.srt.environ import envs

    from hashtap.modes import check_modes

    if hasattr(envs, "SGLANG_RUST_SERVER") and envs.SGLANG_RUST_SERVER.get():
        raise SetupError("SGLANG_RUST_SERVER does not go together with capture: that server has no hashtap routes")
    arguments = overrides.resolving_view(server_args) if hasattr(overrides, "resolving_view") else server_args
    found, _ = installed_sglang()
    check_modes(arguments, config, found)
    if arguments.dp_size > 1 and _resolve(HOOKS["controller_info"]) is None:
        raise SetupError(
            f"--dp-size {arguments.dp_size} does not go together with capture on SGLang {found}, which cannot tell "
            f"whether all of its ranks capture: install SGLang {SINCE[HOOKS['controller_info'].path]}"
        )
    return arguments


def _lengthen_exit() -> None:
    """Give the ranks time to seal when SGLang ends, or say that they have little."""
    import sglang.srt.managers.tokenizer_manager as manager

    if not hasattr(manager, EXIT_TIMEOUT):
        log.warning("this SGLang gives its ranks 15 s to end: what they do not seal in that time is left to recovery")
        return
    setattr(manager, EXIT_TIMEOUT, max(getattr(manager, EXIT_TIMEOUT), EXIT_TIMEOUT_S))


def _turn_off(server_args: Any, config: CaptureConfig) -> None:
    """Turn off what would keep rows from hashtap, in a command line or a record made of it, and say so."""
    off = {}
    if config.capture_prefix_cache == "off":
        off["disable_radix_cache"] = (
            "the radix cache is off while capture is on: rows that it serves are never computed"
        )
    if config.capture_final != "post":
        off["disable_prefill_cuda_graph"] = (
            "prefill CUDA graphs are off: a replay does not run the hook that reads the state before the final norm"
        )
    for argument, line in off.items():
        if not getattr(server_args, argument, False):
            try:
                setattr(server_args, argument, True)
            except AttributeError:
                continue  # sealed already: the checks of the arguments and of the pass refuse it
            log.info(line)


def _fingerprint(runner: Any) -> bytes:
    """The fingerprint of the whole model's weights, the same on all ranks that hold a part of them."""
    from sglang.srt.runtime_context import get_parallel

    from hashtap.epoch import combine_fingerprints, fingerprint

    own = fingerprint(runner.model_config.hf_config.to_dict(), runner.model.named_parameters())
    parallel = get_parallel()
    if parallel.tp_size == 1:
        return own
    import torch.distributed

    group = parallel.tp_group.cpu_group
    found: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(found, own, group=group)
    return combine_fingerprints(found)


def _changes_weights(recv_req: Any) -> bool:
    """Whether a request changes weights: some of its kind only look at them, or bring back other memory."""
    from sglang.srt.constants import GPU_MEMORY_TYPE_WEIGHTS

    tags = getattr(recv_req, "tags", None)
    return getattr(recv_req, "action", RESET) == RESET and (not tags or GPU_MEMORY_TYPE_WEIGHTS in tags)


def _versions() -> dict[str, str]:
    import torch

    return {"hashtap": __version__, "sglang": installed_sglang()[0], "torch": torch.__version__}


@contextmanager
def _ending() -> Iterator[None]:
    """A failure in a spawned process ends it, and with it the server: SystemExit passes SGLang's handlers."""
    try:
        yield
    except HashtapError as error:
        log.error("hashtap: %s", error)
        raise SystemExit(error.exit_code) from error
    except Exception as error:
        log.exception("hashtap failed; the server ends rather than serve on without capturing")
        raise SystemExit(SetupError.exit_code) from error


def _exit(error: HashtapError) -> NoReturn:
    print(f"hashtap: {error}", file=sys.stderr, flush=True)
    raise SystemExit(error.exit_code) from error


def _register(hook: Hook, function: Callable[..., Any]) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    original = _resolve(hook)
    if original is None and hook.path in SINCE:
        return  # an earlier release, which does without
    if hook not in _originals:
        _originals[hook] = original
        HookRegistry.register(hook.path, function, HookType(hook.kind.value))


def _apply() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    HookRegistry.apply_hooks()


def _unhooked() -> list[str]:
    """Hooks of this process that SGLang was given and did not apply."""
    return [hook.path for hook, original in _originals.items() if _resolve(hook) is original]


def _resolve(hook: Hook) -> Any:
    owner, _, name = hook.path.rpartition(".")
    return inspect.getattr_static(pkgutil.resolve_name(owner), name, None)
