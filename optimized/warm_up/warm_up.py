"""Warm-up: compiles the kernels of an engine before its first request arrives.

A kernel is compiled at its first launch, which takes a second or more. Which kernels a call
launches depends on its signature and on the bounds of its batch. `warm_up` launches each of them
once, on a small batch whose lengths are 1 while its bounds are those of the kernel.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch

from ...contract.cache_formats import head_size_of
from ...validation.memory import share_memory
from ..attention.cascade import cascade_attention
from ..attention.paged import paged_attention
from ..cache.cache_ops import reshape_and_cache
from ..dispatch import cascade, dispatch
from ..dispatch.choice import AttentionPlan, first_taking, make_attention_plan
from ..kernels.portable.host.plans import req_counts
from ..runtime.attention_call import AttentionCall, sign
from ..runtime.compile_ahead import count_threads, launch_compiled
from ..runtime.family import BatchLimits
from .warm_up_calls import bound_call, make_call, tensors_of
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
        ...     kernels = {warmed.kernel for warmed in warm_up(spec)}
    """
    check_spec(spec)
    return launch_compiled(
        partial(launch_within, spec),
        spec.num_threads or count_threads(),
        spec.key_cache.device,
    )


def launch_within(spec: WarmUpSpec) -> tuple[WarmedKernel, ...]:
    """Launch every kernel that calls within a spec launch, and return which these are."""
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
_MakeCall = Callable[[int], AttentionCall]
"""Returns a call of so many requests."""


def _warm_cache_write(spec: WarmUpSpec) -> Iterator[WarmedKernel]:
    """Launch the cache write without a token that is stored.

    Values that are part of the keys, as those of latents are, have another write.
    """
    if share_memory(spec.key_cache, spec.value_cache):
        return
    of_token = (1, spec.key_cache.shape[2])
    device, options = spec.key_cache.device, spec.options[0]
    key = torch.zeros(
        *of_token, head_size_of(spec.key_cache), dtype=spec.query_dtype, device=device
    )
    value = torch.zeros(
        *of_token, head_size_of(spec.value_cache), dtype=spec.query_dtype, device=device
    )
    slots = torch.full((1,), -1, dtype=torch.int64, device=device)
    caches = (spec.key_cache, spec.value_cache)
    reshape_and_cache(
        key, value, *caches, slots, options.k_scale, options.v_scale, spec.kv_cache_dtype,
        options.k_global_scale, options.v_global_scale,
    )  # fmt: skip
    yield WarmedKernel("reshape_and_cache", 1, 1, 1, 0, False)


def _warm_attention(spec: WarmUpSpec, index: int, lse: bool) -> _Launched:
    """Launch every kernel of paged attention with one kind of options."""
    make = partial(make_call, spec, index, lse)
    plan = _find_plan(make(1))
    limits = _limits(spec, plan.short_rows)
    yield from _warm_role(plan.preferred, make, limits)
    taking = first_taking(plan.preferred, make(1))
    if getattr(taking, "takes_all_bounds", False):
        return  # no call launches another kernel
    # what takes longest to compile comes first
    for plans in (plan.every[:-1], plan.prefills, plan.every[-1:], plan.decodes):
        yield from _warm_role(plans, make, limits)


def _warm_role(
    plans: tuple[Any, ...], make: _MakeCall, limits: BatchLimits
) -> _Launched:
    """Launch every kernel of plans with the same role, in the order of preference."""
    started = set()
    for place, plan in enumerate(plans):
        for warm in plan.bounds(limits):
            call = bound_call(make(warm.num_reqs), *warm[1:4])
            is_other = first_taking(plans[:place], call) is not None
            if is_other or warm.kernel in started or not plan.takes(call):
                continue
            if warm.kernel is not None:
                started.add(warm.kernel)
            plan.launch(call, warm.task)
            yield warm.name, warm[1:4]


def _limits(spec: WarmUpSpec, short_rows: int) -> BatchLimits:
    return BatchLimits(
        spec.max_num_reqs, spec.max_query_len, spec.max_seq_len, short_rows
    )


def _warm_cascade(spec: WarmUpSpec, index: int, lse: bool) -> _Launched:
    """Launch both kernels of a cascade with every tile."""
    block_size = spec.key_cache.shape[1]
    if spec.max_seq_len <= block_size:
        return  # no sequence has a prefix of whole blocks
    call = make_call(spec, index, lse, 1, block_size + 1)
    cascade_attention(
        *tensors_of(call), call.max_query_len, call.max_key_len, block_size,
        out=call.out, lse=call.lse, options=call.options,
    )  # fmt: skip
    signature = sign(call)
    plan = None if signature is None else cascade.PIPELINE.plans.get(signature)
    plan = plan or cascade.make_cascade_plan(call)
    for num_reqs in req_counts(spec.max_num_reqs, plan.rest.full_reqs):
        call = make_call(spec, index, lse, num_reqs, block_size + 1)
        bounds = (num_reqs, spec.max_query_len, spec.max_seq_len)
        for block_m in plan.row_tiles:
            known = len(plan.rest.appends)
            row_tiles = (block_m, block_m)
            cascade.launch_cascade(
                plan, bound_call(call, *bounds), block_size, row_tiles
            )
            if len(plan.rest.appends) > known:
                yield f"cascade_rest_kernel, {block_m} rows", bounds
    # every launch above was one over the prefix too
    prefix = first_taking(plan.prefixes, cascade.over_prefix(call))
    for warm in prefix.bounds(_limits(spec, 0)):
        yield warm.name, warm[1:4]
    # short rests, if a batch may have enough of them
    bounds = (spec.max_num_reqs, spec.max_query_len, block_size + 1)
    call = bound_call(
        make_call(spec, index, lse, spec.max_num_reqs, block_size + 1), *bounds
    )
    known, block_m = len(plan.rest.appends), plan.row_tiles[0]
    cascade.launch_cascade(plan, call, block_size, (block_m, block_m))
    if len(plan.rest.appends) > known:
        yield "cascade_short_rest_kernel", bounds


def _find_plan(call: AttentionCall) -> AttentionPlan:
    """Return the launch plan of a call, which is validated and computed on the way."""
    paged_attention(
        *tensors_of(call), call.max_query_len, call.max_key_len,
        out=call.out, lse=call.lse, options=call.options,
    )  # fmt: skip
    signature = sign(call)
    plan = None if signature is None else dispatch.PIPELINE.plans.get(signature)
    return plan or make_attention_plan(call)
