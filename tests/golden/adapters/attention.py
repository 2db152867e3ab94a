"""Attention, cache writes and the joining of partial results."""

from itertools import pairwise
from typing import Any

import torch
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.contract.cache_formats import cache_dtype_of
from torch import Tensor

from golden.cases import adapter


def starts_of(lens: list[int]) -> Tensor:
    return torch.tensor([0, *lens]).cumsum(0).to(torch.int32)


def per_head(slopes: Any) -> Tensor | None:
    return None if slopes is None else torch.as_tensor(slopes, dtype=torch.float32)


@adapter("unified_attention_paged", on_device=True)
def unified_attention(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    if not inputs["causal"]:
        raise NotImplementedError("causal = False: expected True")
    left = inputs["window_size"][0]
    return {
        "out": twin.paged_attention(
            inputs["q"],
            inputs["k"],
            inputs["v"],
            inputs["block_table"],
            inputs["cu_seqlens_q"],
            inputs["seqused_k"],
            inputs["max_seqlen_q"],
            inputs["max_seqlen_k"],
            scale=inputs["softmax_scale"],
            options=AttentionOptions(
                sliding_window=None if left < 0 else left + 1,
                logits_soft_cap=inputs["softcap"] or None,
                alibi_slopes=per_head(inputs["alibi_slopes"]),
                sinks=per_head(inputs["sinks"]),
            ),
        )
    }


@adapter("v033_unified_attention_fp8_per_tensor", on_device=True)
def quantized_attention(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    starts, seq_lens = inputs["cu_seqlens_q"], inputs["seq_lens"]
    dtype = cache_dtype_of(inputs["kv_cache_dtype"], inputs["query"].dtype)
    return {
        "out": twin.paged_attention(
            inputs["query"],
            inputs["key_cache"].view(dtype),
            inputs["value_cache"].view(dtype),
            inputs["block_table"],
            starts,
            seq_lens,
            int(starts.diff().max()),
            int(seq_lens.max()),
            scale=inputs["softmax_scale"],
            options=AttentionOptions(
                causal=inputs["causal"],
                sliding_window=inputs["sliding_window"],
                logits_soft_cap=inputs["softcap"] or None,
                alibi_slopes=per_head(inputs.get("alibi_slopes")),
                sinks=per_head(inputs.get("sinks")),
                k_scale=inputs["k_scale"],
                v_scale=inputs["v_scale"],
            ),
        )
    }


@adapter("context_attention_fwd_v0_paged", on_device=True)
def context_attention(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """The cached context in V0's layout, then the new tokens after it."""
    if inputs["kv_cache_dtype"] != "auto":
        raise NotImplementedError(f"kv_cache_dtype = {inputs['kv_cache_dtype']!r}")
    key_cache, value_cache = inputs["k_cache"], inputs["v_cache"]
    blocks, heads, _, block_size, _ = key_cache.shape
    keys = key_cache.permute(0, 3, 1, 2, 4).reshape(blocks, block_size, heads, -1)
    values = value_cache.permute(0, 3, 1, 2).contiguous()
    starts, seq_lens = inputs["b_start_loc"].tolist(), inputs["b_seq_len"].tolist()
    query_lens = [end - begin for begin, end in pairwise(starts)]
    # rows of our own, so that the new tokens have slots
    rows, count = [], 0
    for seq_len in seq_lens:
        needed = -(-seq_len // block_size)
        rows.append(list(range(count, count + needed)))
        count += needed
    caches = torch.zeros(2, count, block_size, heads, keys.shape[-1])
    for req, (row, seq_len, query_len) in enumerate(
        zip(rows, seq_lens, query_lens, strict=True)
    ):
        for position in range(seq_len - query_len):
            old = int(inputs["b_loc"][req, position // block_size])
            new, offset = row[position // block_size], position % block_size
            caches[0, new, offset] = keys[old, offset]
            caches[1, new, offset] = values[old, offset]
    computed = [s - q for s, q in zip(seq_lens, query_lens, strict=True)]
    step = twin.build_common_attn_metadata(
        query_lens, computed, rows, block_size, inputs["q"].device
    )
    twin.reshape_and_cache(
        inputs["k"], inputs["v"], caches[0], caches[1], step.slot_mapping
    )
    window = inputs["sliding_window"]
    out = twin.paged_attention(
        inputs["q"],
        caches[0],
        caches[1],
        step.block_table_tensor,
        step.query_start_loc,
        step.seq_lens,
        step.max_query_len,
        step.max_seq_len,
        scale=inputs["sm_scale"],
        options=AttentionOptions(
            sliding_window=window if window and window > 0 else None,
            alibi_slopes=per_head(inputs["alibi_slopes"]),
            sinks=per_head(inputs["sinks"]),
        ),
    )
    if inputs["skip_decode"]:
        # vLLM leaves the rows of decodes to another kernel
        for begin, end in pairwise(starts):
            if end - begin == 1:
                out[begin] = inputs["output_fill"]
    return {"o": out}


@adapter("decode_attention_fwd_paged", on_device=True)
def decode_attention(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    key, value = inputs["k_buffer"], inputs["v_buffer"]
    size = max(key.shape[-1], value.shape[-1])
    # keys and values of different sizes: what is missing is zero and adds nothing
    grow = torch.nn.functional.pad
    query = grow(inputs["q"], (0, size - key.shape[-1]))
    seq_lens = inputs["b_seq_len"]
    out = twin.paged_attention(
        query,
        grow(key, (0, size - key.shape[-1])),
        grow(value, (0, size - value.shape[-1])),
        inputs["req_to_token"],
        torch.arange(len(seq_lens) + 1, dtype=torch.int32),
        seq_lens.to(torch.int32),
        1,
        int(seq_lens.max()),
        scale=inputs["sm_scale"],
        options=AttentionOptions(
            logits_soft_cap=inputs["logit_cap"] if inputs["logit_cap"] > 0 else None
        ),
    )
    return {"o": out[..., : value.shape[-1]]}


@adapter("reshape_and_cache_flash", on_device=True)
def reshape_and_cache(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    if inputs["kv_cache_dtype"] != "auto":
        raise NotImplementedError(f"kv_cache_dtype = {inputs['kv_cache_dtype']!r}")
    shape, dtype = inputs["cache_shape"], inputs["key"].dtype
    caches = torch.full((2, *shape), inputs["cache_fill"], dtype=dtype)
    if inputs["layout"] == "HND":
        caches = caches.transpose(2, 3).contiguous().transpose(2, 3)
    twin.reshape_and_cache(
        inputs["key"], inputs["value"], caches[0], caches[1], inputs["slot_mapping"]
    )
    return {"key_cache": caches[0], "value_cache": caches[1]}


def merge(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    lse = torch.empty_like(inputs["prefix_lse"]) if inputs["want_output_lse"] else None
    output = twin.merge_attn_states(
        inputs["prefix_output"],
        inputs["prefix_lse"],
        inputs["suffix_output"],
        inputs["suffix_lse"],
        inputs.get("prefill_tokens_with_context"),
        output_lse=lse,
    )
    return {"output": output, "output_lse": lse}


adapter("merge_attn_states_torch", on_device=True)(merge)
adapter("merge_attn_states_triton_0_10_2", on_device=True)(merge)


@adapter("lse_weighted_combine", on_device=True)
def combine(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    output, lse = twin.lse_weighted_combine(
        inputs["outputs"], inputs["lses"], inputs["is_lse_base_on_e"]
    )
    found = {"result": output}
    return (
        found | {"global_lse": lse}
        if inputs["return_lse"]
        else found | {"global_lse": None}
    )


NO_FLOAT32 = (
    "on a GPU xFormers' operator multiplies float32 in tf32; it is made for 16 bits"
)


@adapter("xformers_decode_attention", on_device=True, interpreter_only=NO_FLOAT32)
def xformers_decode(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    seq_lens = torch.tensor(inputs["seq_lens"], dtype=torch.int32)
    query = inputs["q"]
    if twin.name == "optimized":
        from pagetwin.optimized.backends.xformers_split_k import (
            build_decode_bias,
            split_k_attention,
        )

        block_size = inputs["key_cache"].shape[1]
        bias = build_decode_bias(inputs["seq_lens"], inputs["block_table"], block_size)
        return {
            "out": split_k_attention(
                query, inputs["key_cache"], inputs["value_cache"], bias, inputs["scale"]
            )
        }
    return {
        "out": twin.paged_attention(
            query,
            inputs["key_cache"],
            inputs["value_cache"],
            inputs["block_table"],
            torch.arange(len(query) + 1, dtype=torch.int32),
            seq_lens,
            1,
            int(seq_lens.max()),
            scale=inputs["scale"],
        )
    }


@adapter("get_mla_dims")
def mla_dims(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    class Config:
        pass

    config = Config()
    vars(config).update(inputs["model_config"]["hf_text_config"])
    return vars(twin.get_mla_dims(config))
