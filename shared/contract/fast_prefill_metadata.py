"""The metadata fields of fast prefill."""

from typing import Any, Protocol, runtime_checkable

from torch import Tensor

KV_SHARING_FAST_PREFILL_METADATA_FIELDS: tuple[tuple[str, Any, Any], ...] = (
    ("logits_indices_padded", Tensor | None, None),
    ("num_logits_indices", int | None, None),
)
"""Name, type and default of the additional fields (vLLM's name)."""


@runtime_checkable
class KVSharingFastPrefillMetadata(Protocol):
    """Metadata with the tokens whose logits are wanted (vLLM's name).

    Every object with both fields is an instance.

    Args:
        logits_indices_padded: [padded] tokens of the step. Entries past the count are repeats.
        num_logits_indices: number of wanted tokens.
    """

    logits_indices_padded: Tensor | None
    num_logits_indices: int | None
