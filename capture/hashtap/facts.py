"""What holds for every frame of a shard: its facts, and how safetensors metadata spell them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from hashtap.directory import FORMAT_VERSION
from hashtap.errors import FormatError
from hashtap_kernels.layout import Dtype, Geometry

__all__ = ["DTYPE_NAME", "FINAL_STATES", "FinalNorm", "ShardFacts"]

DTYPE_NAME = {Dtype.BF16: "bfloat16", Dtype.FP16: "float16", Dtype.FP32: "float32", Dtype.FP8_E4M3: "float8_e4m3fn"}
_DTYPE_OF = {name: dtype for dtype, name in DTYPE_NAME.items()}
_LAYOUT = "token,layer,hidden"

FinalNorm = Literal["post", "pre", "both"]
FINAL_STATES: Mapping[str, tuple[str, ...]] = {"post": ("post",), "pre": ("pre",), "both": ("pre", "post")}
"""The final states at the end of the layer axis, by ``final_norm``: after the final norm, before it, or both."""


@dataclass(frozen=True, slots=True)
class ShardFacts:
    """What holds for every frame of a shard. It stands in the file's ``__metadata__``.

    Attributes:
        model: the model's name, as the server calls it.
        epoch: which weights.
        boundaries: the auxiliary layers, as boundaries, in the order of the layer axis; the final state comes last.
        final_norm: whether the final state was taken after ("post") or before ("pre") the final norm; with "both" the
            last two layers are the state before it and the state after it.
        geometry: L (the final states included), H and element type.
        seed: of the proofs.
        directory_uuid: the capture directory that it was written to.
        writer: uuid hex of the writing run.
        rank: the writer's rank.
        versions: of hashtap, sglang, torch.
        server_flags: what the server was started with.
    """

    model: str
    epoch: str
    boundaries: tuple[int, ...]
    final_norm: FinalNorm
    geometry: Geometry
    seed: tuple[int, int]
    directory_uuid: str
    writer: str
    rank: int
    versions: Mapping[str, str]
    server_flags: Mapping[str, Any]

    def __post_init__(self) -> None:
        if self.final_norm not in FINAL_STATES:
            raise ValueError(f"final_norm is {self.final_norm!r}, not one of {', '.join(FINAL_STATES)}")
        if len(self.boundaries) + len(self.finals) != self.geometry.layers:
            raise ValueError(
                f"boundaries {self.boundaries} and the final state ({self.final_norm}) are not {self.geometry.layers} "
                "layers"
            )

    @property
    def finals(self) -> tuple[str, ...]:
        """The final states at the end of the layer axis: ``("post",)``, ``("pre",)`` or ``("pre", "post")``."""
        return FINAL_STATES[self.final_norm]

    def layer_name(self, layer: int) -> str:
        """What layer ``layer`` of the layer axis is: ``"boundary 15"`` or ``"final (post-norm)"``."""
        if layer < len(self.boundaries):
            return f"boundary {self.boundaries[layer]}"
        return f"final ({self.finals[layer - len(self.boundaries)]}-norm)"

    def to_metadata(self) -> dict[str, str]:
        """The facts as safetensors metadata, strings only."""
        values: dict[str, Any] = {
            "format": FORMAT_VERSION,
            "layout": _LAYOUT,
            "model": self.model,
            "epoch": self.epoch,
            "boundaries": list(self.boundaries),
            "final_norm": self.final_norm,
            "layers": self.geometry.layers,
            "hidden": self.geometry.hidden,
            "dtype": DTYPE_NAME[self.geometry.dtype],
            "seed": f"{self.seed[0]:016x}{self.seed[1]:016x}",
            "directory": self.directory_uuid,
            "writer": self.writer,
            "rank": self.rank,
            "versions": dict(self.versions),
            "server_flags": dict(self.server_flags),
        }
        return {
            f"hashtap.{name}": value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
            for name, value in values.items()
        }

    @classmethod
    def from_metadata(cls, metadata: object) -> "ShardFacts":
        """The facts that :meth:`to_metadata` wrote, out of a file that may hold anything.

        Raises:
            FormatError: when they are not hashtap's, of another format version, or damaged.
        """
        if (
            not isinstance(metadata, dict)
            or not all(isinstance(value, str) for value in metadata.values())
            or "hashtap.format" not in metadata
        ):
            raise FormatError("it is a safetensors file, but not hashtap's")
        if metadata["hashtap.format"] != str(FORMAT_VERSION):
            raise FormatError(
                f"it is written in format {metadata['hashtap.format']!r} and this hashtap reads {FORMAT_VERSION}"
            )
        try:
            text = {name.removeprefix("hashtap."): value for name, value in metadata.items()}
            if text["layout"] != _LAYOUT:
                raise ValueError(f"layout {text['layout']!r}")
            boundaries = json.loads(text["boundaries"])
            if not all(type(boundary) is int and 0 <= boundary < 1 << 64 for boundary in boundaries):
                raise ValueError(f"boundaries {text['boundaries'][:80]!r}")
            seed = bytes.fromhex(text["seed"])
            if len(seed) != 16:
                raise ValueError(f"seed {text['seed']!r}")
            return cls(
                model=text["model"],
                epoch=text["epoch"],
                boundaries=tuple(boundaries),
                final_norm=cast("FinalNorm", text["final_norm"]),
                geometry=Geometry(int(text["layers"]), int(text["hidden"]), _DTYPE_OF[text["dtype"]]),
                seed=(int.from_bytes(seed[:8], "big"), int.from_bytes(seed[8:], "big")),
                directory_uuid=text["directory"],
                writer=text["writer"],
                rank=int(text["rank"]),
                versions=dict(json.loads(text["versions"])),
                server_flags=dict(json.loads(text["server_flags"])),
            )
        except (KeyError, ValueError, TypeError, RecursionError) as error:
            raise FormatError(f"its facts are damaged ({type(error).__name__}: {error})") from None
