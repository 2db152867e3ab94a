"""A layer whose costs are measured."""

from pagetwin.optimized.runtime.cost_layer import Layer

LLAMA = Layer(
    group_size=4,
    kv_heads=8,
    numbers=256,
    key_bytes=512,
    causal=True,
    max_visible_keys=None,
    processors=132,
)
