"""The capture options: declared once, read from launch flags, the environment or ``hashtap.enable``.

Each field of :class:`CaptureConfig` is one option. Its key (``capture_ring_gib``) gives the flag
(``--capture-ring-gib``) and the environment twin (``HASHTAP_CAPTURE_RING_GIB``). The environment is
also how the options reach the processes that SGLang spawns. This is the only module that reads or
writes ``os.environ``.
"""

import argparse
import os
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, Literal, Self

from hashtap.errors import UsageError

__all__ = ["CaptureConfig", "child_environment", "enable", "parse_boundaries"]

GROUP = "hashtap: capture of hidden states"
ENV_PREFIX = "HASHTAP_CAPTURE_"


def parse_boundaries(text: str) -> tuple[int, ...]:
    """``2 15 27`` or ``2,15,27``. Raises ValueError for anything but whole numbers."""
    return tuple(int(part) for part in text.replace(",", " ").split())


def _option(default: Any, text: str, parse: Callable[[str], Any] = str, choices: tuple[str, ...] = ()) -> Any:
    return field(default=default, metadata={"help": text, "parse": parse, "choices": choices})


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureConfig:
    """What to capture, where to, and within which limits.

    Raises:
        UsageError: when a value is out of its range; the message names option, value and remedy.
    """

    capture_dir: str = _option("", "directory to write captures to; turns capture on")
    capture_layers: tuple[int, ...] | None = _option(
        None,
        "boundaries of the auxiliary layers: b = the residual stream after b decoder layers [2 n/2 n-3]",
        parse_boundaries,
    )
    capture_final: Literal["post", "pre", "both"] = _option(
        "post",
        "the final state: after the final norm, as lm_head reads it, before it, or both of them",
        choices=("post", "pre", "both"),
    )
    capture_requests: str = _option(
        "tagged",
        'whose prompts: those sent with custom_params {"hashtap": true}, or all but health checks and warm-up',
        choices=("tagged", "all"),
    )
    capture_prefix_cache: Literal["off", "on"] = _option(
        "off",
        "the server's prefix cache: rows that it serves are shared with an earlier capture",
        choices=("off", "on"),
    )
    capture_ring_gib: float = _option(4.0, "host memory of each writing rank for rows on their way to disk", float)
    capture_stage_mib: int = _option(512, "device memory of one staging slot; there are two", int)
    capture_writers: int = _option(
        2, "processes that compress and write; with --capture-prefix-cache on, threads of one", int
    )
    capture_codec: Literal["zstd", "none"] = _option("zstd", "lossless compression", choices=("zstd", "none"))
    capture_shard_gib: float = _option(2.0, "seal a shard at this size", float)
    capture_seal_after_s: float = _option(
        5.0, "seal a shard after this many seconds without new rows, or when it has been open 12 times as long", float
    )
    capture_when_full: str = _option(
        "wait", "with a full ring: hold back new prompts, or drop their captures", choices=("wait", "drop")
    )
    capture_wait_s: float = _option(60.0, "how long to hold back before captures are dropped", float)

    def __post_init__(self) -> None:
        if not self.capture_dir:
            raise UsageError("--capture-dir is empty: name the directory to write captures to")
        for key, low, high in (
            ("capture_ring_gib", 1 / 1024, 4096),
            ("capture_stage_mib", 1, 65536),
            ("capture_writers", 1, 64),
            ("capture_shard_gib", 1 / 1024, 1024),
            ("capture_seal_after_s", 0.05, 86400),
            ("capture_wait_s", 0, 86400),
        ):
            value = getattr(self, key)
            if not low <= value <= high:
                raise UsageError(f"{_flag(key)} {value} is out of range: give a number from {low:g} to {high}")
        layers = self.capture_layers
        if layers is None:
            return
        most = 6 if self.capture_final == "both" else 7
        if not 1 <= len(layers) <= most or list(layers) != sorted(set(layers)) or layers[0] < 0:
            raise UsageError(
                f"--capture-layers {' '.join(map(str, layers))}: give 1 to {most} different boundaries in rising "
                "order, each the number of decoder layers below it"
            )

    @property
    def ring_bytes(self) -> int:
        """Host memory of the ring, in bytes."""
        return int(self.capture_ring_gib * 2**30)

    @property
    def stage_bytes(self) -> int:
        """Device memory of one staging slot, in bytes."""
        return self.capture_stage_mib * 2**20

    @property
    def shard_bytes(self) -> int:
        """Size at which a shard is sealed, in bytes."""
        return int(self.capture_shard_gib * 2**30)

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Add the options to ``parser`` in a group of their own. An option not given falls back to its twin."""
        group = parser.add_argument_group(GROUP, "each flag has an environment twin, e.g. HASHTAP_CAPTURE_DIR")
        for option in fields(CaptureConfig):
            meta, default = option.metadata, option.default
            text = meta["help"] if default in ("", None) else f"{meta['help']} [{default}]"
            nargs = "+" if option.name == "capture_layers" else None
            group.add_argument(_flag(option.name), dest=option.name, metavar=_metavar(option), help=text, nargs=nargs)

    @classmethod
    def from_args(cls, args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> Self | None:
        """The options of a parsed command line over those of the environment; None when capture is off.

        Raises:
            UsageError: for a value that cannot be read or is out of range.
        """
        given: dict[str, str] = {}
        for option in fields(cls):
            value = getattr(args, option.name, None)
            if value is not None:
                given[option.name] = " ".join(value) if isinstance(value, list) else value
        return cls._parse(_from_environment(environ) | given, lambda key: _flag(key) if key in given else _twin(key))

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Self | None:
        """The options of the environment; None when capture is off.

        Raises:
            UsageError: for an unknown ``HASHTAP_CAPTURE_`` variable or a value that cannot be read.
        """
        return cls._parse(_from_environment(environ), _twin)

    @classmethod
    def _parse(cls, texts: Mapping[str, str], name_of: Callable[[str], str]) -> Self | None:
        if texts.get("capture_dir"):
            return cls._read(texts, name_of)
        if "capture_dir" in texts:
            raise UsageError(f"{name_of('capture_dir')} is empty: name the directory to write captures to")
        if texts:
            raise UsageError(f"{name_of(next(iter(texts)))} is given without --capture-dir, which turns capture on")
        return None

    @classmethod
    def _read(cls, texts: Mapping[str, str], name_of: Callable[[str], str]) -> Self:
        values: dict[str, Any] = {}
        for option in fields(cls):
            if option.name not in texts:
                continue
            text, meta = texts[option.name], option.metadata
            try:
                values[option.name] = meta["parse"](text)
            except ValueError:
                raise UsageError(f"{name_of(option.name)} {text!r} is not {_metavar(option)}") from None
            if meta["choices"] and text not in meta["choices"]:
                raise UsageError(f"{name_of(option.name)} {text!r}: choose from {', '.join(meta['choices'])}")
        return cls(**values)

    def to_env(self) -> dict[str, str]:
        """The environment twins that :meth:`from_env` reads back to an equal config."""
        texts: dict[str, str] = {}
        for option in fields(self):
            value = getattr(self, option.name)
            if value is not None:
                texts[_twin(option.name)] = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
        return texts

    def export(self, environ: MutableMapping[str, str] = os.environ) -> None:
        """Put the options into the environment, for the processes that SGLang spawns."""
        environ.update(self.to_env())


def enable(**options: Any) -> CaptureConfig:
    """Turn capture on for a ``sglang.Engine`` that this process creates afterwards.

    Takes the keys of :class:`CaptureConfig`: ``hashtap.enable(capture_dir="/data/run1", capture_layers=[2, 15, 27])``.

    Raises:
        UsageError: for an unknown key or a value out of range.
    """
    known = [option.name for option in fields(CaptureConfig)]
    for key in options:
        if key not in known:
            raise UsageError(f"hashtap.enable has no option {key!r}: choose from {', '.join(known)}")
    texts = {
        key: " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        for key, value in options.items()
        if value is not None
    }
    if not texts.get("capture_dir"):
        raise UsageError("hashtap.enable needs capture_dir, the directory to write captures to")
    config = CaptureConfig._read(texts, str)
    config.export()
    return config


def child_environment(more: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """This process's environment for a child, without the capture options that it may hold, and with ``more``."""
    return {name: text for name, text in environ.items() if not name.startswith(ENV_PREFIX)} | dict(more)


def _flag(key: str) -> str:
    return "--" + key.replace("_", "-")


def _twin(key: str) -> str:
    return "HASHTAP_" + key.upper()


def _metavar(option: "Field[Any]") -> str:
    parse = option.metadata["parse"]
    if option.metadata["choices"]:
        return "{" + ",".join(option.metadata["choices"]) + "}"
    return {parse_boundaries: "BOUNDARY", int: "INT", float: "NUMBER"}.get(parse, "DIR")


def _from_environment(environ: Mapping[str, str]) -> dict[str, str]:
    keys = {_twin(option.name): option.name for option in fields(CaptureConfig)}
    texts = {}
    for name, text in environ.items():
        if name.startswith(ENV_PREFIX) and text:
            if name not in keys:
                raise UsageError(f"{name} is no capture option: choose from {', '.join(keys)}")
            texts[keys[name]] = text
    return texts
