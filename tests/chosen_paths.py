"""Print which kernels each workload of the benchmark is given on a chip that need not be there.

    python tests/chosen_paths.py 90

Nothing is launched: launch plans are made for tensors without contents. One JSON object: workload
-> kernels, such as "decode", "split, 32 rows" or "sm90 prefill".
"""

import os

if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)

import json
import sys
from importlib import import_module
from typing import Any

import torch
from compile_kernels import pretend
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.tools.bench.workloads import Workload, load_workloads


def make_call(workload: Workload) -> Any:
    """Return a workload as an attention call on tensors without contents."""
    dispatch = import_module("pagetwin.optimized.launch.dispatch")
    heads, kv_heads, size = workload.query_heads, workload.kv_heads, workload.head_size
    reqs, longest = len(workload.kv_lens), max(workload.kv_lens)
    blocks = -(-longest // workload.block_size)
    is_ragged = workload.kind == "encoder"
    slots = (sum(workload.kv_lens),)
    if not is_ragged:
        slots = (reqs * blocks, workload.block_size)
    with torch.device("meta"):
        key = torch.empty(*slots, kv_heads, size, dtype=workload.kv_dtype)
        value = torch.empty_like(key)
        if workload.value_size != size:
            value = key[..., : workload.value_size]
        query = torch.empty(workload.tokens, heads, size, dtype=workload.dtype)
        per_head = torch.empty(heads)
        options = AttentionOptions(
            causal=workload.causal,
            sliding_window=workload.sliding_window,
            logits_soft_cap=workload.logits_soft_cap,
            alibi_slopes=per_head if workload.alibi else None,
            sinks=per_head if workload.sinks else None,
            k_scale=1.0 if workload.is_quantised else None,
            v_scale=1.0 if workload.is_quantised else None,
            batch_invariant=workload.batch_invariant,
        )
        return dispatch.AttentionCall(
            query,
            key,
            value,
            None if is_ragged else torch.empty(reqs, blocks, dtype=torch.int32),
            torch.empty(reqs + 1, dtype=torch.int32),
            torch.empty(reqs + is_ragged, dtype=torch.int32),
            max(workload.query_lens),
            longest,
            workload.scale,
            torch.empty(workload.tokens, heads, value.shape[-1], dtype=workload.dtype),
            None,
            options,
        )


def find_kernels(workload: Workload) -> str:
    """Return which kernels compute a workload."""
    launch = "pagetwin.optimized.launch"
    dispatch, cost_model = (
        import_module(f"{launch}.{each}") for each in ("dispatch", "cost_model")
    )
    call = make_call(workload)
    if workload.shared_prefix:
        cascade = import_module(f"{launch}.cascade")
        plan = cascade.make_plan(call)
        rows = cascade.choose_row_tiles(plan, call, workload.shared_prefix)
        has_hopper = plan.hopper is not None and plan.hopper.takes(call)
        first = "sm90 prefix" if has_hopper else f"prefix, {rows[0]} rows"
        rest_len = call.max_key_len - workload.shared_prefix
        rest = import_module(f"{launch}.cascade_grids").choose_rest(
            plan.rest, call, rows[1], rest_len, is_dependent=False
        )
        kind = "short rest" if "short" in rest.launcher.name else "rest"
        return f"{first}; {kind}, {rows[1]} rows"
    plan = dispatch.make_plan(call)
    for each in plan.complete:
        if each.takes(call):
            return " ".join(type(each).__module__.split(".")[-3:-1])
    if plan.layer is not None:
        bounds = (call.max_query_len, call.max_key_len)
        choice = cost_model.choose_path(
            plan.layer, len(workload.kv_lens), workload.tokens, *bounds
        )
        if choice.path == "append":
            return "sm90 append"
        if choice.path == "split":
            return f"split, {choice.block_m} rows"
        if choice.path == "decode":
            launches = plan.portable.launches
            if launches.is_short(len(workload.kv_lens), call.max_key_len):
                return "few decodes"
            return "sm90 FP8 decode" if launches.has_fp8_decode else "decode"
    prefill = next(each for each in plan.prefills if each.takes(call))
    return f"{'portable' if prefill is plan.portable else 'sm90'} prefill"


def main(chip: int) -> None:
    """Print the kernels of every workload that is not a cache write."""
    pretend(chip, [])
    folders = ("append", "latent", "invariant", "fp8_decode", "fp8_prefill", "cascade")
    for folder in ("sm90", *(f"sm90.{each}" for each in folders)):
        family = import_module(f"pagetwin.optimized.kernels.{folder}.family")
        family.is_hopper = lambda device: chip == 90
    workloads = load_workloads("all").values()
    found = {
        each.name: find_kernels(each) for each in workloads if each.kind != "write"
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]))
