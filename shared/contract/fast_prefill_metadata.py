"""What does attention metadata carry when only some tokens go on to the logits?"""

from typing import Any, Protocol, runtime_checkable

from torch import Tensor

KV_SHARING_FAST_PREFILL_METADATA_FIELDS: tuple[tuple[str, Any, Any], ...] = (
    ("logits_indices_padded", Tensor | None, None),
    ("num_logits_indices", int | None, None),
)
"""Name, type and default of the fields that fast prefill adds (vLLM's name)."""


@runtime_checkable
class KVSharingFastPrefillMetadata(Protocol):
    """Metadata that says whose logits are wanted (vLLM's name).

    Whoever has both fields is an instance, whatever its class.

    Args:
        logits_indices_padded: [padded] tokens of the step, those past the count repeat.
        num_logits_indices: how many of them are meant.
    """

    logits_indices_padded: Tensor | None
    num_logits_indices: int | None
