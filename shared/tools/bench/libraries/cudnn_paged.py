"""cuDNN: its attention over a block table, as graphs of nvidia-cudnn-frontend.

A graph is built for the shapes of a workload. It aligns the causal mask and the window with the
last key of each request. Batches with several new tokens per request are packed: their rows start
at the offsets of a ragged tensor.
"""

import importlib
from typing import Any

import torch
from torch import Tensor

from ..inputs import Inputs
from .library import (
    AttentionLibrary,
    Declined,
    Prepared,
    decline_features,
    library_error,
    why_no_modules,
)

(
    QUERY, KEY, VALUE, OUT, QUERY_LENS, KV_LENS, TABLE_K, TABLE_V, STARTS, KV_STARTS, OUT_STARTS
) = range(1, 12)  # fmt: skip
"""Numbers by which a graph knows its tensors."""


class CudnnPaged(AttentionLibrary):
    """cuDNN's attention with a block table."""

    name, title, package = "cudnn", "cuDNN", "nvidia-cudnn-frontend"

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self._handle: Any = None

    def version(self) -> str | None:
        """Return the version of the frontend, and of cuDNN once it is loaded."""
        frontend = super().version()
        if self._handle is None:
            return frontend
        library = importlib.import_module("cudnn")
        frontend = frontend or str(library.__version__)
        return f"{library.backend_version_string()}, frontend {frontend}"

    def missing(self) -> str:
        if self.device == "cpu":
            return "needs a CUDA device"
        if reason := why_no_modules("cudnn", install="nvidia-cudnn-frontend"):
            return reason
        try:
            self._handle = importlib.import_module("cudnn").create_handle()
        except Exception as error:  # a broken installation fails in many ways
            return library_error("cudnn", error)
        return ""

    def prepare(self, inputs: Inputs) -> Prepared:
        workload = inputs.workload
        if workload.kind == "write":
            raise Declined("it does not write a cache")
        decline_features(workload, {"values smaller than keys"})
        if workload.is_quantised:
            raise Declined(
                "its operator for an FP8 cache needs FP8 queries and outputs"
            )
        library: Any = importlib.import_module("cudnn")
        out = inputs.fresh()
        graph, tensors = self._build(library, inputs, out)
        workspace = torch.empty(
            max(1, graph.get_workspace_size()), dtype=torch.uint8, device=inputs.device
        )

        def call() -> Tensor:
            if self.device != "cpu":
                stream = torch.cuda.current_stream().cuda_stream
                library.set_stream(self._handle, stream)
            graph.execute(tensors, workspace, handle=self._handle)
            return out

        return Prepared(call, note="graph built in advance")

    def _build(
        self, library: Any, inputs: Inputs, out: Tensor
    ) -> tuple[Any, dict[int, Tensor]]:
        """Return the graph of a workload, and its tensors by their numbers."""
        workload = inputs.workload
        kinds = library.data_type
        numbers = {torch.bfloat16: kinds.BFLOAT16, torch.float16: kinds.HALF}
        graph = library.pygraph(
            handle=self._handle,
            io_data_type=numbers[workload.dtype],
            intermediate_data_type=kinds.FLOAT,
            compute_data_type=kinds.FLOAT,
        )
        bound: dict[int, Tensor] = {}

        def bind(uid: int, tensor: Tensor, kind: Any, *view: Any, **more: Any) -> Any:
            """Return a graph's tensor with a size and strides, by default those of a tensor."""
            bound[uid] = tensor
            size, strides = view or (tensor.shape, tensor.stride())
            return graph.tensor(
                name=f"tensor_{uid}", uid=uid, dim=list(size), stride=list(strides),
                data_type=kind, **more,
            )  # fmt: skip

        def count(uid: int, numbers: Tensor) -> Any:
            """Return a graph's tensor of one integer per request."""
            return bind(uid, numbers.int().view(-1, 1, 1, 1).contiguous(), kinds.INT32)

        def offsets(uid: int, row: int) -> Any:
            """Return where the rows of each request start, in elements."""
            starts = (inputs.query_start_loc * row).int().view(-1, 1, 1, 1)
            return bind(uid, starts, kinds.INT32)

        def packed(uid: int, tensor: Tensor, longest: int, starts: Any) -> Any:
            """Return [tokens, heads, size] as [reqs, heads, longest, size]."""
            size, strides = _padded(tensor, len(workload.kv_lens), longest)
            return bind(uid, tensor, kind, size, strides, ragged_offset=starts)

        kind, is_decode = numbers[workload.dtype], inputs.max_query_len == 1
        row = workload.query_heads * workload.head_size
        starts = None if is_decode else offsets(STARTS, row)
        query = packed(QUERY, inputs.query, inputs.max_query_len, starts)
        options: dict[str, Any] = {
            "attn_scale": workload.scale,
            "use_padding_mask": True,
            "seq_len_q": count(QUERY_LENS, inputs.query_start_loc.diff()),
            "seq_len_kv": count(KV_LENS, inputs.seq_lens),
            "generate_stats": False,
        }
        if workload.causal and not (is_decode and workload.sliding_window is None):
            options["use_causal_mask_bottom_right"] = True
        if workload.sliding_window is not None:
            # the bound counts the query's own position
            options["diagonal_band_left_bound"] = workload.sliding_window
        if workload.kind == "encoder":
            row = workload.kv_heads * workload.head_size
            starts_kv = offsets(KV_STARTS, row)
            key, value = (
                packed(uid, tensor, inputs.max_seq_len, starts_kv)
                for uid, tensor in ((KEY, inputs.key), (VALUE, inputs.value))
            )
        else:
            key, value = (
                bind(uid, cache.transpose(1, 2), kind)
                for uid, cache in ((KEY, inputs.key_cache), (VALUE, inputs.value_cache))
            )
            table = inputs.block_table[:, None, :, None]
            options |= {
                "paged_attention_k_table": bind(TABLE_K, table, kinds.INT32),
                "paged_attention_v_table": bind(TABLE_V, table, kinds.INT32),
                "paged_attention_max_seq_len_kv": table.shape[2] * workload.block_size,
            }
        found, _ = graph.sdpa(name="sdpa", q=query, k=key, v=value, **options)
        size, strides = _padded(out, len(workload.kv_lens), inputs.max_query_len)
        found.set_uid(OUT).set_output(True).set_dim(size).set_stride(strides)
        found.set_data_type(kind)
        if starts is not None:
            row_out = workload.query_heads * workload.value_size
            has_same_rows = workload.value_size == workload.head_size
            starts_out = starts if has_same_rows else offsets(OUT_STARTS, row_out)
            found.set_ragged_offset(starts_out)
        bound[OUT] = out
        graph.build([library.heur_mode.A])
        return graph, bound


def _padded(tensor: Tensor, reqs: int, longest: int) -> tuple[list[int], list[int]]:
    """Return size and strides of [tokens, heads, size] as [reqs, heads, longest, size]."""
    _, heads, size = tensor.shape
    token, head, element = tensor.stride()
    return [reqs, heads, longest, size], [longest * token, head, token, element]
