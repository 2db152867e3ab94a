"""Launches of the kernels of latent records, as `compile_kernels.py` compiles them."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.contract.latent_formats import LATENT_FORMATS, LatentFormat
from torch import Tensor


def record_cases(twin: Any) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the name of each case, and a function that makes its launches."""
    table = torch.zeros(4, 4, dtype=torch.int32)
    starts = torch.arange(5, dtype=torch.int32) * 16
    for name, form in LATENT_FORMATS.items():
        pages = torch.zeros(16, form.block_bytes(64), dtype=torch.uint8)
        kv_cache = form.view_cache(pages, 64)
        new = torch.zeros(64, form.width, dtype=torch.bfloat16)
        kv_c, k_pe = new.split([form.kv_lora_rank, form.qk_rope_head_dim], 1)
        yield (
            f"write, {name}",
            lambda c=kv_c, p=k_pe, cache=kv_cache: twin.concat_and_cache_mla(
                c, p, cache, torch.arange(64)
            ),
        )
        yield (
            f"gather, {name}",
            lambda cache=kv_cache, rows=new: twin.gather_latent_cache(
                cache, rows, table, starts
            ),
        )
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            words = f"records, {str(dtype).removeprefix('torch.')}, {name}"
            yield (
                f"decode, {words}",
                lambda f=form, cache=kv_cache, d=dtype: decode(twin, f, cache, d, 16),
            )
        yield (
            f"decode, window, records, 1 head, {name}",
            lambda f=form, cache=kv_cache: decode(
                twin, f, cache, torch.bfloat16, 1, sliding_window=100
            ),
        )


def decode(
    twin: Any,
    form: LatentFormat,
    kv_cache: Tensor,
    dtype: torch.dtype,
    heads: int,
    **options: Any,
) -> None:
    """Launch decodes of 4 requests with 2 new tokens each over 4,096 keys."""
    rank, rope = form.kv_lora_rank, form.qk_rope_head_dim
    twin.latent_decode_attention(
        q_nope=torch.zeros(8, heads, 128, dtype=dtype),
        q_pe=torch.zeros(8, heads, rope, dtype=dtype),
        kv_cache=kv_cache,
        w_uk=torch.zeros(heads, 128, rank, dtype=dtype),
        w_uv=torch.zeros(heads, rank, 128, dtype=dtype),
        block_table=torch.zeros(4, 64, dtype=torch.int32),
        query_start_loc=torch.arange(5, dtype=torch.int32) * 2,
        seq_lens=torch.full((4,), 4096, dtype=torch.int32),
        max_query_len=2,
        max_seq_len=4096,
        lse=torch.zeros(heads, 8),
        options=AttentionOptions(**options),
    )
