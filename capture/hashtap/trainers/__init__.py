"""Captures in the form that each trainer reads: written once more (:mod:`export`), or served from the shards.

    from hashtap.trainers.source import TrainerSource
    TrainerSource("captures", "modelopt")[0]        # what the exported file would hold

Needs torch.
"""
