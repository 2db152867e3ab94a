"""Warm-up of a parallel step: the kernels of one rank, without an exchange.

The step attends with the query heads of all ranks and writes into its exchange buffer. There the
stride between heads depends on the number of rows, and kernels are compiled for strides that are
multiples of 16 elements and for those that are not. Odd and even numbers of rows differ in this.
"""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ...contract.cache_formats import head_size_of
from ..runtime.compile_ahead import count_threads, launch_compiled
from ..warm_up.warm_up import WarmedKernel, launch_within
from ..warm_up.warm_up_spec import WarmUpSpec, check_spec
from .combine import ROW_PADDING, combine_received
from .decode import DecodeContextParallel
from .kernels.combine_ranks import Partners
from .rank_batch import make_rank_batch


def warm_up_ranks(
    step: DecodeContextParallel, spec: WarmUpSpec
) -> tuple[WarmedKernel, ...]:
    """Compile every kernel that a `DecodeContextParallel` launches within a spec.

    The ranks need not call it together, since nothing is exchanged. Later calls of `attend`
    compile nothing if the step has no fixed splits, exchanges by "all_to_all" and is within the
    spec.

    Args:
        step: The step of this rank.
        spec: `num_query_heads` are those of this rank. `max_num_reqs` also bounds the new tokens of
            causal steps, each of which is a request. The options are those of `attend`. Calls
            without `lse` have a packed `out` in the dtype of the queries. Those with `lse` have a
            packed `out` in `out_dtype`, no sinks, and an `lse` [heads, tokens] that is cut from
            [heads, max_num_tokens].

    Raises:
        ValueError, RuntimeError: As `warm_up`.
    """
    most = step.max_num_tokens
    of_ranks = [
        replace(
            spec,
            num_query_heads=step.of_rank[0] * step.num_query_heads,
            max_num_reqs=min(spec.max_num_reqs, most),
            options=tuple(
                replace(options, causal=False, sinks=None) for options in spec.options
            ),
            lse=(True,),
            make_rows=partial(_rows_of, step, pitch, head_size_of(spec.value_cache)),
        )
        for pitch in sorted({most, max(1, most - 1)})
    ]
    for rank_spec in of_ranks:
        check_spec(rank_spec)
    return launch_compiled(
        partial(_launch_within, step, spec, of_ranks),
        spec.num_threads or count_threads(),
        spec.key_cache.device,
    )


def _launch_within(
    step: DecodeContextParallel, spec: WarmUpSpec, of_ranks: list[WarmUpSpec]
) -> tuple[WarmedKernel, ...]:
    """Launch every kernel of the step.

    Args:
        step, spec: as in `warm_up_ranks`.
        of_ranks: specs of the calls over the keys of this rank.
    """
    most = step.max_num_tokens
    found = [kernel for rank_spec in of_ranks for kernel in launch_within(rank_spec)]
    for tokens in sorted({1, min(2, most)}):
        for index, options in enumerate(spec.options):
            for lse in sorted(set(spec.lse)):
                _combine_padding(step, spec, tokens, options.sinks, lse)
                found.append(
                    WarmedKernel("combine_ranks_kernel", tokens, 1, 1, index, lse)
                )
    return tuple(found)


def _rows_of(
    step: DecodeContextParallel, pitch: int, value_size: int, tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, results and log-sum-exps of all ranks, in the buffers of a step.

    Args:
        pitch: rows of the step. If there are fewer than tokens, heads overlap.
        value_size: elements of a value.
        tokens: rows that are returned, at most `max_num_tokens`.

    Returns:
        [tokens, ranks * heads, head_size], [tokens, ranks * heads, value_head_size] and
        [ranks * heads, tokens].
    """
    every = step.of_rank[0] * step.num_query_heads
    size = len(step._queries) // (every * step.max_num_tokens)
    width = value_size + ROW_PADDING
    query = step._queries.as_strided((tokens, every, size), (size, pitch * size, 1))
    rows = (width, pitch * width)
    out = step._sent.as_strided((tokens, every, value_size), (*rows, 1))
    lse = step._sent.as_strided((every, tokens), rows[::-1], value_size)
    return query, out, lse


def _combine_padding(
    step: DecodeContextParallel,
    spec: WarmUpSpec,
    tokens: int,
    sinks: Tensor | None,
    lse: bool,
) -> None:
    """Combine the received rows of a step of padding."""
    heads, size = step.num_query_heads, head_size_of(spec.value_cache)
    nothing = torch.zeros(0, dtype=torch.int32, device=step.device)
    batch = make_rank_batch(
        spec.key_cache, nothing.view(0, 0), step._requests[:1], nothing, tokens, 0, True, 1,
        step._splits, step._requests,
    )  # fmt: skip
    shape = (step.of_rank[0], heads, 1, tokens, size + ROW_PADDING)
    received = step._received[: torch.Size(shape).numel()].view(shape)
    dtype = (spec.out_dtype or spec.query_dtype) if lse else spec.query_dtype
    out = torch.empty(tokens, heads, size, dtype=dtype, device=step.device)
    lses = torch.empty(heads, step.max_num_tokens, device=step.device)[:, :tokens]
    partners = None
    if step._partners is not None:
        partners, _memory = _without_others(step._partners, received.numel())
    combine_received(
        received, step._splits.order, batch, None if lse else sinks, out,
        lses if lse else None, partners,
    )  # fmt: skip


def _without_others(partners: Partners, elements: int) -> tuple[Partners, Tensor]:
    """Return partners of one launch that exchanges nothing and ends at once, and their memory.

    The call is an even one, so it uses the first half, of so many words.
    """
    memory = torch.zeros(elements, dtype=torch.int64, device=partners.calls.device)
    alone = partners._replace(
        buffers=torch.full_like(partners.buffers, memory.data_ptr()),
        calls=torch.ones_like(partners.calls),
        arrived=torch.zeros_like(partners.arrived),
        late=torch.zeros_like(partners.late),
        tries=0,
    )
    return alone, memory
