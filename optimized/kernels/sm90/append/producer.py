"""Producer warp of the Hopper append kernel: work items, and TMA loads of Q and K.

Values are loaded by the producer warp of the prefill kernel (`..producer.produce_v`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..common.config import WORK_STAGES, count_q_stages, count_tokens
from ..common.load_kv import load_k
from ..common.pipeline import PipelineState
from ..common.work_item import publish_end, publish_work
from ..invariant.producer import load_packed_q
from ..prefill.scheduler import load_request
from .segments import count_request_tiles, locate_item


@gluon.jit
def produce_q_and_k(
    shared,
    batch,
    q_desc,
    k,
    output,
    segment,
    config: gl.constexpr,
):
    """Run producer warp 0: the work items of the segment, and their Q and K tiles."""
    TILE_TOKENS: gl.constexpr = config.CONSUMERS * count_tokens(config)
    work_state = PipelineState.start(WORK_STAGES)
    k_state = PipelineState.start(config.STAGES)
    q_state = PipelineState.start(count_q_stages(config))
    tile_index = segment.first_tile
    for req in range(segment.first_req, segment.end_req):
        request = load_request(batch, req, True)
        tiles = count_request_tiles(
            request.query_len, request.seq_len, config, TILE_TOKENS
        )
        first = gl.maximum(segment.begin - tile_index, 0) // tiles.kv_tiles
        end = (segment.end - tile_index + tiles.kv_tiles - 1) // tiles.kv_tiles
        end = gl.minimum(end, tiles.query_tiles)
        for query_tile in range(first, end):
            own_index = tile_index + query_tile * tiles.kv_tiles
            work = locate_item(
                segment, req, request, tiles, query_tile, own_index, config, TILE_TOKENS
            )
            publish_work(shared, work_state, work, config)
            work_state = work_state.advance()
            if work.num_kv_tiles > 0:
                load_packed_q(
                    shared, q_desc, q_state, work, output.group_size,
                    config,
                )  # fmt: skip
                q_state = q_state.advance()
                k_state = load_k(shared, batch, k, k_state, work, config)
        tile_index += tiles.kv_tiles * tiles.query_tiles
    publish_end(shared, work_state, config)
