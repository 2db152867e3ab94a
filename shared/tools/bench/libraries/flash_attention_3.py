"""FlashAttention-3: its own package, or the operators in vLLM's wheel.

The wheel's operators are in one file that needs nothing else of vLLM. Their argument lists are read
from their schemas. So a version with an additional argument works if the argument is optional.
"""

import importlib
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ....contract.operations import load_implementation
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

VARIABLE = "PAGETWIN_FA3"
INSIDE_VLLM = Path("vllm_flash_attn", "_vllm_fa3_C.abi3.so")
SETTINGS: dict[str, Any] = {
    "softcap": 0.0,
    "has_softcap": False,
    "attention_chunk": 0,
    "is_rotary_interleaved": True,
    "num_splits": 0,
    "sm_margin": 0,
    "max_seqlen_k_new": 0,
    "cp_world_size": 1,
    "cp_rank": 0,
}
"""Arguments that the operators require but that are not used here. With 0 splits, it chooses."""


SUPPORTED = frozenset(
    {
        "a soft cap",
        "sinks",
        "a latent cache",
        "a shared prefix",
        "values smaller than keys",
        "a window to both sides",
    }
)


class FlashAttention3(AttentionLibrary):
    """FlashAttention-3 with a block table.

    Args:
        device: The device to run on.
        path: Optional. vLLM's `_vllm_fa3_C.abi3.so`. If None, the file that PAGETWIN_FA3 names, or
            that of an installed vLLM.
    """

    name, title = "fa3", "FlashAttention-3"

    def __init__(self, device: str, path: str | None = None) -> None:
        super().__init__(device)
        self.path = path or os.environ.get(VARIABLE) or self._installed()
        self._operators: Any = None

    def version(self) -> str | None:
        """Return the origin, because neither source has a version."""
        return None if self.path is None else describe_origin(self.path)

    def missing(self) -> str:
        if self.device == "cpu":
            return "needs a CUDA device"
        if torch.cuda.get_device_capability()[0] != 9:
            return "needs a GPU of compute capability 9"
        if self.path is None and not has_module("flash_attn_interface"):
            return (
                "neither the module flash_attn_interface nor vLLM's _vllm_fa3_C.abi3.so is"
                f" here: name the file with --fa3 or {VARIABLE}"
            )
        if self.path is not None:
            try:
                libraries: Any = torch.ops
                libraries.load_library(self.path)
                self._operators = libraries._vllm_fa3_C
                self._operators.fwd  # noqa: B018
            except (OSError, AttributeError, RuntimeError) as error:
                return library_error(self.path, error)
        return ""

    def prepare(self, inputs: Inputs) -> Prepared:
        workload = inputs.workload
        if workload.kind == "write":
            raise Declined("it does not write a cache by slots")
        if self._operators is None:
            return self._by_module(inputs)
        decline_features(workload, SUPPORTED)
        if workload.kind == "cascade":
            return self._cascade(inputs)
        out = inputs.fresh()
        query, note = inputs.query, "plan prepared in advance"
        arguments: dict[str, Any] = SETTINGS | self._batch(inputs)
        if workload.is_quantised:
            ones = torch.ones(
                len(workload.kv_lens), workload.kv_heads, device=inputs.device
            )
            query = query.to(workload.kv_dtype)
            arguments |= {"q_descale": ones, "k_descale": ones, "v_descale": ones}
            note += "; supports an FP8 cache only with FP8 queries, rounded in advance"
        if workload.kind != "encoder":
            plan = self._bind("get_scheduler_metadata", arguments | self._plan(inputs))
            arguments["scheduler_metadata"] = plan()
        keys = (
            {"k": inputs.key, "v": inputs.value}
            if workload.kind == "encoder"
            else {"k": inputs.key_cache, "v": inputs.value_cache}
        )
        if workload.kind == "latent":
            # the latent without position is a second query, and the latents are the values
            rank = workload.value_size
            query, note = inputs.query[..., rank:].contiguous(), f"{note}; query split"
            keys["k"] = inputs.key_cache[..., rank:]
            keys["q_v"] = inputs.query[..., :rank].contiguous()
        attend = self._bind("fwd", arguments | keys | {"q": query, "out": out})

        def call() -> Tensor:
            attend()
            return out

        return Prepared(call, note=note, rounds_more=workload.is_quantised)

    def _cascade(self, inputs: Inputs) -> Prepared:
        """Return two passes, over the shared prefix and over the rest, and our merge of both."""
        workload, device = inputs.workload, inputs.device
        twin: Any = load_implementation("optimized")
        shared, out = workload.shared_prefix, inputs.fresh()
        blocks = shared // workload.block_size
        of_all = torch.tensor([0, workload.tokens], dtype=torch.int32, device=device)
        prefix = {
            "cu_seqlens_q": of_all,
            "max_seqlen_q": workload.tokens,
            "max_seqlen_k": shared,
            "seqused_k": inputs.seq_lens.new_full((1,), shared),
            "page_table": inputs.block_table[:1, :blocks],
            "is_causal": False,
            "batch_size": 1,
        }
        rest = {
            "max_seqlen_k": inputs.max_seq_len - shared,
            "seqused_k": inputs.seq_lens - shared,
            "page_table": inputs.block_table[:, blocks:],
        }
        passes = []
        for of_pass in (prefix, rest):
            given = SETTINGS | self._batch(inputs) | self._plan(inputs) | of_pass
            given["scheduler_metadata"] = self._bind("get_scheduler_metadata", given)()
            given |= {
                "q": inputs.query,
                "k": inputs.key_cache,
                "v": inputs.value_cache,
            }
            passes.append(self._bind("fwd", given))

        def call() -> Tensor:
            (one, one_lse), (other, other_lse) = (attend()[:2] for attend in passes)
            twin.merge_attn_states(one, one_lse, other, other_lse, output=out)
            return out

        return Prepared(
            call, note="plans prepared in advance; merged by our merge_attn_states"
        )

    @staticmethod
    def _installed() -> str | None:
        """Return the file in an installed vLLM, without importing vLLM."""
        if not has_module("vllm"):
            return None
        spec = importlib.util.find_spec("vllm")
        assert spec is not None
        for folder in spec.submodule_search_locations or ():
            if (path := Path(folder) / INSIDE_VLLM).is_file():
                return str(path)
        return None

    @staticmethod
    def _batch(inputs: Inputs) -> dict[str, Any]:
        """Return the batch as arguments of the operators, by name."""
        workload = inputs.workload
        left, right = _window(workload)
        batch: dict[str, Any] = {
            "cu_seqlens_q": inputs.query_start_loc,
            "max_seqlen_q": inputs.max_query_len,
            "max_seqlen_k": inputs.max_seq_len,
            "softmax_scale": workload.scale,
            "softcap": workload.logits_soft_cap or 0.0,
            "has_softcap": workload.logits_soft_cap is not None,
            "is_causal": workload.causal,
            "window_size_left": left,
            "window_size_right": right,
        }
        if inputs.sinks is not None:
            batch["s_aux"] = inputs.sinks.to(torch.bfloat16)
        if workload.kind == "encoder":
            return batch | {"cu_seqlens_k": inputs.query_start_loc}
        return batch | {"seqused_k": inputs.seq_lens, "page_table": inputs.block_table}

    @staticmethod
    def _plan(inputs: Inputs) -> dict[str, Any]:
        """Return the arguments of the plan besides the batch."""
        workload = inputs.workload
        # of a latent cache, the first elements of a key are its value
        rope_beside = workload.value_size if workload.kind == "latent" else 0
        return {
            "batch_size": len(workload.kv_lens),
            "num_heads": workload.query_heads,
            "num_heads_k": workload.kv_heads,
            "headdim": workload.head_size - rope_beside,
            "headdim_v": workload.value_size,
            "qkv_dtype": workload.kv_dtype,
            "page_size": workload.block_size,
        }

    def _bind(self, operator: str, arguments: dict[str, Any]) -> Callable[[], Any]:
        """Return a call of an operator with the arguments that its schema names."""
        call = getattr(self._operators, operator)
        given = []
        for argument in call.default._schema.arguments:
            is_optional = str(argument.type).startswith("Optional")
            if argument.name not in arguments and not is_optional:
                raise Declined(
                    f"its operator {operator} requires {argument.name}, which is not known here"
                )
            given.append(arguments.get(argument.name))
        return lambda: call(*given)

    def _by_module(self, inputs: Inputs) -> Prepared:
        """Return a workload that calls FlashAttention-3's own package."""
        module = importlib.import_module("flash_attn_interface")
        workload = inputs.workload
        if workload.is_quantised:
            raise Declined("it supports an FP8 cache only with FP8 queries")
        decline_features(workload, {"a soft cap", "a window to both sides"})
        lens: dict[str, Any] = {
            "cu_seqlens_q": inputs.query_start_loc,
            "max_seqlen_q": inputs.max_query_len,
            "causal": workload.causal,
            "window_size": _window(workload),
            "softcap": workload.logits_soft_cap or 0.0,
        }
        if workload.kind == "encoder":
            lens |= {
                "cu_seqlens_k": inputs.query_start_loc,
                "max_seqlen_k": inputs.max_seq_len,
            }
            return Prepared(
                lambda: _first(
                    module.flash_attn_varlen_func(
                        inputs.query, inputs.key, inputs.value, **lens
                    )
                )
            )
        lens |= {"cache_seqlens": inputs.seq_lens, "page_table": inputs.block_table}
        return Prepared(
            lambda: _first(
                module.flash_attn_with_kvcache(
                    inputs.query, inputs.key_cache, inputs.value_cache, **lens
                )
            ),
            note="no plan prepared in advance",
        )


def _window(workload: Workload) -> tuple[int, int]:
    """Return the keys before and after a query's position that it attends to; -1: all."""
    if workload.sliding_window is None:
        return -1, -1
    reach = workload.sliding_window - 1
    return reach, 0 if workload.causal else reach


def _first(result: Any) -> Any:
    """Return the output of a result that may also have a log-sum-exp."""
    return result[0] if isinstance(result, tuple) else result
