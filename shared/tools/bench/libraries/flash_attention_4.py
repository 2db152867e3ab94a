"""FlashAttention-4 for Hopper: the kernels of vLLM's copy, compiled in advance.

FlashAttention-4 compiles a kernel per form: dtype, head sizes, group size, mask, layout of keys,
options. `tests/gpu/stage_flash_attention_4.py` compiles the forms of the suites without a GPU, into
one library with one function per form. apache-tvm-ffi loads it, without CUTLASS and without vLLM.
"""

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..inputs import Inputs
from ..workloads import Workload
from .library import (
    AttentionLibrary,
    Declined,
    Prepared,
    decline_features,
    describe_origin,
    has_module,
    library_error,
)

VARIABLE = "PAGETWIN_FA4"
SUPPORTED = frozenset(
    {"a soft cap", "sinks", "a window to both sides", "values smaller than keys"}
)
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
MOST_REQUESTS = 256
"""Requests above which it launches further kernels that find the request of a tile."""
MOST_SPLITS = 32
"""Splits that the compiled combine kernels can merge."""


@dataclass(frozen=True)
class Form:
    """What a kernel is compiled for.

    Args:
        dtype: "bf16" or "fp16", of queries, keys and outputs.
        head_size, value_size: Elements of a key and of a value.
        group: Query heads per KV head.
        mask: "full", "causal" or "local", which has a window.
        keys: "paged", or "ragged" for keys without a cache.
        has_sinks: Whether each query head has a sink.
        cap: Optional. Cap of the scores.
        is_split: Whether the kernel writes partial results of split keys.
    """

    dtype: str
    head_size: int
    value_size: int
    group: int
    mask: str
    keys: str
    has_sinks: bool = False
    cap: float | None = None
    is_split: bool = False

    @property
    def name(self) -> str:
        """The name of its function.

        Example:
            fwd_bf16_k128_v128_g4_causal_paged_split.
        """
        parts = ["fwd", self.dtype, f"k{self.head_size}", f"v{self.value_size}"]
        parts += [f"g{self.group}", self.mask, self.keys]
        parts += ["sinks"] if self.has_sinks else []
        parts += [] if self.cap is None else [f"cap{self.cap:g}"]
        return "_".join([*parts, "split"] if self.is_split else parts)


class FlashAttention4(AttentionLibrary):
    """FlashAttention-4 with a block table.

    Args:
        device: The device to run on.
        path: Optional. The library of compiled forms. If None, the file that PAGETWIN_FA4 names.
    """

    name, title = "fa4", "FlashAttention-4"

    def __init__(self, device: str, path: str | None = None) -> None:
        super().__init__(device)
        self.path = path or os.environ.get(VARIABLE)
        self._functions: Any = None

    def version(self) -> str | None:
        """Return the vLLM whose kernels were compiled."""
        return None if self.path is None else describe_origin(self.path)

    def missing(self) -> str:
        if self.device == "cpu":
            return "needs a CUDA device"
        if torch.cuda.get_device_capability()[0] != 9:
            return "needs a GPU of compute capability 9"
        if self.path is None:
            return (
                f"no compiled kernels: name their library in {VARIABLE}"
                " (tests/gpu/stage_flash_attention_4.py compiles it)"
            )
        if not has_module("tvm_ffi"):
            return "tvm_ffi is not installed (pip install apache-tvm-ffi)"
        try:
            self._functions = importlib.import_module("tvm_ffi").load_module(self.path)
        except Exception as error:  # a library of another system fails in many ways
            return library_error(self.path, error)
        return ""

    def prepare(self, inputs: Inputs) -> Prepared:
        workload = inputs.workload
        multiprocessors = 132
        if self.device != "cpu":
            device = torch.cuda.get_device_properties(inputs.device)
            multiprocessors = device.multi_processor_count
        splits = choose_splits(workload, multiprocessors)
        form = form_of(workload, splits)
        attend = self._find(form.name)
        out = inputs.fresh()
        arguments = _arguments(inputs)
        if not form.is_split:
            call = self._bound(attend, [*arguments[:3], out, None, *arguments[3:]])
            return Prepared(lambda: call() or out)
        combine = self._find(combine_name(workload))
        tokens, heads, size = out.shape
        partial = out.new_empty((splits, tokens, heads, size), dtype=torch.float32)
        lse = out.new_empty((splits, heads, tokens), dtype=torch.float32)
        split = self._bound(attend, [*arguments[:3], partial, lse, *arguments[3:]])
        merged = [partial, lse.transpose(1, 2), out, None, inputs.query_start_loc]
        merge = self._bound(combine, [*merged, *[None] * 5])

        def call_both() -> Tensor:
            split()
            merge()
            return out

        return Prepared(call_both, note=f"{splits} splits, then its combine kernel")

    def _find(self, name: str) -> Callable[..., Any]:
        """Return the function of a form."""
        try:
            found: Callable[..., Any] = getattr(self._functions, name)
        except AttributeError:
            raise Declined(f"{name} is not among its compiled forms") from None
        return found

    @staticmethod
    def _bound(function: Callable[..., Any], arguments: list[Any]) -> Callable[[], Any]:
        """Return a call on torch's current stream."""
        if not torch.cuda.is_available() or hasattr(
            torch.Tensor, "__dlpack_c_exchange_api__"
        ):
            return lambda: function(*arguments)
        use_torch_stream = importlib.import_module("tvm_ffi").use_torch_stream

        def call() -> None:
            # older versions of torch do not tell it their stream
            with use_torch_stream():
                function(*arguments)

        return call


