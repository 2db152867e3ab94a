"""Compilation of the Hopper prefill kernel on any machine, with the assembler's report.

    PYTHONPATH=tests python tests/support/compile_prefill_sm90.py [NUMBER ...]

Launches are recorded instead of made, so the compiled kernel is the one that would be launched. The
output is one JSON object per line: the case, registers, bytes spilled, the assembler's warnings,
shared memory, the widths of accesses to global memory, and the number of instructions of some kinds
per main loop. Numbers select cases.
Without numbers all cases are compiled.
"""

import os

if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)

import io
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.optimized.kernels.sm90.append import family as append
from pagetwin.optimized.kernels.sm90.append.kernel import append_kernel
from pagetwin.optimized.kernels.sm90.cascade import family as cascade
from pagetwin.optimized.kernels.sm90.cascade.kernel import cascade_prefix_sm90_kernel
from pagetwin.optimized.kernels.sm90.invariant import family as invariant
from pagetwin.optimized.kernels.sm90.invariant.kernel import (
    fold_kernel,
    invariant_kernel,
)
from pagetwin.optimized.kernels.sm90.prefill import family
from pagetwin.optimized.kernels.sm90.prefill import plan as prefill_plan
from pagetwin.optimized.kernels.sm90.prefill.kernel import prefill_kernel
from pagetwin.optimized.kernels.sm90.prefill.plan import NARROW, WIDE
from pagetwin.optimized.runtime.attention_call import AttentionCall
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

NAMES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
}
BF16, FP16 = torch.bfloat16, torch.float16


class Case(NamedTuple):
    """A call signature.

    Args:
        dtype, head_size: of queries and keys, and of values unless `value_size` is given.
        block_size: tokens per block; 0 without a block table.
        causal, options: options of the call. For `sinks` any value stands for a tensor.
        has_lse: whether the log-sum-exp is computed.
        value_size: Optional. Head size of values. If None, that of keys.
        out_dtype: Optional. Dtype of the output. If None, that of queries.
        group: query heads per KV head, of 8 query heads, or of 2 * group if it does not divide 8,
            or of one group of more than 64.
        is_append: whether the call is an append with split keys.
        is_prefix: whether the call is over the prefix of a cascade.
        max_query_len: bound of the longest request.
        has_factors: whether each key has a factor.
        fits_queries: whether keys are float16, and queries are fitted to it.
        is_narrow: whether query tiles have one warpgroup.
    """

    dtype: torch.dtype
    head_size: int
    block_size: int
    causal: bool
    has_lse: bool
    options: Mapping[str, Any] = MappingProxyType({})
    value_size: int | None = None
    out_dtype: torch.dtype | None = None
    group: int = 4
    is_append: bool = False
    is_prefix: bool = False
    max_query_len: int = 156
    has_factors: bool = False
    fits_queries: bool = False
    is_narrow: bool = False

    def __str__(self) -> str:
        words = [
            f"{NAMES[self.dtype]} {self.head_size}"
            + (f"/{self.value_size}" if self.value_size else ""),
            f"blocks of {self.block_size}",
        ]
        words += ["causal"] * self.causal + ["log-sum-exp"] * self.has_lse
        words += [f"{name} {value}" for name, value in self.options.items()]
        words += [f"{NAMES[self.out_dtype]} output"] if self.out_dtype else []
        words += [f"groups of {self.group}"] if self.group != 4 else []
        words += ["append"] * self.is_append
        words += ["prefix"] if self.is_prefix else []
        words += ["few rows"] if self.max_query_len < 156 else []
        words += ["factors"] if self.has_factors else []
        words += ["fitted queries"] if self.fits_queries else []
        words += ["one warpgroup"] if self.is_narrow else []
        return ", ".join(words)


