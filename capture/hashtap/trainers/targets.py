"""What each trainer reads: names, shapes, dtypes, layer ids, norm and file names of one sample.

Row t of every tensor is the state after token t; nothing is shifted here. Each of these trainers shifts by one itself.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hashtap.errors import UsageError
from hashtap.trainers.view import View

__all__ = ["TARGETS", "Fields", "Target", "target_named"]

Fields = dict[str, Tensor | str | bool]
"""The content of one sample's file."""


@dataclass(frozen=True, slots=True)
class Target:
    """How one trainer wants its samples.

    Attributes:
        name: what ``--to`` calls it.
        release: whose reader was read and tested.
        layer_ids: ``output`` names a layer by the 0-based decoder layer whose output it is (boundary b is b - 1),
            ``boundary`` by the boundary itself.
        final: the norm that the reader expects of the final state; ``any`` takes both and is told.
        aux_layers: how many auxiliary layers it reads; None for any number.
        needs_mask: whether a sample without loss mask cannot be read.
        file: the n-th sample's file, relative to the output.
        fields: what that file holds.
        shapes: the same in words, for the notes.
        advice: what the trainer must be told; ``{ids}`` are the layer ids.
    """

    name: str
    release: str
    layer_ids: Literal["output", "boundary"]
    final: Literal["post", "pre", "any"]
    aux_layers: int | None
    needs_mask: bool
    file: Callable[[int], str]
    fields: Callable[[View], Fields]
    shapes: dict[str, str]
    advice: str

    def __reduce__(self) -> tuple[Callable[[str], "Target"], tuple[str]]:
        return target_named, (self.name,)

    def ids_of(self, boundaries: tuple[int, ...]) -> list[int]:
        """Boundaries in the target's own layer ids.

        Raises:
            UsageError: when one has no id.
        """
        if self.layer_ids == "boundary":
            return list(boundaries)
        if 0 in boundaries:
            raise UsageError(
                f"boundary 0, the embeddings, is no decoder layer's output and has no id in {self.name}: leave it out "
                "with --layers"
            )
        return [boundary - 1 for boundary in boundaries]


def target_named(name: str) -> Target:
    """The target of that name.

    Raises:
        UsageError: when there is none.
    """
    if name not in TARGETS:
        raise UsageError(f"{name!r} is no trainer that hashtap exports to; take one of {', '.join(TARGETS)}")
    return TARGETS[name]


def _specforge(view: View) -> Fields:
    return {
        "input_ids": view.input_ids,
        "loss_mask": view.mask,
        "aux_hidden_state": view.aux.unsqueeze(0),
        "hidden_state": view.final.unsqueeze(0),
    }


def _speculators(view: View) -> Fields:
    return {"hidden_states": view.states.contiguous(), "token_ids": view.input_ids}


def _modelopt(view: View) -> Fields:
    mask: Fields = {} if view.loss_mask is None else {"loss_mask": view.loss_mask}
    return {
        "conversation_id": view.sample_id,
        "input_ids": view.input_ids,
        "hidden_states": view.final,
        "aux_hidden_states": view.aux,
        "hidden_states_prenorm": view.prenorm,
        **mask,
    }


def _angelslim(view: View) -> Fields:
    return {
        "input_ids": view.input_ids.unsqueeze(0),
        "loss_mask": view.mask.unsqueeze(0),
        "hidden_states": view.aux.unsqueeze(0),
        "target_hiddens": view.final.unsqueeze(0),
    }


def _safetensors(view: View) -> Fields:
    mask: Fields = {} if view.loss_mask is None else {"loss_mask": view.loss_mask.to(torch.uint8)}
    return {"input_ids": view.input_ids, "hidden_states": view.states.contiguous(), **mask}


def _rows(size: int) -> Callable[[int], str]:
    """Files in folders of ``size``, as two trainers' own scripts write them; padded, so that names sort by number."""

    def file(index: int) -> str:
        first = index // size * size
        return f"rows_{first:08d}-{first + size:08d}/data_{index:08d}.ckpt"

    return file


TARGETS = {
    target.name: target
    for target in (
        Target(
            name="specforge",
            release="specforge 0.2.0, offline EAGLE-3",
            layer_ids="output",
            final="post",
            aux_layers=3,
            needs_mask=True,
            file=_rows(2000),
            fields=_specforge,
            shapes={
                "input_ids": "int64 [T]",
                "loss_mask": "int64 [T]",
                "aux_hidden_state": "[1, T, 3H], auxiliary layers, lowest first",
                "hidden_state": "[1, T, H], final state",
            },
            advice="the draft was trained on the outputs of the target's layers {ids}",
        ),
        Target(
            name="speculators",
            release="speculators 0.9.0 with hs-connectors 0.9.0",
            layer_ids="boundary",
            final="pre",
            aux_layers=3,
            needs_mask=True,
            file=lambda index: f"hidden_states/hs_{index}.safetensors",
            fields=_speculators,
            shapes={
                "hidden_states": "[T, 4, H], auxiliary layers, lowest first, then the final state",
                "token_ids": "int64 [T]",
                "Arrow columns": "input_ids int64 [T], loss_mask int64 [T], seq_len int64",
            },
            advice="speculators train --target-layer-ids {ids}",
        ),
        Target(
            name="modelopt",
            release="nvidia-modelopt 0.47.0, offline EAGLE",
            layer_ids="output",
            final="any",
            aux_layers=3,
            needs_mask=False,
            file=lambda index: f"sample_{index:08d}.pt",
            fields=_modelopt,
            shapes={
                "conversation_id": "the sample's id",
                "input_ids": "int64 [T]",
                "hidden_states": "[T, H], final state",
                "aux_hidden_states": "[T, 3H], auxiliary layers, lowest first",
                "hidden_states_prenorm": "whether the final state is the one before the final norm",
                "loss_mask": "int64 [T], left out where the sample has none; read with answer_only_loss",
            },
            advice="eagle_aux_hidden_state_layer_ids {ids}",
        ),
        Target(
            name="angelslim",
            release="angelslim 0.5.0, offline EAGLE-3",
            layer_ids="output",
            final="post",
            aux_layers=3,
            needs_mask=True,
            file=_rows(5000),
            fields=_angelslim,
            shapes={
                "input_ids": "int64 [1, T]",
                "loss_mask": "int64 [1, T]",
                "hidden_states": "[1, T, 3H], auxiliary layers, lowest first",
                "target_hiddens": "[1, T, H], final state",
            },
            advice="the draft was trained on the outputs of the target's layers {ids}",
        ),
        Target(
            name="safetensors",
            release="any reader of safetensors",
            layer_ids="boundary",
            final="any",
            aux_layers=None,
            needs_mask=False,
            file=lambda index: f"sample_{index:08d}.safetensors",
            fields=_safetensors,
            shapes={
                "input_ids": "int64 [T]",
                "hidden_states": "[T, L, H], the layers of `boundaries`, then the final state or states",
                "loss_mask": "uint8 [T], left out where the sample has none",
            },
            advice="layers are the boundaries {ids}, then the final state",
        ),
    )
}
"""By name."""
