"""Work items over a shared prefix: query tiles of all tokens, and splits of the prefix."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..common.roles import load_item, start_loads
from ..common.traits import count_tokens
from ..common.work_item import WorkItem, publish_end


@gluon.jit
def count_items(prefix, TILE_TOKENS: gl.constexpr):
    """Return the number of work items."""
    query_tiles = (prefix.num_tokens + TILE_TOKENS - 1) // TILE_TOKENS
    splits = (prefix.prefix_len + prefix.split_len - 1) // prefix.split_len
    return query_tiles * splits * prefix.num_heads


@gluon.jit
def locate_item(prefix, item, config: gl.constexpr, TILE_TOKENS: gl.constexpr):
    """Return the `WorkItem` with a number.

    The query tiles of one head and split have neighbouring numbers, so that they read the same
    keys at the same time.
    """
    query_tiles = (prefix.num_tokens + TILE_TOKENS - 1) // TILE_TOKENS
    first_token = item % query_tiles * TILE_TOKENS
    head = item // query_tiles % prefix.num_heads
    split = item // query_tiles // prefix.num_heads
    num_keys = gl.minimum(
        prefix.split_len, prefix.prefix_len - split * prefix.split_len
    )
    return WorkItem(
        table_row=split,
        head=head,
        query_start=first_token,
        split=split,
        # seq_len - position is the number of tokens from the first one on
        position=num_keys - (prefix.num_tokens - first_token),
        seq_len=num_keys,
        kv_start=0,
        num_kv_tiles=(num_keys + config.BLOCK_N - 1) // config.BLOCK_N,
    )


@gluon.jit
def produce_prefix(shared, loads, prefix, config: gl.constexpr):
    """Run producer warp 0: publish the program's work items, and load their Q and K tiles.

    Args:
        shared: `SharedStorage`.
        loads: `Loads`.
        prefix: `PrefixArguments`.
    """
    TILE_TOKENS: gl.constexpr = config.CONSUMERS * count_tokens(config)
    states = start_loads(config)
    num_items = count_items(prefix, TILE_TOKENS)
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        work = locate_item(prefix, item, config, TILE_TOKENS)
        states = load_item(shared, loads, states, work, config)
    publish_end(shared, states.work, config)
