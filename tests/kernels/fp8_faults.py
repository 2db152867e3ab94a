"""Faults of the FP8 kernels for Hopper that the Gluon interpreter reports."""

from typing import NamedTuple


class Fault(NamedTuple):
    """A change of a kernel.

    Args:
        file: in `optimized/kernels`.
        old, new: the text that the file has once, and what takes its place.
        case: one of CASES that shows it.
        report: what is reported.
    """

    file: str
    old: str
    new: str
    case: str
    report: str


WRONG = "Verdict|log-sum-exp"
"""A row is not within its error budget, or is not finite."""
SHARED = f"{WRONG}|contains NaN or infinity|two programs store to one element"
"""Partial results were combined before all of them were there, or twice."""
FAULTS = {
    "values have the scale of keys": Fault(
        "portable/formats/fp8.py",
        "load_scale(v_scale, call.scale_strides.v",
        "load_scale(call.option_tensors.k_scale, call.scale_strides.k",
        "one scale for all heads",
        WRONG,
    ),
    "keys have the scale of values": Fault(
        "sm90/fp8_decode/operands.py",
        "call.option_tensors.k_scale, call.scale_strides.k",
        "call.option_tensors.v_scale, call.scale_strides.v",
        "edges, head size 64",
        WRONG,
    ),
    "each head has the scale of the first one": Fault(
        "sm90/fp8_decode/operands.py",
        "call.scale_strides.k, kv_head, True",
        "call.scale_strides.k, 0, True",
        "edges, head size 64",
        WRONG,
    ),
    "a key past the end is visible": Fault(
        "sm90/fp8_decode/tile.py",
        "position < gl.minimum",
        "position <= gl.minimum",
        "edges, head size 64",
        WRONG,
    ),
    "the last key is not visible": Fault(
        "portable/options/causal.py",
        "tl.minimum(position + 1, seq_len)\n",
        "tl.minimum(position, seq_len)\n",
        "edges, head size 64",
        WRONG,
    ),
    "a key before the window is visible": Fault(
        "sm90/fp8_decode/tile.py",
        "position >= visible.row_begin",
        "position + 1 >= visible.row_begin",
        "a window, needle tile edge",
        WRONG,
    ),
    "keys past the end are multiplied": Fault(
        "sm90/fp8_decode/operands.py",
        "gl.minimum(key, words.end - 1)",
        "gl.minimum(key, words.end)",
        "edges, head size 64",
        WRONG,
    ),
    "a block past the end is read": Fault(
        "sm90/fp8_decode/operands.py",
        "last = (words.end - 1) // PAGE",
        "last = words.end // PAGE",
        "edges, head size 64",
        "a load of the elements",
    ),
    "blocks of the tile after the last are read": Fault(
        "sm90/fp8_decode/operands.py",
        "gl.maximum(gl.minimum(page, last), words.begin // PAGE)",
        "page",
        "edges, head size 64",
        "a load of the elements|an overflow of int32",
    ),
    "blocks before the window are read": Fault(
        "sm90/fp8_decode/tile.py",
        "first = gl.maximum(begin, visible.begin)",
        "first = begin",
        "chunks, needle first new",
        "a load of the elements|an overflow of int32",
    ),
    "a key past the end is converted": Fault(
        "sm90/fp8_prefill/kernel.py",
        "is_stored = n < seq_len",
        "is_stored = n <= seq_len",
        "prefill",
        "a load of the elements",
    ),
    "keys before the window are converted from any block": Fault(
        "sm90/fp8_prefill/kernel.py",
        "codes = tl.load(base + offset, mask=is_key[:, None] & is_element, other=0)",
        "codes = tl.load(base + offset)",
        "prefill, blocks of 48, window",
        WRONG,
    ),
    "keys before the window are multiplied": Fault(
        "sm90/fp8_decode/operands.py",
        "gl.maximum(gl.minimum(key, words.end - 1), words.begin)",
        "gl.minimum(key, words.end - 1)",
        "a window, needle tile edge",
        WRONG,
    ),
    "a word begins between two pieces": Fault(
        "sm90/fp8_decode/operands.py",
        "lane % 4 * 4, piece",
        "lane % 4 * 2, piece",
        "one scale for all heads",
        "not the multiples that were promised",
    ),
    "the columns of a value change places": Fault(
        "sm90/fp8_decode/operands.py",
        "$8, $9, 0x5140",
        "$8, $9, 0x4150",
        "one scale for all heads",
        WRONG,
    ),
    "a register without a value is decoded": Fault(
        "sm90/fp8_decode/operands.py",
        "mov.b32 {{$2, $3}}, y; }}",
        "mov.b32 {{$2, $3}}, z; }}",
        "one scale for all heads",
        "assembly reads z",
    ),
    "e5m2 is decoded as e4m3": Fault(
        "sm90/fp8_decode/operands.py",
        "k_code(DECODE_E5M2 if",
        "k_code(DECODE_E4M3 if",
        "e5m2",
        WRONG,
    ),
    "a tile's keys are those of the tile before": Fault(
        "sm90/fp8_decode/tile.py",
        "k_blocks = load_blocks(of_k, next_n + BLOCK_N,",
        "k_blocks = load_blocks(of_k, next_n,",
        "many tiles in a segment",
        WRONG,
    ),
    "a barrier that no one completes is waited for": Fault(
        "sm90/fp8_decode/tile.py",
        "mbarrier.wait(never.index(0), 1)",
        "mbarrier.wait(never.index(0), 0)",
        "one scale for all heads",
        "deadlock: role 0 waits for phase 0",
    ),
    "the sum of the warps is not rescaled": Fault(
        "sm90/fp8_decode/tile.py",
        "gl.sum(l_i * weight, 0)",
        "gl.sum(l_i, 0)",
        "edges, head size 64",
        WRONG,
    ),
    "a sink is counted in every segment": Fault(
        "sm90/fp8_decode/tile.py",
        "rows.is_row, counts_sink,",
        "rows.is_row, True,",
        "drafts in many segments, sinks",
        WRONG,
    ),
    "partial results of two segments have one place": Fault(
        "sm90/fp8_decode/kernel.py",
        "offset = segment_offset(\n        index,",
        "offset = segment_offset(\n        0,",
        "a request in many segments",
        "two programs store to one element",
    ),
    "the first program to arrive combines": Fault(
        "portable/combine.py",
        "== num_splits - 1",
        "== 0",
        "a request in many segments",
        "",
    ),
    "the last segment is not combined": Fault(
        "sm90/fp8_decode/kernel.py",
        "(segment <= last)",
        "(segment < last)",
        "drafts in many segments, sinks",
        WRONG,
    ),
    "an arrival orders nothing": Fault(
        "portable/combine.py",
        'sem="acq_rel"',
        'sem="relaxed"',
        "a request in many segments",
        "a program loads what another program has stored",
    ),
    "an arrival is seen by one program alone": Fault(
        "portable/combine.py",
        'scope="gpu"',
        'scope="cta"',
        "a request in many segments",
        "a program loads what another program has stored",
    ),
    "a counter is left as it is": Fault(
        "sm90/fp8_decode/kernel.py",
        "        gl.store(semaphore, 0)  # for the next launch\n",
        "        pass\n",
        "a request in many segments",
        "counters are not 0",
    ),
    "two KV heads share a counter": Fault(
        "sm90/fp8_decode/kernel.py",
        "semaphores + first * num_kv_heads + kv_head",
        "semaphores + first * num_kv_heads",
        "two requests in many segments",
        SHARED,
    ),
    "two requests share a counter": Fault(
        "sm90/fp8_decode/kernel.py",
        "semaphores + first * num_kv_heads + kv_head",
        "semaphores + kv_head",
        "two requests in many segments",
        SHARED,
    ),
    "two KV heads share a partial result": Fault(
        "portable/combine.py",
        "(segment * 2 + begins_here) * num_kv_heads + kv_head",
        "(segment * 2 + begins_here) * num_kv_heads",
        "two requests in many segments",
        SHARED,
    ),
    "padding is not cleared to its end": Fault(
        "sm90/fp8_decode/kernel.py",
        "for token in range(first, num_tokens, num_programs)",
        "for token in range(first, num_tokens - 1, num_programs)",
        "four requests",
        "",
    ),
    "a block that a query attends to is not converted": Fault(
        "sm90/fp8_prefill/kernel.py",
        "(first + BLOCK > begin)",
        "(first > begin)",
        "prefill, blocks of 48, window",
        WRONG,
    ),
    "keys are converted past the end of the block table": Fault(
        "sm90/fp8_prefill/kernel.py",
        "(n // config.BLOCK_SIZE).to",
        "(n // config.BLOCK_SIZE + 1).to",
        "prefill",
        "a load of the elements",
    ),
    "a converted head has the scales of another": Fault(
        "sm90/fp8_prefill/kernel.py",
        "load_scale(args.v_scale, scale_strides.v, head, True)",
        "load_scale(args.v_scale, scale_strides.v, 0, True)",
        "prefill",
        WRONG,
    ),
    "two requests are converted to one place": Fault(
        "sm90/fp8_prefill/kernel.py",
        "slot = number.to(tl.int64) * BLOCK",
        "slot = block.to(tl.int64) * BLOCK",
        "prefill, head size 128, float16, e5m2",
        "two programs store to one element",
    ),
    "long requests are computed by the decode kernel too": Fault(
        "sm90/fp8_decode/kernel.py",
        "(num_rows <= decode_rows) & (num_rows > 0)",
        "num_rows > 0",
        "long requests are left as they are",
        "",
    ),
}
