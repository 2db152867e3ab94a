"""Print which kernels each workload of the benchmark is given on a chip that need not be there.

    PYTHONPATH=tests python tests/kernels/chosen_paths.py 90

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
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.tools.bench.workloads import Workload, load_workloads
from support.compile_kernels import pretend


def make_call(workload: Workload) -> Any:
    """Return a workload as an attention call on tensors without contents."""
    attention_call = import_module("pagetwin.optimized.runtime.attention_call")
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
        return attention_call.AttentionCall(
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
    optimized = "pagetwin.optimized"
    call = make_call(workload)
    choice = import_module(f"{optimized}.dispatch.choice")
    if workload.shared_prefix:
        cascade = import_module(f"{optimized}.dispatch.cascade")
        plan = cascade.make_cascade_plan(call)
        prefix = choice.first_taking(plan.prefixes, cascade.over_prefix(call))
        rest_len = call.max_key_len - workload.shared_prefix
        rows = cascade.choose_rest_tile(plan, call, rest_len)
        grids = import_module(f"{optimized}.kernels.portable.host.cascade")
        rest = grids.choose_rest(plan.rest, call, rows, rest_len, is_dependent=False)
        kind = "short rest" if "short" in rest.launcher.name else "rest"
        return f"{prefix.family}; {kind}, {rows} rows"
    plan = choice.make_attention_plan(call)
    launched: list[str] = []
    for made in (*plan.preferred, *plan.every, *plan.decodes, *plan.prefills):
        made.launch = lambda call, task, made=made: launched.append(
            describe(made, call, task)
        )
    choice.launch_attention(plan, call)
    return launched[-1]


def describe(plan: Any, call: Any, task: Any) -> str:
    """Return what a launch is called here."""
    if plan.family == "portable append":
        return f"split, {task.division} rows"
    if plan.family == "portable decode":
        bounds = (len(call.lengths), call.max_query_len, call.max_key_len)
        is_few = "short" in plan.choose(*bounds).launcher.name
        return "few decodes" if is_few else "decode"
    family: str = plan.family
    return family


def name_plans() -> None:
    """Give each plan the name of its family."""
    families = import_module("pagetwin.optimized.dispatch.families")

    def named(family: Any) -> Any:
        def plan(call: Any) -> Any:
            made = family.plan(call)
            made.family = family.name
            return made

        return family._replace(plan=plan)

    families.FAMILIES = tuple(map(named, families.FAMILIES))


def main(chip: int) -> None:
    """Print the kernels of every workload that is not a cache write."""
    pretend(chip, [])
    folders = (
        "append",
        "latent",
        "invariant",
        "code_decode",
        "code_prefill",
        "cascade",
    )
    for folder in ("prefill", *folders):
        family = import_module(f"pagetwin.optimized.kernels.sm90.{folder}.family")
        family.is_hopper = lambda device: chip == 90
    name_plans()
    workloads = load_workloads("all").values()
    found = {
        workload.name: find_kernels(workload)
        for workload in workloads
        if workload.kind != "write"
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]))
