import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def decode_kernel(
    query,  # [reqs, query_heads, HEAD_SIZE]
    key_cache,  # [num_blocks, BLOCK_SIZE, kv_heads, HEAD_SIZE]
    value_cache,  # [num_blocks, BLOCK_SIZE, kv_heads, HEAD_SIZE]
    block_table,  # [reqs, max_blocks] int32, entries past the end of a row hold any number
    seq_lens,  # [reqs] int32, at least 1
    output,  # [reqs, query_heads, HEAD_SIZE], written
    scale,  # factor of the scores
    query_heads,  # a multiple of kv_heads
    kv_heads,
    max_blocks,
    BLOCK_SIZE: tl.constexpr,  # a power of 2
    HEAD_SIZE: tl.constexpr,  # a power of 2
):
    req = tl.program_id(0)
    head = tl.program_id(1)
    group = query_heads // kv_heads
    kv_head = head // group
    seq_len = tl.load(seq_lens + req)
    elements = tl.arange(0, HEAD_SIZE)
    offsets = tl.arange(0, BLOCK_SIZE)
    row = (req * query_heads + head) * HEAD_SIZE + elements
    q = tl.load(query + row)  # [HEAD_SIZE]
    m_i = -float("inf")
    l_i = 0.0
    acc = tl.zeros([HEAD_SIZE], tl.float32)
    for block in range(tl.cdiv(seq_len, BLOCK_SIZE)):
        block_id = tl.load(block_table + req * max_blocks + block).to(tl.int64)
        is_visible = block * BLOCK_SIZE + offsets < seq_len
        slots = block_id * BLOCK_SIZE + offsets
        place = (slots[:, None] * kv_heads + kv_head) * HEAD_SIZE + elements[None]
        k = tl.load(key_cache + place, mask=is_visible[:, None], other=0.0)
        v = tl.load(value_cache + place, mask=is_visible[:, None], other=0.0)
        qk = tl.sum(q[None] * k, 1) * scale  # [BLOCK_SIZE]
        qk = tl.where(is_visible, qk, -float("inf"))
        m_new = tl.maximum(m_i, tl.max(qk, 0))
        alpha = tl.exp(m_i - m_new)
        p = tl.exp(qk - m_new)
        l_i = l_i * alpha + tl.sum(p, 0)
        acc = acc * alpha + tl.sum(p[:, None] * v, 0)
        m_i = m_new
    tl.store(output + row, acc / l_i)


def decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
) -> Tensor:
    reqs, query_heads, head_size = query.shape
    block_size, kv_heads = key_cache.shape[1:3]
    output = torch.full_like(query, float("nan"))
    decode_kernel[(reqs, query_heads)](
        query,
        key_cache,
        value_cache,
        block_table,
        seq_lens,
        output,
        scale,
        query_heads,
        kv_heads,
        block_table.shape[1],
        BLOCK_SIZE=block_size,
        HEAD_SIZE=head_size,
    )
    return output
