"""torch: scaled_dot_product_attention over a dense batch, on one of its backends.

It cannot read pages. Except for encoders it gets keys that were gathered in advance, so it does
less work than the others.
"""

from typing import Any

import torch
from torch import Tensor

from ..inputs import Inputs
from .library import AttentionLibrary, Declined, Prepared, decline_features


class TorchAttention(AttentionLibrary):
    """torch's scaled_dot_product_attention on one of its backends, over gathered keys.

    Args:
        device: The device to run on.
        backend: A name of `torch.nn.attention.SDPBackend`.
        name, title: Names of the library in the record and in print.
    """

    package = "torch"

    def __init__(self, device: str, backend: str, name: str, title: str) -> None:
        super().__init__(device)
        self.backend, self.name, self.title = backend, name, title

    def missing(self) -> str:
        if self.backend == "CUDNN_ATTENTION" and self.device == "cpu":
            return "needs a CUDA device"
        return ""

    def prepare(self, inputs: Inputs) -> Prepared:
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.attention.bias import causal_lower_right

        workload = inputs.workload
        if workload.kind == "write":
            raise Declined("torch has no paged cache to write to")
        decline_features(workload)
        if workload.is_ragged:
            raise Declined(
                "it takes dense batches, and these requests differ in length"
            )
        if workload.is_quantised:
            raise Declined("it does not support FP8 keys")
        query_len, kv_len = workload.query_lens[0], workload.kv_lens[0]
        if workload.sliding_window is not None and query_len > 1:
            raise Declined("it does not support a sliding window")
        arguments: dict[str, Any] = {
            "enable_gqa": workload.query_heads > workload.kv_heads
        }
        if workload.causal and query_len == kv_len:
            arguments["is_causal"] = True
        elif workload.causal and query_len > 1:
            if self.backend == "CUDNN_ATTENTION":
                raise Declined(
                    "torch does not pass it a causal mask aligned to the last key"
                )
            arguments["attn_mask"] = causal_lower_right(query_len, kv_len)
        attend = torch.nn.functional.scaled_dot_product_attention
        backends = [getattr(SDPBackend, self.backend)]
        dense = inputs.dense

        def call() -> Tensor:
            with sdpa_kernel(backends):
                return attend(*dense, **arguments)

        def rows(result: Tensor) -> Tensor:
            return result.transpose(1, 2).flatten(0, 1)

        if workload.kind == "encoder":
            return Prepared(call, rows, "dense batch prepared in advance")
        return Prepared(call, rows, "dense: keys gathered in advance", same_work=False)
