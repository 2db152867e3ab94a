"""The worked examples and the picture of backend."""

from rich.text import Text

from .drawing import DIM, NEW, A, B, beside, boxes, said
from .story import Example, StoryStep


def draw() -> list[Text]:
    """Return the concept's picture for the terminal."""
    flow = beside(
        boxes([("write the new keys", A)], width=20),
        [Text(), Text("->"), Text()],
        boxes([("attend: decodes", NEW)], width=17),
        [Text(), Text("->"), Text()],
        boxes([("attend: prefills", B)], width=18),
        gap=1,
    )
    values = [("", DIM), ("", DIM), ("30", NEW), ("", DIM)]
    values += [("4", B), ("7", B), ("10", A), ("20", A)]
    columns = [
        [Text(f"block {block}"), *boxes(values[2 * block : 2 * block + 2])]
        for block in range(4)
    ]
    return [
        *said("A layer's step:", ""),
        *flow,
        *said(
            "",
            "The values in the cache after the write; request 0 owns blocks 3 and 1,",
        ),
        *said("request 1 owns block 2:", ""),
        *beside(*columns),
    ]


EXAMPLES = (
    Example(
        "forward",
        "One layer, one step: a decode and a prefill through the same cache.",
        (
            StoryStep(
                "Request 0 wrote values 10 and 20 to block 3 in earlier steps. It has one"
                " new token, a decode; request 1 has two, a prefill. All keys are 0, so all"
                " weights are equal and attention is a plain mean.",
                "(metadata.num_decodes, metadata.num_prefills)",
                "(1, 1)",
            ),
            StoryStep(
                "The layer is a decoder's, so the keys that it attends to are cached. An encoder's"
                " would attend here, among the new tokens of the step, and write nothing.",
                "(layer.attn_type, layer.is_uncached)",
                "('decoder', False)",
                step="attend without a cache if the layer is in an encoder",
            ),
            StoryStep(
                "The new values 30, 4 and 7 go to slots 2, 4 and 5: 2 is the start of block"
                " 1, and block 2 is 4 and 5.",
                "kv_cache[1].flatten().tolist()",
                "[0.0, 0.0, 30.0, 0.0, 4.0, 7.0, 10.0, 20.0]",
                step="write the new keys and values",
            ),
            StoryStep(
                "The decode attends to its whole sequence, blocks 3 and 1. The prefill's tokens see"
                " 4, then 4 and 7.",
                "[(10 + 20 + 30) / 3, 4 / 1, (4 + 7) / 2]",
                "[20.0, 4.0, 5.5]",
                step="attend for the decodes, then for the prefills",
            ),
        ),
        own_code="""\
>>> spec = KVCacheSpec(
...     block_size=2, num_kv_heads=1, head_size=1, dtype=torch.float32
... )
>>> kv_cache = reshape_kv_cache(allocate_kv_cache(spec, num_blocks=4), spec)
>>> kv_cache[1, 3] = torch.tensor([10.0, 20.0]).view(2, 1, 1)
>>> step = build_common_attn_metadata(
...     query_lens=[1, 2],
...     num_computed_tokens=[2, 0],
...     block_rows=[[3, 1], [2]],
...     block_size=2,
... )
>>> backend = BACKENDS[0]
>>> builder = backend.get_builder_cls()(spec, ["layer 0"], "cpu")
>>> metadata = builder.build(common_prefix_len=0, common_attn_metadata=step)
>>> layer = backend.get_impl_cls()(num_heads=1, head_size=1, scale=1.0)
>>> layer.forward(
...     layer=None,
...     query=torch.ones(3, 1, 1),
...     key=torch.zeros(3, 1, 1),
...     value=torch.tensor([30.0, 4.0, 7.0]).view(3, 1, 1),
...     kv_cache=kv_cache,
...     attn_metadata=metadata,
...     output=torch.zeros(3, 1, 1),
... ).flatten()
tensor([20.0000,  4.0000,  5.5000])
""",
    ),
)