CASES = [
    Case(BF16, 128, 16, True, True),
    Case(BF16, 64, 16, True, False),
    Case(FP16, 128, 0, False, False, group=1),
    Case(FP16, 64, 48, False, True, group=1),
    Case(BF16, 256, 16, True, False, {"logits_soft_cap": 30.0, "sliding_window": 1024}),
    Case(BF16, 96, 16, True, False, group=1),
    Case(BF16, 64, 16, True, False, {"sliding_window": 256, "sinks": True}),
    Case(BF16, 192, 16, True, False, value_size=128),
    Case(BF16, 128, 16, True, True, {"batch_invariant": True}),
    Case(BF16, 128, 16, True, False, is_append=True),
    Case(BF16, 128, 16, True, False, is_append=True, max_query_len=16),
    Case(BF16, 128, 16, False, False, is_prefix=True),
    # 12 tokens of 5 heads, in 60 of 64 rows
    Case(BF16, 128, 16, True, True, group=5),
    Case(BF16, 128, 128, True, False, has_factors=True),
    # 128 and 32 columns of products and accumulators
    Case(BF16, 160, 16, True, False),
    # the cases above are compiled in every test run
    Case(BF16, 128, 16, True, False),
    Case(BF16, 128, 0, False, True),
    Case(BF16, 128, 256, False, False),
    Case(BF16, 64, 0, False, False),
    Case(BF16, 64, 0, True, True),
    Case(FP16, 128, 16, True, True),
    Case(FP16, 128, 32, True, False),
    Case(FP16, 64, 16, True, False),
    Case(FP16, 64, 0, False, True),
    Case(BF16, 256, 16, True, False),
    Case(FP16, 256, 0, False, True, {"sinks": True}),
    Case(BF16, 128, 16, True, False, {"sliding_window": 1024}),
    Case(BF16, 128, 16, True, False, {"attention_chunk_size": 300}),
    Case(BF16, 128, 16, True, False, {"logits_soft_cap": 30.0}),
    Case(BF16, 64, 16, True, False, {"attention_chunk_size": 300}),
    Case(BF16, 64, 16, True, False, {"sliding_window": 2048}),
    Case(BF16, 96, 16, True, False),
    Case(BF16, 96, 16, True, True, {"sliding_window": 1024, "sinks": True}),
    Case(BF16, 96, 16, True, False, {"logits_soft_cap": 30.0}),
    Case(FP16, 80, 0, False, True),
    Case(BF16, 112, 16, True, False),
    Case(BF16, 192, 0, True, True, value_size=128, out_dtype=torch.float32),
    Case(FP16, 192, 0, False, True, value_size=128),
    Case(BF16, 192, 16, True, False, {"sliding_window": 1024}, 128),
    Case(BF16, 192, 16, True, False, {"logits_soft_cap": 30.0}, 128),
    Case(BF16, 64, 16, True, True, {"batch_invariant": True, "sinks": True}),
    Case(BF16, 256, 16, True, False, {"batch_invariant": True}),
    Case(BF16, 192, 16, True, False, {"batch_invariant": True}, 128),
    Case(BF16, 96, 16, True, False, {"batch_invariant": True, "sliding_window": 1024}),
    Case(BF16, 128, 16, True, True, group=1),
    Case(BF16, 64, 16, True, False, {"sliding_window": 256, "sinks": True}, group=1),
    Case(BF16, 256, 16, True, False, {"sliding_window": 1024}, group=1),
    Case(BF16, 128, 16, True, False, group=2),
    Case(BF16, 64, 16, True, True, group=7),
    Case(BF16, 96, 16, True, False, group=3),
    Case(BF16, 128, 16, True, False, {"sliding_window": 1024}, group=6),
    Case(BF16, 256, 16, True, True, {"sinks": True}, group=3),
    # one query head per tile
    Case(BF16, 128, 16, True, True, group=5, max_query_len=128),
    Case(BF16, 64, 16, True, False, {"sliding_window": 256, "sinks": True}, group=8),
    Case(BF16, 64, 16, True, True, {"sinks": True}, group=8, is_append=True),
    Case(BF16, 256, 16, True, False, group=2, is_append=True),
    Case(BF16, 128, 16, True, False, {"sliding_window": 1024}, is_append=True),
    Case(FP16, 128, 32, True, True, {"logits_soft_cap": 30.0}, is_append=True),
    Case(BF16, 192, 16, True, False, value_size=128, group=1, is_append=True),
    Case(
        FP16,
        128,
        32,
        True,
        True,
        {"logits_soft_cap": 30.0, "sinks": True},
        group=8,
        is_append=True,
        max_query_len=8,
    ),
    Case(FP16, 64, 48, False, False, group=8, is_prefix=True),
    Case(
        BF16, 96, 16, False, False, {"logits_soft_cap": 30.0}, group=1, is_prefix=True
    ),
    Case(BF16, 192, 16, False, False, value_size=128, group=1, is_prefix=True),
    Case(BF16, 256, 256, False, False, group=2, is_prefix=True),
    Case(BF16, 64, 128, True, True, has_factors=True),
    Case(FP16, 256, 128, True, False, {"logits_soft_cap": 30.0}, has_factors=True),
    Case(BF16, 128, 128, True, False, group=1, has_factors=True),
    Case(BF16, 128, 128, True, True, has_factors=True, fits_queries=True),
    Case(BF16, 64, 128, True, True, has_factors=True, fits_queries=True),
    Case(BF16, 96, 128, True, True, has_factors=True, fits_queries=True),
    Case(
        BF16, 128, 128, True, True, {"logits_soft_cap": 30.0}, group=5,
        has_factors=True, fits_queries=True,
    ),
    Case(BF16, 160, 16, True, True, {"sliding_window": 1024}, group=5),
    Case(BF16, 160, 16, True, False, is_append=True),
    Case(BF16, 160, 16, True, False, {"batch_invariant": True}),
    Case(BF16, 160, 16, False, False, is_prefix=True),
    *(
        Case(BF16, size, 16, True, size % 32 == 0)
        for size in (8, 24, 32, 48, 72, 104, 136, 144, 176, 192, 200, 216, 248)
    ),
    *(
        Case(BF16, key_size, 16, True, False, value_size=value_size, group=group)
        for key_size, value_size, group in (
            (128, 64, 4), (64, 128, 1), (96, 64, 4), (256, 128, 4), (64, 256, 2), (160, 96, 4),
            (192, 64, 4), (256, 64, 1), (256, 192, 2), (64, 96, 4),
        )
    ),
    Case(BF16, 64, 0, False, False, {"sliding_window": 65}, group=1),
    Case(BF16, 128, 16, False, True, {"sliding_window": 150}),
    Case(BF16, 64, 16, False, False, {"attention_chunk_size": 300}),
    Case(BF16, 128, 8, True, False),
    Case(BF16, 64, 24, True, True),
    Case(BF16, 256, 8, True, False),
    Case(BF16, 128, 8, True, False, is_append=True),
    Case(BF16, 64, 16, True, True, group=71),
    Case(BF16, 128, 16, True, False, {"sliding_window": 1024, "sinks": True}, group=96),
    *(
        Case(BF16, key_size, 16, True, False, value_size=value_size, group=group, is_narrow=True)
        for key_size, value_size, group in (
            (128, 128, 4), (64, 64, 8), (256, 256, 2), (192, 128, 1), (160, 160, 4), (96, 96, 4),
        )
    ),
    Case(FP16, 128, 0, False, True, {"sliding_window": 65}, group=1, is_narrow=True),
]  # fmt: skip
EVERY_DAY = 15
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
COUNTED = ("HGMMA", "MUFU", "PRMT", "BAR", "LDL", "STL")


