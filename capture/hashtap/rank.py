"""Capture in one scheduler process: what SGLang's objects mean, in terms of a session.

It takes SGLang's objects as they come and imports nothing of SGLang; the seam calls it from the hooks.
"""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from secrets import randbits
from shutil import disk_usage
from typing import Any
from weakref import WeakSet

import hashtap
from hashtap.config import CaptureConfig
from hashtap.directory import FORMAT_VERSION, CaptureDirectory
from hashtap.epoch import epoch_name
from hashtap.errors import FormatError, HashtapError, MismatchError, SetupError
from hashtap.facts import DTYPE_NAME, FINAL_STATES, ShardFacts
from hashtap.handshake import RankReport
from hashtap.logs import log
from hashtap.recover import recover
from hashtap.requests import is_past_the_cache, refusal, wants_capture
from hashtap.session import Batch, Session
from hashtap.shard import read_shard
from hashtap.watch import Watch
from hashtap_kernels.layout import Dtype, Geometry

__all__ = ["Rank", "check_same_kind", "facts_of_shards"]

PREFILL_MODES = ("EXTEND", "MIXED")
_DTYPES = {DTYPE_NAME[dtype]: dtype for dtype in (Dtype.BF16, Dtype.FP16, Dtype.FP32)}


def facts_of_shards(directory: CaptureDirectory) -> dict[str, ShardFacts]:
    """What the shards of a directory say, by file name. A damaged one is warned of and left where it is."""
    found = {}
    for path in directory.shards():
        try:
            found[path.name] = read_shard(path).facts
        except FormatError as error:
            log.warning("%s", error)
    return found


def check_same_kind(mine: ShardFacts, others: Mapping[str, ShardFacts]) -> None:
    """Refuse to write beside shards of another model, other weights or other layers.

    An epoch of "" is not known yet and not compared.

    Raises:
        MismatchError: naming the shard, what differs and both values.
    """
    for name, other in others.items():
        for what, own, found in (
            ("boundaries", mine.boundaries, other.boundaries),
            ("final norm", mine.final_norm, other.final_norm),
            ("geometry", mine.geometry, other.geometry),
            ("epoch", mine.epoch, other.epoch),
        ):
            if own != found and own != "":
                same = "the same flags (--tp-size and quantization are part of it), or " if what == "epoch" else ""
                raise MismatchError(
                    f"the capture directory holds {name} of another server: its {what} is {found} (model "
                    f"{other.model}), this one's is {own} (model {mine.model}); give {same}another --capture-dir"
                )


@dataclass(frozen=True, slots=True)
class _Forward:
    """A forward pass as the scheduler meant it, before anything was padded."""

    rids: tuple[str, ...]  # [R]
    extend_lens: tuple[int, ...]  # [R]
    prefix_lens: tuple[int, ...]  # [R]
    input_ids: Any  # int [T]
    positions: Any  # int [T]


