"""Small batches of every path of paged attention, to be run under compute-sanitizer.

    compute-sanitizer --tool memcheck python tests/gpu/sanitized.py portable
    compute-sanitizer --tool racecheck python tests/gpu/sanitized.py hopper
    compute-sanitizer --tool racecheck python tests/gpu/sanitized.py latent
    compute-sanitizer --tool racecheck python tests/gpu/sanitized.py handover

`portable` runs the kernels of every chip. `hopper` also runs the prefill kernel of Hopper, with its
options and head sizes. `latent` runs the latent decode kernel. `handover` is a small kernel that
passes numbers from one warp to others through shared memory and two mbarriers. It shows what the
tool reports about a pattern that is correct. Each ends with the word `done`; the tool prints what
it found.
"""

import sys

import torch
from pagetwin.contract.attention_options import pack_options
from pagetwin.optimized.attention import paged as paged_attention
from pagetwin.optimized.kernels.sm90 import family as sm90
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
)

TURNS = gl.constexpr(6)
LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
BATCHES = (
    # new tokens and lengths of the requests, options
    ([1] * 9, [300, 17, 700, 1, 0, 128, 64, 2000, 5], {}),
    ([4] * 3, [300, 17, 700], {"sliding_window": 50}),
    ([1] * 3, [5000, 3, 900], {}),
    ([1, 200, 7], [90, 333, 70], {}),
    ([1] * 4, [64] * 4, {"batch_invariant": True}),
)

OPTION_BATCHES = (
    ([200, 70], [333, 70], {"sliding_window": 50}),
    ([200, 70], [333, 70], {"attention_chunk_size": 70}),
    ([130, 3], [260, 90], {"logits_soft_cap": 20.0}),
)
"""Batches of the Hopper prefill kernel with options."""
LATENT_BATCHES = (
    (16, [1] * 5, [300, 17, 1, 64, 2000]),
    (128, [2, 1], [700, 65]),
)
"""Query heads, new tokens and lengths of batches of the latent decode kernel."""


@gluon.jit
def _hand_over(line, full, free):
    one: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    for turn in range(TURNS):
        mbarrier.wait(free, (turn & 1) ^ 1)
        line.store(gl.full([1], turn, gl.int32, one))
        mbarrier.arrive(full, count=1)


@gluon.jit
def _take_over(line, full, free, out):
    one: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    total = gl.to_tensor(0)
    for turn in range(TURNS):
        mbarrier.wait(full, turn & 1)
        total += gl.max(line.load(one), 0)
        mbarrier.arrive(free, count=1)
    gl.store(out, total)


@gluon.jit
def hand_over_kernel(out):
    """Hand the numbers below TURNS over from one warp to four, which add them up."""
    line = gl.allocate_shared_memory(gl.int32, [1], LINE)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [1], barrier)
    free = gl.allocate_shared_memory(gl.int64, [1], barrier)
    mbarrier.init(full, count=1)
    mbarrier.init(free, count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_take_over, (line, full, free, out)),
            (_hand_over, (line, full, free)),
        ],
        [1],
        [24],
    )


def run_handover() -> None:
    """Hand over, and look at what arrived."""
    out = torch.zeros(1, dtype=torch.int32, device="cuda")
    hand_over_kernel[(1,)](out, num_warps=4)
    assert out.item() == sum(range(TURNS.value))


def run_batches(has_options: bool) -> None:
    """Attend with every batch, in two dtypes and several head sizes."""
    sizes = ((128, torch.bfloat16), (64, torch.float16))
    cases = [(*size, *batch) for size in sizes for batch in BATCHES]
    if has_options:
        wide = (64, 96, 128, 256)
        cases += [(n, torch.bfloat16, *each) for n in wide for each in OPTION_BATCHES]
    for head_size, dtype, query_lens, seq_lens, options in cases:
        arguments = _draw(query_lens, seq_lens, head_size, dtype)
        lse = torch.empty(8, sum(query_lens) + 2, device="cuda")
        for _ in range(2):
            out = paged_attention.paged_attention(
                *arguments, lse=lse, **pack_options(**options)
            )
        assert out.isfinite().all()


def run_latent() -> None:
    """Attend to latents of 512 + 64 elements, which are keys and values of one head."""
    for heads, query_lens, seq_lens in LATENT_BATCHES:
        arguments = _draw(query_lens, seq_lens, 576, torch.bfloat16, heads, 1)
        query, key_cache, _, *rest = arguments
        lse = torch.empty(heads, sum(query_lens) + 2, device="cuda")
        for _ in range(2):
            out = paged_attention.paged_attention(
                query, key_cache, key_cache[..., :512], *rest, lse=lse
            )
        assert out.isfinite().all()


def _draw(
    query_lens: list[int],
    seq_lens: list[int],
    head_size: int,
    dtype: torch.dtype,
    heads: int = 8,
    kv_heads: int = 2,
) -> tuple[Tensor | int, ...]:
    """Return a batch with blocks of 16 in random order, and two padding tokens."""
    torch.manual_seed(0)
    num_blocks = [-(-seq_len // 16) for seq_len in seq_lens]
    block_table = torch.zeros(len(seq_lens), max(num_blocks) + 1, dtype=torch.int32)
    ids = torch.randperm(sum(num_blocks)).int().split(num_blocks)
    for row, own in zip(block_table, ids, strict=True):
        row[: len(own)] = own
    cache = torch.randn(2, sum(num_blocks), 16, kv_heads, head_size).to("cuda", dtype)
    query = torch.randn(sum(query_lens) + 2, heads, head_size).to("cuda", dtype)
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    lengths = torch.tensor(seq_lens, dtype=torch.int32)
    in_order = (block_table.cuda(), starts.cuda(), lengths.cuda())
    return query, cache[0], cache[1], *in_order, max(query_lens), max(seq_lens)


def main() -> None:
    """Run what the first word of the command line names."""
    what = sys.argv[1]
    if what == "portable":
        sm90.is_hopper = lambda device: False
    if what == "handover":
        run_handover()
    elif what == "latent":
        run_latent()
    else:
        run_batches(has_options=what == "hopper")
    torch.cuda.synchronize()
    print("done")


if __name__ == "__main__":
    main()