def record(case: Case) -> dict[str, Any]:
    """Return the arguments that one call's kernel is launched with."""
    dtype, head_size, block_size, causal, has_lse, options, value_size, out_dtype = (
        case[:8]
    )
    launches: list[dict[str, Any]] = []
    is_invariant = "batch_invariant" in options

    def keep(self: JITFunction[Any], *args: Any, **options: Any) -> None:
        launches.append(dict(zip(self.arg_names, args, strict=True)))

    properties = SimpleNamespace(multi_processor_count=132, major=9, minor=0)
    torch.cuda.get_device_properties = lambda device=None: properties
    GluonJITFunction.run = JITFunction.run = keep  # type: ignore[method-assign]
    # also of calls that do not have them yet
    prefill_plan.has_narrow_tile = lambda config: config.CONSUMERS > 1
    heads = 8 if 8 % case.group == 0 else 2 * case.group
    if case.group > 64:
        heads = case.group
    value_size = value_size or head_size
    query = torch.zeros(256, heads, head_size, dtype=dtype)
    starts = torch.tensor([0, 100, 256], dtype=torch.int32)
    kv_heads = heads // case.group
    columns = max(head_size, value_size)
    cache = torch.zeros(512, kv_heads, columns, dtype=dtype)
    table, lengths = None, torch.tensor([0, 256, 512], dtype=torch.int32)
    if block_size:
        cache = torch.zeros(4, block_size, kv_heads, columns, dtype=dtype)
        table = torch.zeros(2, 2, dtype=torch.int32)
        lengths = torch.tensor([block_size, 2 * block_size], dtype=torch.int32)
    keys, values = cache[..., :head_size], cache[..., :value_size]
    out = torch.zeros(256, heads, value_size, dtype=out_dtype or dtype)
    lse = torch.zeros(heads, 256) if has_lse else None
    if "sinks" in options:
        options = {**options, "sinks": torch.zeros(heads)}
    call = AttentionCall(
        query, keys, values, table, starts, lengths, case.max_query_len, 8192, 0.1, out, lse,
        AttentionOptions(causal=causal, **options),
    )  # fmt: skip
    if case.is_prefix:
        prefix_plan = cascade.plan(call)
        split_len = prefix_plan.split_len(call, block_size)
        prefix_plan.launch_prefix(call, block_size, split_len, 4096, torch.zeros(8192))
    elif is_invariant:
        # so few rows of so many keys are split over several programs, and folded
        invariant.plan(call).launch(call)
        compile_case(launches[1], fold_kernel)
    elif case.is_append:
        append.plan(call).launch(call)
    else:
        factors = torch.zeros(kv_heads, 2, 2 * block_size) if case.has_factors else None
        plan = family.plan(call)
        if case.fits_queries:
            plan = plan.fitted()
        division = NARROW if case.is_narrow else WIDE
        plan.launch_prefill(call, 16, (None, None), factors, division)
    return launches[0]


