"""Adapter for FlashAttention-2, by the names of its functions.

It needs a GPU and has not been run here. FlashAttention-2 takes pages of 256 slots and multiples of
that, and aligns a causal mask to the end of the keys, as pagetwin does.
"""

from pagetwin.conformance import FlashAttnFunctions

try:
    import flash_attn
except ImportError as error:
    raise ImportError(
        "this adapter needs FlashAttention 2 and a GPU: pip install flash-attn"
    ) from error

FUNCTIONS = FlashAttnFunctions(flash_attn)
SUPPORT = FUNCTIONS.support(
    operations=["paged_attention"],
    block_sizes=[256, 512],
    head_sizes=[32, 64, 96, 128, 160, 192, 256],
)
paged_attention = FUNCTIONS.paged_attention
