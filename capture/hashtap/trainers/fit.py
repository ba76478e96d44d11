"""What of a captured row a trainer takes: the refusals of what it would train wrongly on."""

from hashtap.errors import UsageError
from hashtap.facts import ShardFacts
from hashtap.trainers.targets import Target
from hashtap_kernels.layout import Dtype

__all__ = ["taken_final", "taken_layers"]


def taken_final(target: Target, facts: ShardFacts) -> str:
    """The captured final state that is nearest to what the target reads: pre, post, or both.

    Raises:
        UsageError: when it is of the wrong norm, and cannot be made into the right one.
    """
    if target.aux_layers is None or len(facts.finals) == 1:
        final: str = facts.final_norm
    else:
        final = "pre" if target.final == "pre" else "post"
    if (target.final, final) == ("post", "pre"):
        raise UsageError(
            f"{target.name} reads the final state after the final norm, and these captures have it before: capture "
            "with --capture-final post"
        )
    return final


def taken_layers(target: Target, facts: ShardFacts, boundaries: tuple[int, ...], final: str) -> list[int] | None:
    """Which places of the layer axis are taken, the final state's last; None for all as they are.

    Raises:
        UsageError: when ``boundaries`` are not captured, or not as many, or not in the order, that the target reads.
    """
    captured = list(facts.boundaries)
    if strange := [boundary for boundary in boundaries if boundary not in captured]:
        raise UsageError(f"boundary {strange[0]} is not captured; the captures have {captured}")
    if list(boundaries) != sorted(set(boundaries)):
        raise UsageError(
            f"layers {list(boundaries)} are not in rising order, which is how every trainer reads them: give them with "
            f"--layers {','.join(map(str, sorted(set(boundaries))))}"
        )
    if target.aux_layers is not None and len(boundaries) != target.aux_layers:
        raise UsageError(
            f"{target.name} reads {target.aux_layers} auxiliary layers, and these are {len(boundaries)}: choose "
            f"{target.aux_layers} of {captured} with --layers, or capture others with --capture-layers"
        )
    if target.name != "safetensors" and facts.geometry.dtype is Dtype.FP8_E4M3:
        raise UsageError(f"{target.name} reads no float8 states: capture bfloat16, or export --to safetensors")
    taken = [captured.index(boundary) for boundary in boundaries]
    taken += [len(captured) + place for place, state in enumerate(facts.finals) if final in (state, "both")]
    return None if taken == list(range(facts.geometry.layers)) else taken
