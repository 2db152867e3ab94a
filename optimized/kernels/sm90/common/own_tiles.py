"""A warpgroup's KV tiles of a work item. Those of other warpgroups alone are released."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .mainloop import attend_to_tiles
from .pipeline import ping_pong_arrive, ping_pong_wait
from .traits import uses_ping_pong


@gluon.jit
def attend_to_item(
    shared,
    tiles,
    acc,
    kv_state,
    q_state,
    work,
    own,
    position,
    scale_log2,
    config: gl.constexpr,
    CONSUMER: gl.constexpr,
    factors=None,
):
    """Return the `Carry` after a warpgroup's KV tiles of a work item, and the next KV state.

    The arguments are those of `attend_to_tiles`. The work item's other KV tiles are released.
    """
    kv_state = skip_tiles(shared, kv_state, own.after, config, CONSUMER)
    carry, kv_state = attend_to_tiles(
        shared, tiles, acc, kv_state, q_state, work, own, position, scale_log2,
        config, CONSUMER, factors,
    )  # fmt: skip
    kv_state = skip_tiles(shared, kv_state, own.before, config, CONSUMER)
    return carry, kv_state


@gluon.jit
def skip_tiles(
    shared,
    kv_state,
    num_tiles,
    config: gl.constexpr,
    CONSUMER: gl.constexpr,
):
    """Release KV tiles that only other warpgroups attend to, and return the next KV state."""
    for _ in range(num_tiles):
        shared.k_pipe.consumer_wait(kv_state)
        # a phase that was not waited for makes the wait for the phase after the next one return
        shared.v_pipe.consumer_wait(kv_state)
        if uses_ping_pong(config):
            ping_pong_wait(CONSUMER)
            ping_pong_arrive((CONSUMER + 1) % config.CONSUMERS)
        shared.k_pipe.consumer_release(kv_state)
        kv_state = kv_state.advance()
    return kv_state