class Rank:
    """A scheduler process that takes part in capture.

    Args:
        config: the capture options.
        health_prefix: what the rids of health checks start with.
    """

    def __init__(self, config: CaptureConfig, health_prefix: str) -> None:
        self.config = config
        self.session: Session | None = None  # only where rows are written
        self.boundaries: tuple[int, ...] = ()
        self.held = False  # no new prompts in this step, decided by the writing rank
        self._updates = 0  # of the weights
        self._cache_is_empty = True  # nothing was computed since the prefix cache was flushed
        self._health_prefix = health_prefix
        self._info: dict[str, Any] = {}
        self._others: dict[str, ShardFacts] = {}  # shards that were there before
        self._watch: Watch | None = None
        self._requests: WeakSet[Any] = WeakSet()  # SGLang's, that are captured
        self._device = "cpu"
        self._forward: _Forward | None = None  # the forward pass that runs now
        self._reached = False  # whether that pass came to the point where rows are taken
        self._receipts: list[dict[str, Any] | None] | None = None

    def plan(
        self, model_config: Any, dtype: str, boundaries: tuple[int, ...], *, rank: int, flags: Mapping[str, Any]
    ) -> ShardFacts:
        """The facts of the shards to come, and a look at the directory, all before the weights are loaded.

        The epoch is left empty. Raises as :func:`check_same_kind`, and:
            SetupError: when states of this shape or type cannot be captured.
            UsageError: when the directory cannot be written.
        """
        self.boundaries = boundaries
        if dtype not in _DTYPES:
            raise SetupError(f"states of {dtype} cannot be captured, only {', '.join(_DTYPES)}: give another --dtype")
        try:
            layers = len(boundaries) + len(FINAL_STATES[self.config.capture_final])
            geometry = Geometry(layers, model_config.hidden_size, _DTYPES[dtype])
        except ValueError as error:
            raise SetupError(f"this model cannot be captured: {error}") from error
        directory = CaptureDirectory.create(self.config.capture_dir)
        facts = ShardFacts(
            model=str(model_config.model_path),
            epoch="",
            boundaries=boundaries,
            final_norm=self.config.capture_final,
            geometry=geometry,
            seed=(randbits(64), randbits(64)),
            directory_uuid=directory.uuid,
            writer=uuid.uuid4().hex,
            rank=rank,
            versions={},
            server_flags=flags,
        )
        self._others = facts_of_shards(directory)
        check_same_kind(facts, self._others)
        self._info = {
            "hashtap": hashtap.__version__,
            "format": FORMAT_VERSION,
            "directory": directory.uuid,
            "path": str(Path(self.config.capture_dir).resolve()),
            "model": facts.model,
            "boundaries": list(boundaries),
            "final_norm": facts.final_norm,
            "layers": geometry.layers,
            "hidden": geometry.hidden,
            "dtype": dtype,
            "vocab_size": model_config.vocab_size,
            "requests": self.config.capture_requests,
        }
        return facts

    def start(
        self,
        facts: ShardFacts,
        epoch: str,
        versions: Mapping[str, str],
        *,
        device: str,
        max_forward_tokens: int,
        metrics: bool = False,
    ) -> None:
        """Begin to capture on this rank, the weights being loaded. Takes ring and staging memory.

        With ``metrics`` it also counts for Prometheus, in this process.

        Raises:
            SetupError: when the memory cannot be had.
            MismatchError: when the directory holds another epoch.
        """
        facts = replace(facts, epoch=epoch, versions=versions)
        check_same_kind(facts, self._others)
        directory = CaptureDirectory.open(self.config.capture_dir)
        recover(directory, like=facts)
        self.session = Session(self.config, facts, directory, device=device, max_forward_tokens=max_forward_tokens)
        self._watch = Watch(self.session.counters, rank=facts.rank, prometheus=metrics)
        self._device = device
        self._info["sglang"] = versions["sglang"]

    def report(self, unhooked: Sequence[str], max_prompt_tokens: int) -> RankReport:
        """What the launching process must know."""
        info = {**self._info, "max_prompt_tokens": max_prompt_tokens}
        return RankReport(hashtap.__version__, self.session is not None, self.boundaries, tuple(unhooked), info)

    def state(self) -> dict[str, Any]:
        """The epoch and the counters now, as plain data. Called on the scheduler's thread."""
        if self.session is None:
            return {}
        # A batch of SGLang's keeps the request whose chunk it held, until a later batch takes its place.
        for req in [req for req in self._requests if req.finished_reason is not None]:
            self._requests.discard(req)
            del req.hashtap
        return {"epoch": self.session.facts.epoch, "counters": self.session.counters()}

    def summary(self) -> str:
        """What is captured, how and where to, in a few lines for the log."""
        assert self.session is not None
        facts, config, path = self.session.facts, self.config, self._info["path"]
        geometry, free_bytes = facts.geometry, disk_usage(path).free
        row_bytes, room = geometry.row_bytes, free_bytes // geometry.row_bytes
        names = ", ".join(facts.layer_name(layer) for layer in range(geometry.layers))
        full = f"wait {config.capture_wait_s:g} s" if config.capture_when_full == "wait" else "drop"
        staging = f"2 x {config.capture_stage_mib} MiB" if self._device != "cpu" else "none on a CPU"
        lines = {
            "layers": names,
            "a token": f"{geometry.layers} x {geometry.hidden} {self._info['dtype']} = {row_bytes:,} bytes",
            "epoch": facts.epoch,
            "ring": f"{config.capture_ring_gib:g} GiB; when full: {full}",
            "staging": staging,
            "directory": f"{path}, {free_bytes / 2**30:.1f} GiB free = {room:,} tokens uncompressed",
        }
        title = f"hashtap {hashtap.__version__} captures {config.capture_requests} prompts"
        return "\n".join([title, *(f"  {name:<10} {text}" for name, text in lines.items())])

    def admit(self, req: Any) -> None:
        """A request enters the queue; also called again when it comes back to it."""
        if self.session is None or hasattr(req, "hashtap"):
            return
        if wants_capture(req, self.config.capture_requests, self._health_prefix):
            # On the request itself: it is tracked no longer than SGLang keeps it.
            req.hashtap = self.session.admit(
                req.rid, req.origin_input_ids, refuse=refusal(req), past_cache=is_past_the_cache(req)
            )
            self._requests.add(req)

    def begin_forward(self, batch: Any) -> bool:
        """A forward pass begins; whether it may hold prompt rows, so that :meth:`end_forward` must follow."""
        self._cache_is_empty = False
        if self.session is None or not batch.rids or batch.extend_seq_lens_cpu is None:
            return False
        if batch.forward_mode.name not in PREFILL_MODES:
            return False
        # A copy: where ranks are padded to one length, SGLang changes the lengths on its way to the tensors.
        self._forward = _Forward(
            tuple(batch.rids),
            tuple(batch.extend_seq_lens_cpu),
            tuple(batch.extend_prefix_lens_cpu),
            batch.input_ids,
            batch.positions,
        )
        self._reached, self._receipts = False, None
        return True

    @property
    def takes(self) -> bool:
        """Whether a pass runs that may hold rows to capture."""
        return self._forward is not None and not self._reached

    def take(self, input_ids: Any, positions: Any, final: Sequence[Any], aux: Any) -> None:
        """The tensors of the pass are alive: capture them.

        Args:
            input_ids: int ``[>= T]``, what the pass consumed; None for those of the noted batch, where a model of
                images and text embeds them before its layers.
            positions: int ``[>= T]``, where in its prompt each of them stands; None for those of the noted batch.
            final: tensors ``[>= T, H]``, in the order of :attr:`ShardFacts.finals`.
            aux: a list of B tensors ``[>= T, H]`` or one packed ``[>= T, B H]``, one for each boundary.

        Raises:
            SetupError: when they are not what was set up at the start.
        """
        forward = self._forward
        if forward is None or self._reached or self.session is None:
            return
        self._reached = True
        self._check_dtypes(final, aux)
        try:
            self._receipts = self.session.capture(
                Batch(
                    rids=forward.rids,
                    extend_lens=forward.extend_lens,
                    prefix_lens=forward.prefix_lens,
                    input_ids=(forward.input_ids if input_ids is None else input_ids).long(),
                    positions=(forward.positions if positions is None else positions).long(),
                    aux=aux,
                    final=final,
                )
            )
        except ValueError as error:
            raise SetupError(f"the model no longer hands out what was set up at the start: {error}") from error

    def end_forward(self, output: Any) -> None:
        """The pass is over: hand the receipts to the requests, through SGLang's own way into ``meta_info``.

        Raises:
            SetupError: when rows to capture went by without having been seen.
        """
        forward, self._forward = self._forward, None
        if self.session is None or forward is None:
            return
        if not self._reached and self.session.tracks(forward.rids):
            raise SetupError("a prompt was computed without coming to the point where its rows are captured")
        if self._receipts is not None:
            output.customized_info = {**(output.customized_info or {}), "hashtap": self._receipts}

    def holds_back(self) -> bool:
        """Whether the writing rank asks all ranks to schedule no new prompts now."""
        return self.session is not None and not self.session.may_admit()

    def end_epoch(self) -> None:
        """The weights are about to change."""
        if self.session is not None:
            self.session.end_epoch()

    def begin_epoch(self, weights: bytes, *, weights_move: bool = False) -> None:
        """The weights may have changed, to those of this fingerprint: from here on rows belong to another epoch.

        Where an update takes several steps they go on to move.
        """
        self._updates += 1
        if self.session is not None:
            self.session.begin_epoch(
                epoch_name(weights, self._updates), cache_is_empty=self._cache_is_empty, weights_move=weights_move
            )

    def cache_flushed(self) -> None:
        """SGLang emptied its prefix cache."""
        self._cache_is_empty = True
        if self.session is not None:
            self.session.cache_flushed()

    def close(self) -> None:
        """Write and seal what was captured."""
        if self.session is not None:
            try:
                self.session.close()
            except HashtapError as error:
                log.error("not everything could be sealed: %s", error)
            if self._watch is not None:
                self._watch.close()

    def _check_dtypes(self, final: Sequence[Any], aux: Any) -> None:
        assert self.session is not None
        expected = DTYPE_NAME[self.session.facts.geometry.dtype]
        tensors = [*final, *(aux if isinstance(aux, list | tuple) else [aux] if aux is not None else [])]
        for tensor in tensors:
            if (found := str(tensor.dtype).removeprefix("torch.")) != expected:
                raise SetupError(
                    f"the model hands out states of {found}, its weights are {expected}: cannot be captured"
                )