def compile_case(
    values: dict[str, Any], kernel: Any = prefill_kernel
) -> tuple[Any, dict[str, Any]]:
    """Compile one recorded launch of a kernel as triton would, and return its report too."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    for parameter in kernel.params:
        name, value = parameter.name, values[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, TensorDescriptor):
            box, layout = list(value.block_shape), value.layout
            signature[name] = f"tensordesc<{NAMES[value.base.dtype]}{box},{layout!r}>"
        elif isinstance(value, torch.Tensor):
            signature[name] = f"*{NAMES[value.dtype]}"
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
    source = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    return compile_source(
        source(fn=kernel, signature=signature, constexprs=constants), 4
    )


def compile_source(source: ASTSource, num_warps: int) -> tuple[Any, dict[str, Any]]:
    """Compile a kernel for Hopper.

    Returns:
        The compiled kernel, and the assembler's report of it: registers, spills, and warnings on
        wgmma. The assembler takes seconds. It runs a second time only if triton's cache had the
        kernel, since the cache does not keep the report.
    """
    printed = io.StringIO()
    with triton.knobs.nvidia.scope(), redirect_stdout(printed):
        triton.knobs.nvidia.dump_ptxas_log = True
        compiled = triton.compile(
            source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps}
        )
    report = printed.getvalue()
    if "registers" not in report:
        report = _assemble(compiled.asm["ptx"])
    stores, loads = re.findall(r"(\d+) bytes spill (?:stores|loads)", report)[:2]
    return compiled, {
        "registers": int(re.findall(r"Used (\d+) registers", report)[0]),
        "spilled": int(stores),
        "reloaded": int(loads),
        # C7508 to C7519: setmaxnreg was ignored, or wgmma instructions were serialized
        "warnings": re.findall(r"\(C75\d\d\)[^\n]*", report),
    }


def _assemble(ptx: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ptx"
        file.write_text(ptx)
        tool, made = get_ptxas(90).path, str(file.with_suffix(".cubin"))
        return subprocess.run(
            [tool, "-v", "--gpu-name", "sm_90a", str(file), "-o", made],
            capture_output=True,
            text=True,
            check=True,
        ).stderr


def disassemble(cubin: bytes) -> str:
    """Return the instructions of a compiled kernel."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        return subprocess.run(
            [str(TOOLS / "nvdisasm"), "-c", str(file)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout


def main_loops(text: str) -> Iterator[dict[str, int]]:
    """Return the instruction counts of each main loop's body.

    A body is the code between two labels that contains wgmma instructions and the exponentials of
    a KV tile. At head size 256 the first KV tile of a work item is one too.
    """
    for body in re.split(r"^\.L_x_\d+:$", text, flags=re.M):
        in_order = re.findall(
            r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+ )?([A-Z0-9]+)", body, re.M
        )
        found = Counter(in_order)
        if found["HGMMA"] and found["MUFU"] > 25:
            before_bar = "".join(in_order).rpartition("BAR")[0]
            yield {
                "instructions": found.total(),
                **{name: found[name] for name in COUNTED},
                # exponentials that delay the next warpgroup's turn
                "MUFU before BAR": before_bar.count("MUFU"),
            }


def count_widths(text: str) -> dict[str, int]:
    """Return how many accesses to global memory have each width, in bits per thread."""
    found: Counter[str] = Counter()
    for name, modifiers in re.findall(r"\b(LDG|STG)\.E((?:\.[A-Z0-9_]+)*)", text):
        width = re.search(r"\.[US]?(8|16|64|128)\b", modifiers)
        found[f"{name} {width[1] if width else 32}"] += 1
    return dict(found)


def main(numbers: list[int]) -> None:
    """Compile the cases of these numbers."""
    for case in [CASES[number] for number in numbers]:
        begin = time.perf_counter()
        is_invariant = "batch_invariant" in case.options
        kernel = invariant_kernel if is_invariant else prefill_kernel
        if case.is_append:
            kernel = append_kernel
        if case.is_prefix:
            kernel = cascade_prefix_sm90_kernel
        compiled, report = compile_case(record(case), kernel)
        text = disassemble(compiled.asm["cubin"])
        line = {
            "case": str(case),
            **report,
            "shared": compiled.metadata.shared,
            "widths": count_widths(text),
            "loops": list(main_loops(text)),
            "seconds": round(time.perf_counter() - begin, 1),
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main([int(number) for number in sys.argv[1:]] or list(range(len(CASES))))
