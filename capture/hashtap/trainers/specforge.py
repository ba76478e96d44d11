"""SpecForge's offline samples, served from shards: a feature store and its references, for

specforge.launch.build_disagg_offline_runtime(feature_store=store, refs=store.refs(...), ...)
"""

from collections.abc import Sequence
from typing import Any

from specforge.runtime.contracts import SCHEMA_VERSION, FeatureHandle, SampleRef
from specforge.runtime.data_plane.feature_store import FeatureStore

from hashtap.errors import UsageError
from hashtap.trainers.source import TrainerSource

__all__ = ["CapturedStore"]

_SCHEME = "hashtap://"
_KEYS = ("input_ids", "loss_mask", "hidden_state", "aux_hidden_state")


class CapturedStore(FeatureStore):
    """Reads samples of a capture directory; ``source`` is for the target ``specforge``. Nothing is kept or written."""

    def __init__(self, source: TrainerSource) -> None:
        self._source = source

    def refs(self, *, run_id: str = "offline", ttt_length: int = 7, max_len: int = 2048) -> list[SampleRef]:
        """A reference for each sample, as SpecForge's ``OfflineManifestReader`` makes them for files."""
        return [
            SampleRef(
                sample_id=f"{run_id}:{index:08d}",
                run_id=run_id,
                source_task_id=None,
                feature_store_uri=f"{_SCHEME}{index}",
                feature_keys={key: key for key in _KEYS},
                feature_specs={},
                strategy="eagle3",
                schema_version=SCHEMA_VERSION,
                target_model_version="unknown",
                tokenizer_version="unknown",
                num_tokens=sample.tokens,
                estimated_bytes=0,
                metadata={
                    "format": "offline_eagle3",
                    "target_repr": "hidden_state",
                    "schema_version": SCHEMA_VERSION,
                    "ttt_length": ttt_length,
                    "max_len": max_len,
                    "file_index": index,
                },
            )
            for index, sample in enumerate(self._source.samples)
        ]

    def get(
        self, sample_ref: SampleRef, *, device: Any = "cpu", names: Sequence[str] | None = None
    ) -> tuple[dict[str, Any], FeatureHandle]:
        """The tensors of a reference that :meth:`refs` made, and a handle that need not be given back."""
        index = int(sample_ref.feature_store_uri.removeprefix(_SCHEME))
        fields: dict[str, Any] = dict(self._source[index])
        tensors = {name: fields[sample_ref.feature_keys[name]].to(device) for name in names or _KEYS}
        return tensors, FeatureHandle(sample_id=sample_ref.sample_id, generation=0, lease_token=f"hashtap:{index}")

    def put(self, tensors: dict[str, Any], *, sample_id: str, metadata: dict[str, Any]) -> SampleRef:
        """Captures are read only: UsageError."""
        raise UsageError("captures are read only: hashtap extract adds to them")

    def release(self, handle: FeatureHandle, *, reason: str = "consumed") -> None:
        """Nothing is held."""

    def abort(self, sample_id: str, *, reason: str = "aborted") -> None:
        """Nothing is held."""

    def health(self) -> dict[str, Any]:
        """Nothing is held, so nothing is pending."""
        return {"resident_samples": 0, "resident_bytes": 0, "active_leases": 0, "release_pending": 0}