def form_of(workload: Workload, splits: int = 1) -> Form:
    """Return the form that a workload needs.

    Args:
        workload: The workload.
        splits: Splits of the keys.

    Raises:
        Declined: It has no such kernel for Hopper.
    """
    if workload.kind == "write":
        raise Declined("it does not write a cache")
    if workload.kind == "latent":
        raise Declined("its kernels for a latent cache need compute capability 10")
    decline_features(workload, SUPPORTED)
    if workload.form is not None or workload.kv_dtype not in DTYPES:
        raise Declined(
            "it reads an FP8 cache only in pages of as many keys as its tile"
        )
    if workload.dtype != workload.kv_dtype:
        raise Declined("its queries and keys have the same dtype")
    if len(workload.kv_lens) > MOST_REQUESTS:
        raise Declined(f"its compiled forms are for at most {MOST_REQUESTS} requests")
    mask = "causal" if workload.causal else "full"
    return Form(
        dtype=DTYPES[workload.dtype],
        head_size=workload.head_size,
        value_size=workload.value_size,
        group=workload.query_heads // workload.kv_heads,
        mask=mask if workload.sliding_window is None else "local",
        keys="ragged" if workload.kind == "encoder" else "paged",
        has_sinks=workload.sinks,
        cap=workload.logits_soft_cap,
        is_split=splits > 1,
    )


def combine_name(workload: Workload) -> str:
    """Return the name of the kernel that merges the splits of a workload."""
    dtype = DTYPES[workload.dtype]
    return f"combine_{dtype}_v{workload.value_size}_h{workload.query_heads}"


def choose_splits(workload: Workload, multiprocessors: int) -> int:
    """Return the number of splits of the keys that FlashAttention-4 chooses itself.

    It splits if the query tiles of a batch use at most half of the GPU, and if the longest sequence
    has more than 4 tiles of keys.

    Args:
        workload: The workload.
        multiprocessors: Streaming multiprocessors of the GPU.

    Example:
        One decode of 131,072 keys, 32 query heads, 8 KV heads of 128: 8 query tiles, so 132 // 8 =
        16 splits.
    """
    if workload.kind in ("encoder", "write"):
        return 1
    rows, columns = _tile(workload)
    group = workload.query_heads // workload.kv_heads
    tiles = -(-max(workload.query_lens) * group // rows)
    tiles *= len(workload.kv_lens) * workload.kv_heads
    keys = max(workload.kv_lens)
    if workload.sliding_window is not None:
        # a window to the right of 0 counts as none in its estimate
        right = keys if workload.causal else workload.sliding_window - 1
        keys = min(keys, workload.sliding_window - 1 + right + 1 + rows)
    blocks = -(-keys // columns)
    if blocks <= 4:
        return 1
    return max(1, min(multiprocessors // tiles, MOST_SPLITS, blocks))


def _tile(workload: Workload) -> tuple[int, int]:
    """Return the query rows and the keys of a tile."""
    size, is_local = workload.head_size, workload.sliding_window is not None
    if size <= 64:
        return 192, 128
    if size <= 96:
        return 192, 128 if workload.causal or is_local else 144
    if size <= 128:
        return 128, 128
    if size <= 192:
        return 128, 96 if is_local else 128 if workload.value_size <= 128 else 112
    return 128, 64 if is_local else 80


def _arguments(inputs: Inputs) -> list[Any]:
    """Return the arguments of a form in their order, without output and log-sum-exp."""
    workload, window = inputs.workload, inputs.workload.sliding_window
    left = None if window is None else window - 1
    right = None if window is None else 0 if workload.causal else left
    sinks = None if inputs.sinks is None else inputs.sinks.to(torch.bfloat16)
    if workload.kind == "encoder":
        keys: list[Any] = [inputs.key, inputs.value]
        lens: list[Any] = [inputs.query_start_loc, None, None]
        table = None
    else:
        keys = [inputs.key_cache, inputs.value_cache]
        lens, table = [None, None, inputs.seq_lens], inputs.block_table
    # then: dynamic causal, table, window, sinks, block sparsity, (tensors and numbers of a score
    # function), scales of FP8, scale of an FP8 output, two sums over the tiles of the batch
    return [
        inputs.query, *keys, workload.scale, inputs.query_start_loc, *lens, None, table, left,
        right, sinks, None, (None, None), None, None, None, None,
    ]  # fmt: skip
