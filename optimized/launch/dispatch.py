"""How is a call of attention launched?

What attends is one kernel (`_attend_kernel.py`), launched for the short requests of a batch and
again for the long ones, which a Hopper chip has another one for (`_prefill_sm90.py`). Nothing is
read from the device, so that a call can be captured.

Most calls are like an earlier one: the same strides, dtypes and options, other sizes. What follows
from the former is worked out once and kept (`_prepare.py`), and then a call costs little more than
filling in pointers and sizes.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ...contract.attention_options import (
    DEFAULT_OPTIONS,
    OPTION_NAMES,
    AttentionOptions,
)
from ...validation import values_checked
from ..kernels.fp8 import scale_arguments
from ..kernels.sm90 import prefill as _prefill_sm90
from .launcher import INTERPRETED, Launcher, check_launch
from .prepare import MOST_ROOM, Launches, prepare
from .tuning import max_head_size
from .workspace import find_workspace

PLAIN = {causal: AttentionOptions(causal=causal) for causal in (True, False)}
"""Options of calls that ask for nothing else; they are told by their identity."""
NO_OPTIONS: tuple[Any, ...] = (None,) * 6

Signature: TypeAlias = tuple[Any, ...]

KNOWN: dict[Signature, Launches] = {}
"""What calls of each kind need; an entry for each, so a few in a program's life. Keys that are not
cached are of another kind whenever their number changes."""


def choose_options(options: AttentionOptions, causal: bool) -> AttentionOptions:
    """Return the options of a call with `causal` set; one of PLAIN if no other is given.

    Args:
        options: as the caller gave them.
        causal: the operation's default.
    """
    if options is DEFAULT_OPTIONS:
        return PLAIN[causal]
    options = options.with_causal(causal)
    # all others but `batch_invariant` are None unless they are given
    is_plain = type(options.causal) is bool and not options.batch_invariant
    if is_plain and list(vars(options).values()).count(None) == len(OPTION_NAMES) - 2:
        return PLAIN[options.causal]
    return options


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_table: Tensor | None,
    query_start_loc: Tensor,
    lengths: Tensor,
    max_query_len: int,
    max_key_len: int,
    scale: float | None,
    out: Tensor | None,
    lse: Tensor | None,
    options: AttentionOptions,
    check: Callable[[bool], None],
) -> Tensor:
    """Launch what attends, and return the output.

    Args:
        query: [tokens, query_heads, head_size].
        key, value: [num_blocks, block_size, kv_heads, head_size] with a block table, or
            [key_tokens, kv_heads, head_size].
        block_table: [reqs, max_blocks]; None: keys lie request after request.
        query_start_loc: [reqs + 1].
        lengths: [reqs] keys of each request; without a block table [reqs + 1], where they start.
        max_query_len, max_key_len: upper bounds.
        scale, out, lse: as in `paged_attention`.
        options: the rest.
        check: refuses these arguments if they are wrong, by their contents too where it is given
            True; it is called unless a call of the same kind has passed it and the sizes fit.
    """
    tensors = (query, key, value, block_table, query_start_loc, lengths)
    signature = sign(*tensors, out, lse, options)
    launches = None if signature is None else KNOWN.get(signature)
    contents = values_checked()
    if (
        launches is None
        or contents
        or not sizes_fit(*tensors, max_query_len, max_key_len, out, lse)
    ):
        check(contents)
        check_launch(query)
        check_supported(query, value)
    num_tokens, query_heads, head_size = query.shape
    # a whole number would be a constant of the compiled kernel
    scale = head_size**-0.5 if scale is None else float(scale)
    if out is None:
        out = query.new_empty(num_tokens, query_heads, value.shape[-1])
    num_reqs = query_start_loc.shape[0] - 1
    if not query.numel() or num_reqs < 1:
        out.zero_()
        if lse is not None:
            lse.fill_(-torch.inf)
        return out
    if launches is None:
        launches = prepare(
            query, key, value, block_table, query_start_loc, out, options
        )
        if signature is not None:
            KNOWN[signature] = launches
    target = out
    if launches.widens:
        target = torch.zeros_like(out, dtype=torch.float32)
    # kernels step from request to request, and from head to head, by one element
    if query_start_loc.stride(0) != 1:
        query_start_loc = query_start_loc.contiguous()
    if lengths.stride(0) != 1:
        lengths = lengths.contiguous()
    options_given = NO_OPTIONS
    if options is not PLAIN[True] and options is not PLAIN[False]:
        options_given = _option_values(options)
    call = Call(
        query,
        key,
        value,
        block_table,
        query_start_loc,
        lengths,
        max_query_len,
        max_key_len,
        scale,
        target,
        lse,
        options_given,
        launches,
    )
    has_long = max_query_len * launches.group_size > launches.short_rows
    if launches.has_decode:
        _start_decode(call)
    if has_long and _is_for_sm90(call):
        _start_sm90(call)
    elif has_long or not launches.has_decode:
        _start_prefill(call)
    return out.copy_(target) if launches.widens else out


class Call(NamedTuple):
    """What one call launches kernels on."""

    query: Tensor
    key: Tensor
    value: Tensor
    block_table: Tensor | None
    query_start_loc: Tensor
    lengths: Tensor
    max_query_len: int
    max_key_len: int
    scale: float
    out: Tensor
    lse: Tensor | None
    options_given: tuple[Any, ...]
    launches: Launches


def _start_decode(call: Call) -> None:
    """Launch what attends with short requests, whose keys are cut into spans."""
    launches = call.launches
    num_reqs = call.query_start_loc.shape[0] - 1
    part_rows = min(launches.short_rows, call.max_query_len * launches.group_size)
    decode, keys, most_spans = launches.decode(
        num_reqs, part_rows, call.max_query_len, call.max_key_len
    )
    most_keys = call.max_key_len
    if launches.most_seen is not None:
        # a window's first key lies anywhere in its tile
        most_keys = min(most_keys, launches.most_seen + keys)
    tiles = num_reqs * max(1, -(-most_keys // keys))
    spans = min(most_spans, tiles)
    counters = spans * launches.kv_heads
    # a multiple of 16 bytes, at which their values begin
    parts = -(-2 * counters * part_rows // 4) * 4
    arrivals, room = find_workspace(
        call.query.device, counters, parts * (launches.value_size + 1)
    )
    grid = (launches.kv_heads, spans, 1)
    _start(decode, grid, call, part_rows, room, parts, arrivals)


def _start_prefill(call: Call) -> None:
    """Launch what attends with long requests, whose rows are cut into tiles."""
    launches = call.launches
    num_reqs = call.query_start_loc.shape[0] - 1
    # no request has more tiles than its rows fill, plus one that is not full
    rows = call.query.shape[0] * launches.group_size
    tiles = rows // launches.rows + num_reqs
    alone, spread = launches.prefills
    if launches.span:
        # where tiles do not fill the chip, their parts do
        spans = -(-call.max_key_len // launches.span)
        counters = tiles * launches.kv_heads
        part_rows = min(launches.rows, call.max_query_len * launches.group_size)
        parts = -(-counters * spans * part_rows // 4) * 4
        numbers = parts * (launches.value_size + 1)
        if spans > 1 and counters < launches.processors and numbers <= MOST_ROOM:
            arrivals, room = find_workspace(call.query.device, counters, numbers)
            grid = (tiles, launches.kv_heads, spans)
            _start(spread, grid, call, part_rows, room, parts, arrivals)
            return
    grid = (tiles, launches.kv_heads, 1)
    _start(alone, grid, call, 0, None, 0, None)


def _start(
    launcher: Launcher,
    grid: tuple[int, int, int],
    call: Call,
    part_rows: int,
    room: Tensor | None,
    parts: int,
    arrivals: Tensor | None,
) -> None:
    """Launch the portable kernel, with room for parts of `part_rows` rows if any are joined."""
    query, key, value, block_table, query_start_loc, lengths = call[:6]
    out, lse = call.out, call.lse
    at = 0 if room is None else room.data_ptr()
    pointers = (
        query.data_ptr(),
        key.data_ptr(),
        value.data_ptr(),
        0 if block_table is None else block_table.data_ptr(),
        query_start_loc.data_ptr(),
        lengths.data_ptr(),
        out.data_ptr(),
        0 if lse is None else lse.data_ptr(),
        at + 4 * parts,
        at,
        0 if arrivals is None else arrivals.data_ptr(),
    )
    num_reqs = query_start_loc.shape[0] - 1
    numbers = (
        query.shape[0],
        num_reqs,
        num_reqs.bit_length(),
        part_rows,
        call.scale,
        0 if block_table is None else block_table.stride(0),
        *((0, 0) if lse is None else lse.stride()),
    )
    tensors = (*call[:6], out, lse, room, parts, arrivals)
    launcher(grid, pointers, call.options_given, numbers, tensors)


def _is_for_sm90(call: Call) -> bool:
    """Tell whether the kernel for Hopper attends with the long requests of a call."""
    prompts = call.launches.prompts
    return prompts is not None and _prefill_sm90.takes(
        prompts, *call[:4], call.out, call.lse, call.scale
    )


def _start_sm90(call: Call) -> None:
    """Launch what attends with long requests on a Hopper chip."""
    prompts = call.launches.prompts
    assert prompts is not None  # `_is_for_sm90` has said so
    _prefill_sm90.launch(
        prompts,
        *call[:6],
        call.max_query_len,
        call.launches.short_rows,
        call.scale,
        call.out,
        call.lse,
    )


def sign(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_table: Tensor | None,
    query_start_loc: Tensor,
    lengths: Tensor,
    out: Tensor | None,
    lse: Tensor | None,
    options: AttentionOptions,
) -> Signature | None:
    """Return what makes a call like another one; None: it is like no other.

    Of what it leaves out, the sizes of the batch, `sizes_fit` makes sure.
    """
    if INTERPRETED:
        return None
    own = _sign_options(options)
    if own is None:
        return None
    return (
        query.shape[1:],
        query.stride(),
        query.dtype,
        query.get_device(),
        key.shape,
        key.stride(),
        key.dtype,
        key.get_device(),
        value.shape,
        value.stride(),
        value.dtype,
        value.get_device(),
        None
        if block_table is None
        else (block_table.stride()[1:], block_table.dtype, block_table.get_device()),
        query_start_loc.stride(),
        query_start_loc.dtype,
        query_start_loc.get_device(),
        lengths.stride(),
        lengths.dtype,
        lengths.get_device(),
        None if out is None else (out.stride(), out.dtype, out.get_device()),
        None if lse is None else (lse.dtype, lse.get_device()),
        own,
    )


def sizes_fit(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_table: Tensor | None,
    query_start_loc: Tensor,
    lengths: Tensor,
    max_query_len: int,
    max_key_len: int,
    out: Tensor | None,
    lse: Tensor | None,
) -> bool:
    """Tell whether the sizes of a call whose signature was not refused fit each other."""
    tokens, query_heads, _ = query.shape
    reqs = query_start_loc.shape[0] - 1
    if block_table is None:
        fits = lengths.shape[0] == reqs + 1
    else:
        rows, max_blocks = block_table.shape
        most = max_blocks * value.shape[1]
        fits = rows == reqs == lengths.shape[0] and max_key_len <= most
    return (
        fits
        and max_query_len >= 0
        and max_key_len >= 0
        and (out is None or out.shape == (tokens, query_heads, value.shape[-1]))
        and (lse is None or lse.shape == (query_heads, tokens))
    )


def _sign_options(options: AttentionOptions) -> Signature | None:
    """Return options as something that can be compared; None: some belong to this batch alone."""
    if options is PLAIN[True] or options is PLAIN[False]:
        return (options.causal,)
    of_batch = (options.tree_mask, options.query_ranges)
    if isinstance(options.causal, Tensor) or of_batch != (None, None):
        return None
    return tuple(
        (each.shape, each.stride(), each.dtype, each.get_device())
        if isinstance(each, Tensor)
        else each
        for each in (getattr(options, name) for name in OPTION_NAMES)
    )


def _option_values(options: AttentionOptions) -> tuple[Any, ...]:
    """Return the options that a kernel is given anew at each call, in its order."""
    return (
        None if options.alibi_slopes is None else options.alibi_slopes.contiguous(),
        None if options.sinks is None else options.sinks.contiguous(),
        options.position_bias,
        scale_arguments(options.k_scale)[0],
        scale_arguments(options.v_scale)[0],
        scale_arguments(options.out_scale)[0],
    )


def check_compute_dtype(compute_dtype: torch.dtype) -> None:
    """Refuse arithmetic that these kernels have not.

    Raises:
        NotImplementedError: another dtype than float32; the reference takes it.
    """
    if compute_dtype != torch.float32:
        raise NotImplementedError(
            f"compute_dtype = {compute_dtype}: expected torch.float32, in which the kernels"
            " add up; the reference takes any"
        )


def check_supported(query: Tensor, value: Tensor) -> None:
    """Refuse what these kernels do not compute.

    Raises:
        NotImplementedError: a head larger than a tile that fits the chip, or float64 inputs; the
            reference takes them.
    """
    if query.dtype == torch.float64:
        raise NotImplementedError(
            "query is torch.float64: expected float16, bfloat16 or float32; the reference"
            " takes float64"
        )
    largest = max_head_size(query.dtype, query.device)
    for name, size in (
        ("head_size", query.shape[-1]),
        ("value_head_size", value.shape[-1]),
    ):
        if size > largest:
            raise NotImplementedError(
                f"{name} = {size} is more than this kernel takes in {query.dtype} on"
                f" {query.device} ({largest}); the reference takes any"
            )
