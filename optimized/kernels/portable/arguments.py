"""Arguments of the attention kernels, grouped in NamedTuples.

Triton passes a NamedTuple to a kernel, and from function to function, as its fields. A field that
is None is absent: the code that would use it is not compiled. Integer fields are specialized one by
one, as plain arguments are: 1 becomes a constant, and a multiple of 16 is known as such.

A jit function cannot return None, nor a NamedTuple with a field that is None (triton 3.6). So the
NamedTuples that functions return have `()` in absent fields; whether a field is absent is told by
the argument it comes from.

All kernels have the same arguments up to `config`, in the same order: host/make_launches.py
provides them once for all. Those that change from launch to launch come first. A kernel that does
not use one of them says so: a second list would cost the host more than an argument.
"""

from typing import Any, NamedTuple

# These arguments change from step to step. No kernel is specialized on them. They are not grouped,
# because `do_not_specialize` does not reach into a tuple.
CHANGING = [
    "num_tokens",
    "num_reqs",
    "num_search_steps",
    "partial_rows",
    "table_stride_req",
    "lse_stride_head",
    "lse_stride_token",
    "tree_stride_req",
    "tree_width",
]


class Tensors(NamedTuple):
    """Pointers to the tensors of a call.

    Args:
        q: [tokens, query_heads, head_size].
        k, v: [num_blocks, block_size, kv_heads, size], or [key_tokens, kv_heads, size] without a
            block table.
        block_table: Optional. [reqs, max_blocks]. If None, keys are stored request after request.
        query_start_loc: [reqs + 1] first token of each request.
        seq_lens: [reqs] keys of each request; without a block table [reqs + 1] first key of each.
        out: [tokens, query_heads, value_size].
        lse: Optional. [query_heads, tokens] log-sum-exp in base e.
        partial_out, partial_lse: Optional. Workspace of partial results, see combine.py.
        semaphores: Optional. Arrival counters of split work, 0 between launches.
    """

    q: Any
    k: Any
    v: Any
    block_table: Any
    query_start_loc: Any
    seq_lens: Any
    out: Any
    lse: Any
    partial_out: Any
    partial_lse: Any
    semaphores: Any


class Strides(NamedTuple):
    """Strides of the tensors, in elements."""

    q_token: Any
    q_head: Any
    q_element: Any
    k_block: Any
    k_slot: Any
    k_head: Any
    k_element: Any
    v_block: Any
    v_slot: Any
    v_head: Any
    v_element: Any
    table_entry: Any
    out_token: Any
    out_head: Any
    out_element: Any


class KernelCall(NamedTuple):
    """The arguments of a call that all steps of a kernel use.

    Args:
        tensors: Tensors.
        strides: Strides.
        option_tensors: OptionTensors, see options/score.py.
        masks, scores: MaskArguments and ScoreArguments, see options/.
        scale_strides: ScaleStrides of a quantized cache and an FP8 output, see fp8.py.
        scale: scale of the dot products.
        partial_rows: rows of a partial result in the workspace.
        table_stride_req, lse_stride_head, lse_stride_token, tree_stride_req, tree_width: strides
            and sizes that change.
    """

    tensors: Any
    strides: Any
    option_tensors: Any
    masks: Any
    scores: Any
    scale_strides: Any
    scale: Any
    partial_rows: Any
    table_stride_req: Any
    lse_stride_head: Any
    lse_stride_token: Any
    tree_stride_req: Any
    tree_width: Any


class Config(NamedTuple):
    """Compile-time constants of a kernel, passed as one `tl.constexpr`.

    Args:
        GROUP_SIZE: query heads per kv head.
        HEAD_DIM, V_HEAD_DIM: elements of a query or key head, and of a value head. With ROPE_DIM,
            HEAD_DIM counts only the elements of a key that are its value too.
        ROPE_DIM: elements of a key after those; 0 if keys and values are stored apart.
        BLOCK_D, BLOCK_DV, BLOCK_ROPE: those, rounded up to powers of two of at least 16.
        BLOCK_SIZE: slots per block of the cache; 0 without a block table.
        masks, scores: MaskConstants and ScoreConstants, see options/.
        CACHE_FORMAT, OUT_FORMAT: names of the formats of the cache and of the output, see
            shared/contract/cache_formats.py.
        NATIVE_FP8: whether the chip decodes FP8 by an instruction.
        PIN_FP8_V: whether FP8 values are decoded before their layout changes.
        ALIGNMENT: rows of keys and values begin at multiples of so many bytes if the caches do: 16,
            8, 4, or 1 for any others.
        BLOCK_M, BLOCK_N: rows of a query tile, keys of a KV tile.
        MASK_ALL_TILES: whether one loop masks all KV tiles; otherwise fully visible tiles have a
            loop without masks.
        CLEAR_PADDING: whether this launch clears the rows of padding tokens.
        INDEX_64: whether offsets into keys, values and block table need 64 bits.
        UPCAST: whether 16-bit inputs are converted to float32 (interpreter only).
        ROW_SUMS: whether products are summed row by row. In the interpreter a product of tiles is
            numpy's, whose rounding depends on a row's index in its tile; a chip's does not.
    """

    GROUP_SIZE: int
    HEAD_DIM: int
    BLOCK_D: int
    V_HEAD_DIM: int
    BLOCK_DV: int
    ROPE_DIM: int
    BLOCK_ROPE: int
    BLOCK_SIZE: int
    masks: Any
    scores: Any
    CACHE_FORMAT: str
    OUT_FORMAT: str
    NATIVE_FP8: bool
    PIN_FP8_V: bool
    ALIGNMENT: int
    BLOCK_M: int
    BLOCK_N: int
    MASK_ALL_TILES: bool
    CLEAR_PADDING: bool
    INDEX_64: bool
    UPCAST: bool
    ROW_SUMS: bool


class StreamK(NamedTuple):
    """Compile-time constants of the stream-K partition in decode.py.

    Args:
        MIN_TILES: KV tiles of a segment, at least.
        QUERY_TILES: whether requests may have more rows than a query tile.
        REQS_PER_PASS: requests whose tiles are counted at once.
        MANY_REQS: whether there may be more requests than that.
        COMBINE_ROWS, COMBINE_SPLITS: rows and partial results that are combined at once.
    """

    MIN_TILES: int
    QUERY_TILES: bool
    REQS_PER_PASS: int
    MANY_REQS: bool
    COMBINE_ROWS: int
    COMBINE_SPLITS: int


class ShortDecode(NamedTuple):
    """Compile-time constants of the splits in short_decode.py.

    Args:
        COMBINE_ROWS, COMBINE_SPLITS: rows and partial results that are combined at once.
        PARTS: parts of the query heads that share a kv head, each with programs of its own.
    """

    COMBINE_ROWS: int
    COMBINE_SPLITS: int
    PARTS: int = 1
