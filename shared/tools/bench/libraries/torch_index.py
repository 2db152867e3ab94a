"""torch: a cache write by `index_copy_`, for keys and for values."""

from typing import Any

import torch
from torch import Tensor

from ..inputs import Inputs
from .library import AttentionLibrary, Declined, Prepared, decline_features


class TorchIndex(AttentionLibrary):
    """torch's `index_copy_` of new rows to their slots."""

    name, title, package = "torch-index", "torch, index_copy_", "torch"

    def prepare(self, inputs: Inputs) -> Prepared:
        if inputs.workload.kind != "write":
            raise Declined("it writes a cache and computes no attention")
        decline_features(inputs.workload)
        pairs = [
            (_bytes(cache).flatten(0, 1), new, cache.dtype)
            for cache, new in (
                (inputs.key_cache, inputs.key),
                (inputs.value_cache, inputs.value),
            )
        ]

        def call() -> Any:
            for slots, new, dtype in pairs:
                slots.index_copy_(0, inputs.slot_mapping, _bytes(new.to(dtype)))

        return Prepared(call)


def _bytes(tensor: Tensor) -> Tensor:
    """Return FP8 numbers as bytes, because torch does not index FP8 tensors everywhere."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
