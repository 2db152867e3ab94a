"""Paged decode with grouped queries: one program per request and KV head.

The function `run` has the arguments of the definitions gqa_paged_decode_*: the inputs, then the
outputs, which it fills.
"""

import triton
import triton.language as tl

LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def decode_kernel(
    q_ptr,  # [batch_size, num_qo_heads, HEAD_DIM]
    k_ptr,  # [num_pages, PAGE_SIZE, num_kv_heads, HEAD_DIM]
    v_ptr,
    indptr_ptr,  # [batch_size + 1]
    indices_ptr,
    last_ptr,  # [batch_size]
    out_ptr,  # as q
    lse_ptr,  # [batch_size, num_qo_heads]
    sm_scale,
    num_kv_heads,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    req, kv_head = tl.program_id(0), tl.program_id(1)
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, PAGE_SIZE)
    offs_d = tl.arange(0, HEAD_DIM)
    head = kv_head * GROUP + offs_m
    row = req * num_kv_heads * GROUP + head
    is_head = offs_m < GROUP
    q_offs = row[:, None] * HEAD_DIM + offs_d[None, :]
    q = tl.load(q_ptr + q_offs, mask=is_head[:, None], other=0.0)  # [BLOCK_M, HEAD_DIM]
    m_i = tl.full([BLOCK_M], -float("inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)

    first = tl.load(indptr_ptr + req)
    last = tl.load(indptr_ptr + req + 1)
    rest = tl.load(last_ptr + req)
    for index in range(first, last):
        page = tl.load(indices_ptr + index).to(tl.int64)
        keys = tl.where(index == last - 1, rest, PAGE_SIZE)
        is_key = offs_n < keys
        slot = (page * PAGE_SIZE + offs_n) * num_kv_heads + kv_head
        offs = slot[:, None] * HEAD_DIM + offs_d[None, :]  # [PAGE_SIZE, HEAD_DIM]
        k = tl.load(k_ptr + offs, mask=is_key[:, None], other=0.0)
        v = tl.load(v_ptr + offs, mask=is_key[:, None], other=0.0)
        qk = tl.dot(q, k.T, input_precision="ieee") * sm_scale  # [BLOCK_M, PAGE_SIZE]
        qk = tl.where(is_key[None, :], qk, -float("inf"))
        m_new = tl.maximum(m_i, tl.max(qk, 1))
        alpha = tl.exp(m_i - m_new)
        p = tl.exp(qk - m_new[:, None])
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        acc += tl.dot(p.to(v.dtype), v, input_precision="ieee")
        m_i = m_new

    has_keys = l_i > 0
    acc = tl.where(has_keys[:, None], acc / l_i[:, None], 0.0)
    lse = tl.where(has_keys, m_i + tl.log(l_i), -float("inf")) / LN_2
    out = acc.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + q_offs, out, mask=is_head[:, None])
    tl.store(lse_ptr + row, lse, mask=is_head)


def run(
    q, k_cache, v_cache, kv_indptr, kv_indices, kv_last_page_len, sm_scale, output, lse
):
    """Fill the outputs."""
    batch_size, num_qo_heads, head_dim = q.shape
    _, page_size, num_kv_heads, _ = k_cache.shape
    group = num_qo_heads // num_kv_heads
    if not batch_size:
        return
    decode_kernel[(batch_size, num_kv_heads)](
        q,
        k_cache,
        v_cache,
        kv_indptr,
        kv_indices,
        kv_last_page_len,
        output,
        lse,
        sm_scale,
        num_kv_heads,
        GROUP=group,
        BLOCK_M=max(16, triton.next_power_of_2(group)),
        HEAD_DIM=head_dim,
        PAGE_SIZE=page_size,
    )
