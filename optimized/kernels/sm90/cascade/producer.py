"""Producer warp over a shared prefix: work items, and TMA loads of Q and K.

Values are loaded by the producer warp of the prefill kernel (`..producer.produce_v`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..common.config import WORK_STAGES, count_q_stages, count_tokens
from ..common.load_kv import load_k
from ..common.pipeline import PipelineState
from ..common.work_item import publish_end, publish_work
from ..prefill.producer import load_q
from .scheduler import count_items, locate_item


@gluon.jit
def produce_q_and_k(
    shared,
    batch,
    prefix,
    q,
    k,
    config: gl.constexpr,
):
    """Run producer warp 0: publish the program's work items, and load their Q and K tiles."""
    TILE_TOKENS: gl.constexpr = config.CONSUMERS * count_tokens(config)
    work_state = PipelineState.start(WORK_STAGES)
    k_state = PipelineState.start(config.STAGES)
    q_state = PipelineState.start(count_q_stages(config))
    num_items = count_items(prefix, TILE_TOKENS)
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        work = locate_item(prefix, item, config, TILE_TOKENS)
        publish_work(shared, work_state, work, config)
        work_state = work_state.advance()
        load_q(shared, q, q_state, work, config)
        q_state = q_state.advance()
        k_state = load_k(shared, batch, k, k_state, work, config)
    publish_end(shared, work_state, config)
