"""Replays that take less than a second, and wrong twins."""

from types import ModuleType

from pagetwin.contract.attention_options import pack_options
from pagetwin.contract.operations import Implementation, load_implementation
from pagetwin.tools.replay.settings import ReplaySettings, choose_settings

REFERENCE = load_implementation("reference")


def small(**given: object) -> ReplaySettings:
    """Return settings of a replay that takes less than a second."""
    defaults = {
        "requests": 12,
        "twins": ("reference",),
        "head_size": 8,
        "query_heads": 2,
        "kv_heads": 1,
    }
    return choose_settings("cpu", **{**defaults, **given})


def wrong_twin(**operations: object) -> dict[str, Implementation]:
    """Return the reference under the name "wrong", with some operations replaced."""
    module = ModuleType("wrong")
    vars(module).update(REFERENCE.operations | operations)
    return {"wrong": Implementation("wrong", module)}


def drop_the_first_key(query, key_cache, *rest, **options):
    """Attend with the first key of each sequence replaced by zeros."""
    block_table = rest[1]
    key_cache = key_cache.clone()
    key_cache[block_table[:, 0].long(), 0] = 0
    return REFERENCE.paged_attention(query, key_cache, *rest, **pack_options(**options))
