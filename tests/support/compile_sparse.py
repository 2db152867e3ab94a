"""Launches of sparse attention and its indexer, as `compile_kernels.py` compiles them."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from pagetwin.contract.latent_formats import LATENT_FORMATS, LatentFormat
from torch import Tensor

NAMES = {torch.float8_e4m3fn: "fp8", torch.bfloat16: "bf16", torch.float32: "fp32"}


def sparse_cases(twin: Any) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the name of each case, and a function that makes its launches."""
    pages = torch.zeros(64, 64, 132, dtype=torch.uint8)
    for scale_fmt in (None, "ue8m0"):
        yield (
            f"write, indexer, {scale_fmt}",
            lambda fmt=scale_fmt: twin.indexer_k_quant_and_cache(
                torch.zeros(64, 128, dtype=torch.bfloat16), pages, torch.arange(64), fmt
            ),
        )
    for dtype, name in NAMES.items():
        yield (
            f"scores, indexer, {name}",
            lambda d=dtype: twin.index_scores(
                torch.zeros(8, 64, 128).to(d),
                torch.zeros(8, 64),
                pages,
                torch.zeros(4, 64, dtype=torch.int32),
                torch.arange(5, dtype=torch.int32) * 2,
                torch.full((4,), 4096, dtype=torch.int32),
                4096,
            ),
        )
    kv_cache = torch.zeros(64, 64, 1, 576, dtype=torch.bfloat16)
    yield (
        "sparse attention, latents",
        lambda: twin.sparse_attention(
            torch.zeros(8, 64, 576, dtype=torch.bfloat16),
            kv_cache,
            kv_cache[..., :512],
            torch.zeros(8, 2048, dtype=torch.int32),
        ),
    )
    for is_compact in (False, True):
        yield (
            f"slots of positions{', compact' * is_compact}",
            lambda to_front=is_compact: twin.convert_req_index_to_global_index(
                torch.zeros(8, dtype=torch.int32),
                torch.zeros(4, 64, dtype=torch.int32),
                torch.zeros(8, 2048, dtype=torch.int32),
                64,
                compact_valid_to_front=to_front,
            ),
        )
    for name, form in LATENT_FORMATS.items():
        pages = torch.zeros(64, form.block_bytes(64), dtype=torch.uint8)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            yield (
                f"sparse attention, {str(dtype).removeprefix('torch.')}, {name}",
                lambda f=form, p=pages, d=dtype: _attend_to_records(twin, f, p, d),
            )


def _attend_to_records(
    twin: Any, form: LatentFormat, pages: Tensor, dtype: torch.dtype
) -> None:
    """Launch the attention of 8 tokens to 2,048 records each."""
    records = form.view_cache(pages, 64)[:, :, None]
    query = torch.zeros(8, 64, form.width, dtype=dtype)
    slots = torch.zeros(8, 2048, dtype=torch.int32)
    twin.sparse_attention(query, records, records, slots, lse=torch.zeros(64, 8))
