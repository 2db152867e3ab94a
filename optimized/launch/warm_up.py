"""Warm-up: compiles the kernels of an engine before its first request arrives.

A kernel is compiled at its first launch, which takes a second or more. Which kernels a call
launches depends on its signature and on the bounds of its batch. `warm_up` launches each of them
once, on a small batch whose lengths are 1 while its bounds are those of the kernel.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...contract.attention_options import AttentionOptions
from ..attention.cascade import cascade_attention
from ..attention.paged import paged_attention
from ..cache.cache_ops import reshape_and_cache
from . import cascade, dispatch
from .attention_call import AttentionCall, sign
from .launches import BRIEF, REQS_PER_PASS
from .prepare import SPLIT_SIZE
from .tuning import max_short_keys
from .warm_up_spec import WarmUpSpec, check_spec


class WarmedKernel(NamedTuple):
    """One kernel that was compiled, with the batch that launched it.

    Args:
        kernel: name of the kernel, with the rows of its query tile if there are several; or the
            plan that launched a kernel of the chip.
        num_reqs, max_query_len, max_seq_len: bounds of the batch.
        options: index in the spec's options.
        lse: whether the call had an `lse`.
    """

    kernel: str
    num_reqs: int
    max_query_len: int
    max_seq_len: int
    options: int
    lse: bool


def warm_up(spec: WarmUpSpec) -> tuple[WarmedKernel, ...]:
    """Compile every kernel that calls within a spec launch, and return what was compiled.

    Later calls of `paged_attention`, `reshape_and_cache` and, if the spec has them,
    `cascade_attention` compile nothing if they are within the spec: the same cache, heads, dtypes
    and options, bounds up to those of the spec, packed queries and outputs, and addresses that
    are multiples of 16.

    Args:
        spec: the calls that will be made.

    Raises:
        ValueError: a number of the spec is not positive, or the heads do not fit each other. Also
            what `paged_attention` raises for such calls.
        RuntimeError: a CUDA graph is being captured.

    Example:
        >>> import torch
        >>> from pagetwin.optimized import WarmUpSpec, warm_up
        >>> if torch.cuda.is_available():
        ...     key_cache, value_cache = torch.zeros(
        ...         2, 100, 16, 8, 128, dtype=torch.bfloat16, device="cuda"
        ...     )
        ...     spec = WarmUpSpec(
        ...         key_cache=key_cache,
        ...         value_cache=value_cache,
        ...         num_query_heads=32,
        ...         max_num_reqs=64,
        ...         max_query_len=512,
        ...         max_seq_len=1600,
        ...     )
        ...     kernels = {each.kernel for each in warm_up(spec)}
    """
    check_spec(spec)
    found = list(_warm_cache_write(spec))
    for index, lse in product(range(len(spec.options)), sorted(set(spec.lse))):
        launches = [_warm_attention(spec, index, lse)]
        if spec.cascades:
            launches.append(_warm_cascade(spec, index, lse))
        for launched in launches:
            found += [
                WarmedKernel(kernel, *bounds, index, lse) for kernel, bounds in launched
            ]
    return tuple(found)


_Launched = Iterator[tuple[str, tuple[int, int, int]]]
"""Names of kernels, and the bounds of the batch that launched each: requests, new tokens, keys."""


def _warm_cache_write(spec: WarmUpSpec) -> Iterator[WarmedKernel]:
    """Launch the cache write without a token that is stored."""
    of_token = (1, spec.key_cache.shape[2])
    device, options = spec.key_cache.device, spec.options[0]
    key = torch.zeros(
        *of_token, spec.key_cache.shape[3], dtype=spec.dtype, device=device
    )
    value = torch.zeros(
        *of_token, spec.value_cache.shape[3], dtype=spec.dtype, device=device
    )
    slots = torch.full((1,), -1, dtype=torch.int64, device=device)
    caches = (spec.key_cache, spec.value_cache)
    reshape_and_cache(key, value, *caches, slots, options.k_scale, options.v_scale)
    yield WarmedKernel("reshape_and_cache", 1, 1, 1, 0, False)


def _warm_attention(spec: WarmUpSpec, index: int, lse: bool) -> _Launched:
    """Launch every kernel of paged attention with one kind of options."""
    call = _make_call(spec, index, lse, 1)
    plan = _find_plan(call)
    for complete in plan.complete:
        for query_len in _query_lens(spec.max_query_len, 64):
            bounds = (1, query_len, spec.max_seq_len)
            bounded = _bound(call, *bounds)
            if complete.takes(bounded):
                complete.launch(bounded)
                yield type(complete).__name__, bounds
    launches, group_size = plan.portable.launches, plan.group_size
    if spec.max_query_len * group_size > plan.short_rows:
        for append in plan.appends:
            bounds = (1, spec.max_query_len, spec.max_seq_len)
            bounded = _bound(call, *bounds)
            if append.takes(bounded):
                append.launch(bounded)
                yield type(append).__name__, bounds
    req_counts = _req_counts(spec.max_num_reqs, launches.full_reqs)
    is_long = spec.max_query_len * group_size > plan.short_rows
    started: set[int] = set()

    def is_new(launcher: Any) -> bool:
        known = id(launcher) in started
        started.add(id(launcher))
        return not known

    brief = min(BRIEF, spec.max_seq_len)
    batches = list(product(req_counts, sorted({brief, spec.max_seq_len})))
    # all batches of short decodes have the kernels of this one
    one = max_short_keys(
        1, launches.kv_heads, launches.short_tiles.block_n, launches.processors
    )
    short = [(1, min(one, spec.max_seq_len))] if one else []
    of_decode = _query_lens(spec.max_query_len, plan.short_rows // group_size)
    for (num_reqs, keys), query_len in product(
        [*batches, *short],
        # a decode launch serves the short requests of a longer batch too
        sorted({*of_decode, spec.max_query_len}) if plan.has_decode else (),
    ):
        bounds = (num_reqs, query_len, keys)
        bounded = _bound(_make_call(spec, index, lse, num_reqs), *bounds)
        launcher = plan.portable.plan_decode(bounded).launcher
        if is_new(launcher):
            plan.portable.launch_decode(bounded)
            yield launcher.name, bounds
    for num_reqs in req_counts:
        call = _make_call(spec, index, lse, num_reqs)
        if is_long and plan.layer is not None:
            bounds = (num_reqs, spec.max_query_len, spec.max_seq_len)
            for block_m in plan.layer.row_tiles:
                if is_new(launches.append(num_reqs, block_m)[0]):
                    plan.portable.launch_append(_bound(call, *bounds), block_m)
                    yield f"append_kernel, {block_m} rows", bounds
    if is_long or not plan.has_decode:
        # batch-invariant rows have a kernel for one split, and one for several
        for keys in sorted({min(SPLIT_SIZE, spec.max_seq_len), spec.max_seq_len}):
            bounds = (1, spec.max_query_len, keys)
            bounded = _bound(_make_call(spec, index, lse, 1), *bounds)
            chosen = next(each for each in plan.prefills if each.takes(bounded))
            chosen.launch_prefill(bounded, plan.short_rows)
            yield f"{type(chosen).__name__}.launch_prefill", bounds


def _warm_cascade(spec: WarmUpSpec, index: int, lse: bool) -> _Launched:
    """Launch both kernels of a cascade with every tile."""
    block_size = spec.key_cache.shape[1]
    if spec.max_seq_len <= block_size:
        return  # no sequence has a prefix of whole blocks
    call = _make_call(spec, index, lse, 1, block_size + 1)
    cascade_attention(
        *_tensors(call), call.max_query_len, call.max_key_len, block_size,
        out=call.out, lse=call.lse, options=call.options,
    )  # fmt: skip
    signature = sign(call)
    plan = None if signature is None else cascade.PLANS.get(signature)
    plan = plan or cascade.make_plan(call)
    for num_reqs in _req_counts(spec.max_num_reqs, plan.rest.full_reqs):
        call = _make_call(spec, index, lse, num_reqs, block_size + 1)
        bounds = (num_reqs, spec.max_query_len, spec.max_seq_len)
        for block_m in plan.layer.row_tiles:
            known = len(plan.rest.appends)
            row_tiles = (block_m, block_m)
            cascade.launch_cascade(plan, _bound(call, *bounds), block_size, row_tiles)
            if len(plan.rest.appends) > known:
                yield f"cascade_rest_kernel, {block_m} rows", bounds
            if num_reqs == 1 and plan.hopper is None:
                yield f"cascade_prefix_kernel, {block_m} rows", bounds
    if plan.hopper is not None:
        yield plan.hopper.launcher.name, bounds
    # short rests, if a batch may have enough of them
    bounds = (spec.max_num_reqs, spec.max_query_len, block_size + 1)
    call = _bound(
        _make_call(spec, index, lse, spec.max_num_reqs, block_size + 1), *bounds
    )
    known, block_m = len(plan.rest.appends), plan.layer.row_tiles[0]
    cascade.launch_cascade(plan, call, block_size, (block_m, block_m))
    if len(plan.rest.appends) > known:
        yield "cascade_short_rest_kernel", bounds


def _make_call(
    spec: WarmUpSpec, index: int, lse: bool, num_reqs: int, seq_len: int = 1
) -> AttentionCall:
    """Return a call of requests of one token each, whose bounds are those of the spec.

    Args:
        seq_len: keys of each request.
    """
    key, value = spec.key_cache, spec.value_cache
    device, block_size = key.device, key.shape[1]
    options = dispatch.choose_options(
        _fit_options(spec.options[index], num_reqs), causal=True
    )
    starts = torch.arange(num_reqs + 1, dtype=torch.int32, device=device)
    blocks = -(-spec.max_seq_len // block_size)
    query, out, lses = (spec.make_rows or _pack_rows(spec))(num_reqs)
    return AttentionCall(
        query=query,
        key=key,
        value=value,
        block_table=torch.zeros(num_reqs, blocks, dtype=torch.int32, device=device),
        query_start_loc=starts,
        lengths=torch.full((num_reqs,), seq_len, dtype=torch.int32, device=device),
        max_query_len=spec.max_query_len,
        max_key_len=spec.max_seq_len,
        scale=key.shape[3] ** -0.5,
        out=out,
        lse=lses if lse else None,
        options=options,
    )


def _pack_rows(spec: WarmUpSpec) -> Callable[[int], tuple[Tensor, Tensor, Tensor]]:
    """Return what makes packed queries, outputs and log-sum-exps of a number of tokens."""
    key, value, heads = spec.key_cache, spec.value_cache, spec.num_query_heads

    def make(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        query = torch.zeros(
            tokens, heads, key.shape[3], dtype=spec.dtype, device=key.device
        )
        out = torch.zeros(
            tokens, heads, value.shape[3], dtype=spec.dtype, device=key.device
        )
        lse = torch.zeros(heads, tokens, device=key.device)
        return query, out.to(spec.out_dtype or spec.dtype), lse

    return make


def _fit_options(options: AttentionOptions, num_reqs: int) -> AttentionOptions:
    """Return the options with an entry per request and token of a batch of one token each."""
    changes: dict[str, Any] = {}
    if isinstance(options.causal, Tensor):
        changes["causal"] = options.causal.new_ones(num_reqs)
    if options.tree_mask is not None:
        _, *tree = options.tree_mask.shape
        changes["tree_mask"] = options.tree_mask.new_ones(num_reqs, *tree)
    if options.query_ranges is not None:
        changes["query_ranges"] = options.query_ranges.new_full((num_reqs, 2), -1)
    return replace(options, **changes) if changes else options


def _bound(
    call: AttentionCall, num_reqs: int, max_query_len: int, max_key_len: int
) -> AttentionCall:
    """Return the call with other bounds. Its requests are as many as it has already."""
    assert call.lengths.shape[0] == num_reqs
    return call._replace(max_query_len=max_query_len, max_key_len=max_key_len)


def _tensors(
    call: AttentionCall,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the tensors of a call, in the order of `paged_attention`."""
    assert call.block_table is not None
    return (
        call.query, call.key, call.value, call.block_table, call.query_start_loc,
        call.lengths,
    )  # fmt: skip


def _find_plan(call: AttentionCall) -> dispatch.LaunchPlan:
    """Return the launch plan of a call, which is validated and computed on the way."""
    paged_attention(
        *_tensors(call), call.max_query_len, call.max_key_len,
        out=call.out, lse=call.lse, options=call.options,
    )  # fmt: skip
    signature = sign(call)
    plan = None if signature is None else dispatch.PLANS.get(signature)
    return plan or dispatch.make_plan(call)


def _query_lens(most: int, most_of_kernel: int) -> list[int]:
    """Return the lengths from 1 on that a kernel takes."""
    return list(range(1, min(most, most_of_kernel) + 1))


def _req_counts(most: int, full_reqs: int) -> list[int]:
    """Return numbers of requests on both sides of every limit between kernels."""
    limits = {1, full_reqs - 1, full_reqs, most}
    limits |= {each for limit in REQS_PER_PASS for each in (limit, limit + 1)}
    return sorted(each for each in limits if 1 <= each <= most)
