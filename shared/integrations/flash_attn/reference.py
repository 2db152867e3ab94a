"""The names of flash-attn on the reference."""

from .calls import FlashAttention

_REFERENCE = FlashAttention("reference")
flash_attn_func = _REFERENCE.flash_attn_func
flash_attn_varlen_func = _REFERENCE.flash_attn_varlen_func
flash_attn_with_kvcache = _REFERENCE.flash_attn_with_kvcache
