"""Error messages of invalid calls.

Each call below is made while the page is built, and its error is shown.
"""

import logging

from pagetwin.contract.operations import load_implementation
from pagetwin.engine.selector import get_attn_backend
from pagetwin.examples import example_names

# otherwise xFormers logs in every build that its compiled part is not used
logging.getLogger("xformers").setLevel(logging.ERROR)

CALLS = (
    (
        "A slot outside of the cache",
        """\
cache = torch.zeros(32, 16, 1, 8)  # 512 slots
key = torch.zeros(1, 1, 8)
reshape_and_cache(key, key, cache, cache.clone(), torch.tensor([512]))""",
    ),
    (
        "Two tokens with the same slot",
        """\
cache = torch.zeros(32, 16, 1, 8)
key = torch.zeros(2, 1, 8)
reshape_and_cache(key, key, cache, cache.clone(), torch.tensor([7, 7]))""",
    ),
    (
        "A sequence that is longer than its row",
        """\
compute_slot_mapping_batch(
    query_lens=[1], num_computed_tokens=[8], block_rows=[[7, 2]], block_size=4
)""",
    ),
    (
        "Keys with another dtype than the cache",
        """\
cache = torch.zeros(32, 16, 1, 8, dtype=torch.float16)
key = torch.zeros(1, 1, 8)
reshape_and_cache(key, key, cache, cache.clone(), torch.tensor([7]))""",
    ),
    (
        "A block that is both source and destination",
        """\
copy_blocks([torch.zeros(2, 8, 4, 1, 8)], torch.tensor([[1, 2], [2, 3]]))""",
    ),
    (
        "A backend that does not support a block size",
        """\
spec = KVCacheSpec(block_size=24, num_kv_heads=8, head_size=64, dtype=torch.float16)
get_attn_backend("XFORMERS", spec, "cpu")""",
    ),
)


def error_examples() -> str:
    """Return each call with the error it raises, as Markdown."""
    parts = []
    for title, code in CALLS:
        names = example_names(load_implementation("reference"))
        names["get_attn_backend"] = get_attn_backend
        try:
            exec(code, names)
        except (ValueError, IndexError, TypeError) as error:
            message = f"{type(error).__name__}: {error}"
        else:
            raise AssertionError(f"{title}: expected an error from\n{code}")
        parts.append(f"**{title}**\n\n```python\n{code}\n```\n\n> {message}")
    return "\n\n".join(parts)
