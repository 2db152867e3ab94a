"""Warm-up: compiles the kernels of an engine before its first request arrives.

A kernel is compiled at its first launch, which takes a second or more. Which kernels a call
launches depends on its signature and on the bounds of its batch. `warm_up` launches each of them
once, on a small batch whose lengths are 1 while its bounds are those of the kernel.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import NamedTuple

import torch

from ..attention.cascade import cascade_attention
from ..attention.paged import paged_attention
from ..cache.cache_ops import reshape_and_cache
from . import cascade, dispatch
from .attention_call import AttentionCall, sign
from .compile_ahead import count_threads, launch_compiled
from .cost_layer import Layer
from .launcher import Launcher
from .launches import BRIEF
from .prepare import SPLIT_SIZE
from .warm_up_calls import (
    bound_call,
    make_call,
    query_lens_up_to,
    req_counts,
    tensors_of,
)
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
    make = partial(make_call, spec, index, lse)
    call = make(1)
    plan = _find_plan(call)
    yield from _warm_complete(spec, plan, make)
    if any(
        getattr(each, "takes_all_bounds", False) and each.takes(call)
        for each in plan.complete
    ):
        return  # no call launches another kernel
    started: set[int] = set()
    is_long = spec.max_query_len * plan.group_size > plan.short_rows
    # what takes longest to compile comes first
    if is_long or not plan.has_decode:
        # batch-invariant rows have a kernel for one split, and one for several
        for keys in sorted({min(SPLIT_SIZE, spec.max_seq_len), spec.max_seq_len}):
            bounded = bound_call(make(1), 1, spec.max_query_len, keys)
            chosen = next(each for each in plan.prefills if each.takes(bounded))
            least = plan.short_rows // plan.group_size + 1
            for query_len in chosen.prefill_lens(least, spec.max_query_len):
                bounds = (1, query_len, keys)
                chosen.launch_prefill(bound_call(bounded, *bounds), plan.short_rows)
                yield f"{type(chosen).__name__}.launch_prefill", bounds
    if is_long and plan.layer is not None:
        yield from _warm_appends(spec, plan, plan.layer, make, started)
    if plan.has_decode:
        yield from _warm_decodes(spec, plan, make, started)


def _warm_complete(
    spec: WarmUpSpec, plan: dispatch.LaunchPlan, make: _MakeCall
) -> _Launched:
    """Launch the kernels of the chip that compute every request of a call."""
    lens = query_lens_up_to(spec.max_query_len, 64)
    few_and_many = [(1, each) for each in lens] + [(spec.max_num_reqs, 1)]
    for complete in plan.complete:
        for num_reqs, query_len in few_and_many:
            bounds = (num_reqs, query_len, spec.max_seq_len)
            bounded = bound_call(make(num_reqs), *bounds)
            if complete.takes(bounded):
                complete.launch(bounded)
                yield type(complete).__name__, bounds
    for append in plan.appends:
        for query_len in append.query_lens(spec.max_query_len):
            if query_len * plan.group_size <= plan.short_rows:
                continue  # a decode
            bounds = (1, query_len, spec.max_seq_len)
            bounded = bound_call(make(1), *bounds)
            if append.takes(bounded):
                append.launch(bounded)
                yield type(append).__name__, bounds


def _warm_decodes(
    spec: WarmUpSpec, plan: dispatch.LaunchPlan, make: _MakeCall, started: set[int]
) -> _Launched:
    """Launch every decode kernel that is not in `started`, which is modified in place."""
    launches = plan.portable.launches
    brief = min(BRIEF, spec.max_seq_len)
    counts = req_counts(spec.max_num_reqs, launches.full_reqs)
    batches = list(product(counts, sorted({brief, spec.max_seq_len})))
    # if some batch is one of few decodes, this one is, and they all have its kernels
    short = (1, min(launches.small_batch_tiles.block_n, spec.max_seq_len))
    most_of_kernel = plan.short_rows // plan.group_size
    of_decode = query_lens_up_to(spec.max_query_len, most_of_kernel)
    for (num_reqs, keys), query_len in product(
        [*batches, short],
        # a decode launch serves the short requests of a longer batch too
        sorted({*of_decode, spec.max_query_len}),
    ):
        bounds = (num_reqs, query_len, keys)
        bounded = bound_call(make(num_reqs), *bounds)
        launcher = plan.portable.plan_decode(bounded).launcher
        if _is_new(launcher, started):
            plan.portable.launch_decode(bounded)
            yield launcher.name, bounds


def _warm_appends(
    spec: WarmUpSpec,
    plan: dispatch.LaunchPlan,
    layer: Layer,
    make: _MakeCall,
    started: set[int],
) -> _Launched:
    """Launch every append kernel that is not in `started`, which is modified in place."""
    launches = plan.portable.launches
    for num_reqs in req_counts(spec.max_num_reqs, launches.full_reqs):
        bounds = (num_reqs, spec.max_query_len, spec.max_seq_len)
        for block_m in reversed(layer.row_tiles):
            if _is_new(launches.append(num_reqs, block_m)[0], started):
                bounded = bound_call(make(num_reqs), *bounds)
                plan.portable.launch_append(bounded, block_m)
                yield f"append_kernel, {block_m} rows", bounds


def _is_new(launcher: Launcher, started: set[int]) -> bool:
    """Return whether a launcher is not in `started`, and add it."""
    is_new = id(launcher) not in started
    started.add(id(launcher))
    return is_new


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
    plan = None if signature is None else cascade.PLANS.get(signature)
    plan = plan or cascade.make_plan(call)
    for num_reqs in req_counts(spec.max_num_reqs, plan.rest.full_reqs):
        call = make_call(spec, index, lse, num_reqs, block_size + 1)
        bounds = (num_reqs, spec.max_query_len, spec.max_seq_len)
        for block_m in plan.layer.row_tiles:
            known = len(plan.rest.appends)
            row_tiles = (block_m, block_m)
            cascade.launch_cascade(
                plan, bound_call(call, *bounds), block_size, row_tiles
            )
            if len(plan.rest.appends) > known:
                yield f"cascade_rest_kernel, {block_m} rows", bounds
            if num_reqs == 1 and plan.hopper is None:
                yield f"cascade_prefix_kernel, {block_m} rows", bounds
    if plan.hopper is not None:
        yield plan.hopper.launcher.name, bounds
    # short rests, if a batch may have enough of them
    bounds = (spec.max_num_reqs, spec.max_query_len, block_size + 1)
    call = bound_call(
        make_call(spec, index, lse, spec.max_num_reqs, block_size + 1), *bounds
    )
    known, block_m = len(plan.rest.appends), plan.layer.row_tiles[0]
    cascade.launch_cascade(plan, call, block_size, (block_m, block_m))
    if len(plan.rest.appends) > known:
        yield "cascade_short_rest_kernel", bounds


def _find_plan(call: AttentionCall) -> dispatch.LaunchPlan:
    """Return the launch plan of a call, which is validated and computed on the way."""
    paged_attention(
        *tensors_of(call), call.max_query_len, call.max_key_len,
        out=call.out, lse=call.lse, options=call.options,
    )  # fmt: skip
    signature = sign(call)
    plan = None if signature is None else dispatch.PLANS.get(signature)
    return plan or dispatch.make_plan(call)
