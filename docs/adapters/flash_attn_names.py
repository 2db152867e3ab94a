"""Adapter for pagetwin's own functions with the names of flash-attn."""

from pagetwin.conformance import FlashAttnFunctions
from pagetwin.integrations import flash_attn

FUNCTIONS = FlashAttnFunctions(flash_attn, reads_past=False)
SUPPORT = FUNCTIONS.support(
    devices=None,
    dtypes=["float16", "bfloat16", "float32"],
    cache_dtypes=["float16", "bfloat16", "float32"],
    head_sizes=None,
    kv_layouts=None,
    strides={},
    alignment=None,
)
paged_attention = FUNCTIONS.paged_attention
encoder_attention = FUNCTIONS.encoder_attention
