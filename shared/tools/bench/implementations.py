"""Who is asked?

Our twin, and every other implementation that can be had here. Each says why it is missing, or why
it does not do a workload; nobody is left out without a word. What an implementation makes of the
inputs once for all layers of a step (a mask, a plan, a gathered batch) it makes before the clock
runs, and says so.
"""

import importlib
import importlib.metadata
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...contract.attention_options import AttentionOptions
from ...contract.operations import load_implementation
from .inputs import Inputs


class Declined(NotImplementedError):
    """A workload that an implementation does not do; the message says why."""


def as_it_is(result: Any) -> Any:
    """Return rows that are rows already."""
    return result


@dataclass(frozen=True)
class Prepared:
    """One workload, ready to be run any number of times.

    Args:
        call: computes it, and returns the tensor that it wrote; None: it wrote the cache.
        rows: that tensor as [tokens, query_heads, head_size].
        note: what was done beforehand, or differs, in words.
        same_work: whether it does what the others do; False: it reads keys that were gathered for
            it, so it is shown but not counted among those who are to be beaten.
    """

    call: Callable[[], Any]
    rows: Callable[[Any], Tensor] = as_it_is
    note: str = ""
    same_work: bool = True


class Implementation(ABC):
    """Somebody's attention.

    Args:
        device: where it shall run.
    """

    name: str
    title: str
    package: str | None = None

    def __init__(self, device: str) -> None:
        self.device = device

    def missing(self) -> str:
        """Return why it cannot be had here; empty: it can."""
        return ""

    def version(self) -> str | None:
        """Return the version of its package, if that says one."""
        try:
            return importlib.metadata.version(self.package or "pagetwin")
        except importlib.metadata.PackageNotFoundError:
            return None

    @abstractmethod
    def prepare(self, inputs: Inputs) -> Prepared:
        """Return a workload, ready to run.

        Raises:
            Declined: it does not do this one.
        """


class Ours(Implementation):
    """The operations of `pagetwin.optimized`."""

    name, title = "ours", "pagetwin"

    def prepare(self, inputs: Inputs) -> Prepared:
        workload = inputs.workload
        twin: Any = load_implementation("optimized")
        if workload.kind == "write":
            return Prepared(
                lambda: twin.reshape_and_cache(
                    inputs.key,
                    inputs.value,
                    inputs.key_cache,
                    inputs.value_cache,
                    inputs.slot_mapping,
                )
            )
        out = inputs.fresh()
        lens = (inputs.max_query_len, inputs.max_seq_len)
        if workload.kind == "encoder":
            starts = inputs.query_start_loc
            return Prepared(
                lambda: twin.encoder_attention(
                    inputs.query,
                    inputs.key,
                    inputs.value,
                    starts,
                    starts,
                    *lens,
                    out=out,
                )
            )
        scale = 1.0 if workload.is_quantised else None
        options = AttentionOptions(
            causal=workload.causal,
            sliding_window=workload.sliding_window,
            k_scale=scale,
            v_scale=scale,
        )
        return Prepared(
            lambda: twin.paged_attention(
                inputs.query,
                inputs.key_cache,
                inputs.value_cache,
                inputs.block_table,
                inputs.query_start_loc,
                inputs.seq_lens,
                *lens,
                out=out,
                options=options,
            )
        )


class XFormers(Implementation):
    """xFormers' split-K operator over pages, called as our backend calls it."""

    name, title, package = "xformers", "xFormers split-K", "xformers"

    def missing(self) -> str:
        try:
            reasons: list[str] = self._operator().why_no_xformers()
        except ImportError as error:
            return f"cannot be imported ({error})"
        return "; ".join(reasons)

    def prepare(self, inputs: Inputs) -> Prepared:
        workload = inputs.workload
        if workload.kind not in ("decode", "cross", "mixed"):
            raise Declined("its paged operator is for decodes")
        if inputs.max_query_len > 1:
            raise Declined("its paged mask here is of one new token a request")
        if workload.is_quantised:
            raise Declined("it has no scales for an FP8 cache")
        if workload.sliding_window is not None:
            raise Declined("its paged mask has no window")
        operator = self._operator()
        bias = operator.build_decode_bias(
            list(workload.kv_lens), inputs.block_table, workload.block_size
        )
        scale = workload.head_size**-0.5
        return Prepared(
            lambda: operator.split_k_attention(
                inputs.query, inputs.key_cache, inputs.value_cache, bias, scale
            ),
            note="mask built beforehand",
        )

    @staticmethod
    def _operator() -> Any:
        return importlib.import_module("pagetwin.optimized.launch.xformers_split_k")


class TorchAttention(Implementation):
    """torch's scaled_dot_product_attention on one of its backends, over gathered keys."""

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
            raise Declined("torch has no cache to write to")
        if workload.is_ragged:
            raise Declined(
                "it takes dense batches, and these requests differ in length"
            )
        if workload.is_quantised:
            raise Declined("it takes no FP8 keys")
        query_len, kv_len = workload.query_lens[0], workload.kv_lens[0]
        if workload.sliding_window is not None and query_len > 1:
            raise Declined("it has no window")
        asked: dict[str, Any] = {"enable_gqa": workload.query_heads > workload.kv_heads}
        if workload.causal and query_len == kv_len:
            asked["is_causal"] = True
        elif workload.causal and query_len > 1:
            if self.backend == "CUDNN_ATTENTION":
                raise Declined("torch passes it no mask that ends at the last key")
            asked["attn_mask"] = causal_lower_right(query_len, kv_len)
        attend = torch.nn.functional.scaled_dot_product_attention
        backends = [getattr(SDPBackend, self.backend)]
        dense = inputs.dense

        def call() -> Tensor:
            with sdpa_kernel(backends):
                return attend(*dense, **asked)

        def rows(result: Tensor) -> Tensor:
            return result.transpose(1, 2).flatten(0, 1)

        if workload.kind == "encoder":
            return Prepared(call, rows, "dense batch made beforehand")
        return Prepared(call, rows, "dense: keys gathered beforehand", same_work=False)


def library_error(name: str, error: Exception) -> str:
    """Return in one line why a library cannot be used."""
    words = str(error).strip().split("\n")[0]
    return f"{name} cannot be used ({type(error).__name__}: {words})"


def has_module(name: str) -> bool:
    """Tell whether a module of that name can be found, without importing it."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False
