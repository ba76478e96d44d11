"""What SGLang calls in its launching process and in every process that it spawns."""

__all__ = ["register"]


def register() -> None:
    """Add hashtap's flags to SGLang's, and its hooks where capture is on. Loads nothing heavy where it is off."""
    from hashtap.sglang_seam import register_hooks

    register_hooks()
