"""Compile every kernel for a GPU that need not be there, and print what it uses.

    PYTHONPATH=tests python tests/support/compile_kernels.py 90 [80 100 ...]

The public operations run on host tensors, but each launch is recorded instead of made, with the
tiles that a chip of that kind gets. So what is compiled is what would be launched. One JSON object
a line: kernel, case, registers, stack bytes, spills, shared memory, warps, seconds.
"""

import os

if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)

import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from pagetwin.contract.attention_options import pack_options
from pagetwin.contract.cache_formats import (
    CODES_PER_ELEMENT,
    FORMATS,
    TENSOR_SCALE_DTYPES,
    CacheFormat,
)
from pagetwin.contract.operations import CONCEPTS, load_implementation
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from support.compile_latent_records import record_cases
from support.compile_latents import latent_cases
from support.compile_sparse import sparse_cases

NAMES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.bool: "i1",
}
# shared memory that one program may take, and multiprocessors, of an A100, an RTX 3090 (small
# tiles), an H100, a B200 and an RTX 5090 (small tiles)
CHIPS = {
    80: (166912, 108),
    86: (101376, 82),
    90: (232448, 132),
    100: (232448, 148),
    120: (101376, 170),
}
# what takes long to compile, and differs little from what is compiled for every chip
ONLY_FOR_ONE_CHIP = (
    "options",
    "sinks",
    "bias",
    "window",
    "flags",
    "not causal",
    "e5m2 cache",
    "float8_e5m2 cache",
    "fp8_per_token_head cache",
    "int4_per_token_head cache",
    "cache of prompts",
    "64 rows",
    "fp16 64",
    "bf16 256",
    "base 2",
    "fp32, 16 heads",
)
# the cases whose loops over keys are looked at
WALKED = "(decode|few decodes|append|cascade|latents), bf16"
# chips for which each kernel is compiled once, for the first case that launches it
ONCE = (100, 120)
# requests over 4,096 keys of 8 kv heads: on every chip the second are few decodes, the first are
# not
DECODES = {"decode": 12, "few decodes": 2}
Launch = tuple[str, JITFunction, dict[str, Any], dict[str, int]]
READ_ALIKE = ("int4_per_token_head_vllm", "nvfp4_4over6")
"""Formats whose caches are read as those of another one."""
MEASURED = {
    name: form
    for name, form in FORMATS.items()
    if form.is_measured and name not in READ_ALIKE
}
"""Formats with measured scales, whose caches are read by code of their own."""


def pretend(chip: int, launches: list[Any]) -> None:
    """Record launches instead of making them, as on that chip."""
    shared_memory, processors = CHIPS[chip]
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(
        name=f"chip {chip}",
        shared_memory_per_block_optin=shared_memory,
        multi_processor_count=processors,
        major=chip // 10,
        minor=chip % 10,
    )

    def record(self: JITFunction, *args: Any, grid: Any, **options: Any) -> None:
        options.pop("warmup", None)
        names = [name for name in options if name not in self.arg_names]
        launch = {name: options.pop(name) for name in names}
        values = dict(zip(self.arg_names, args, strict=False)) | options
        launches.append((self, values, launch))

    JITFunction.run = record
    concepts = [concept.module for concept in CONCEPTS if not concept.is_single]
    for name in (
        "dispatch.pipeline",
        "parallel.combine",
        *concepts,
    ):
        module = import_module(f"pagetwin.optimized.{name}")
        if hasattr(module, "check_launch"):
            module.check_launch = lambda tensor: None


def run_attention(
    query_len: int,
    kv_len: int,
    head_size: int,
    dtype: torch.dtype,
    reqs: int = 4,
    heads: tuple[int, int] = (32, 8),
    value_size: int | None = None,
    cache_dtype: torch.dtype | None = None,
    prefix_len: int = 0,
    **options: Any,
) -> None:
    """Launch attention over a paged cache, log-sum-exp included; a cascade if there is a prefix."""
    query_heads, kv_heads = heads
    blocks = -(-kv_len // 16)
    query = torch.zeros(reqs * query_len, query_heads, head_size, dtype=dtype)
    codes = CODES_PER_ELEMENT.get(cache_dtype, 1)
    shape = (2, blocks, 16, kv_heads, head_size // codes)
    cache = torch.zeros(shape, dtype=cache_dtype or dtype)
    twin = load_implementation("optimized")
    given = () if not prefix_len else (prefix_len,)
    (twin.cascade_attention if prefix_len else twin.paged_attention)(
        query,
        cache[0],
        cache[1][..., : (value_size or head_size) // codes],
        torch.zeros(reqs, blocks, dtype=torch.int32),
        torch.arange(reqs + 1, dtype=torch.int32) * query_len,
        torch.full((reqs,), kv_len, dtype=torch.int32),
        query_len,
        kv_len,
        *given,
        lse=torch.zeros(query_heads, reqs * query_len),
        **pack_options(**options),
    )


def run_encoder(query_len: int, head_size: int, **options: Any) -> None:
    """Launch attention over keys that are not cached."""
    query = torch.zeros(2 * query_len, 8, head_size, dtype=torch.bfloat16)
    starts = torch.arange(3, dtype=torch.int32) * query_len
    load_implementation("optimized").encoder_attention(
        query,
        query,
        query,
        starts,
        starts,
        query_len,
        query_len,
        **pack_options(**options),
    )


def measured_scales(form: CacheFormat, blocks: int) -> dict[str, Any]:
    """Return the scales of keys and of values of 8 heads of 128, in blocks of 16 slots."""
    names = ("k_scale", "v_scale")
    if not form.channels_per_scale:
        return {name: torch.ones(blocks, 16, 8) for name in names}
    parts = 128 // form.channels_per_scale
    scales = torch.ones(blocks, 16, 8, parts).to(torch.float8_e4m3fn)
    factors = {"k_global_scale": 0.5, "v_global_scale": 0.25}
    return {name: scales.clone() for name in names} | factors


def cases() -> Iterator[tuple[str, Callable[[], None]]]:
    """Return what is launched: a name, and how to launch it."""
    twin = load_implementation("optimized")
    ones = torch.ones(64, 8, 128, dtype=torch.bfloat16)
    cache = torch.zeros(2, 16, 16, 8, 128, dtype=torch.bfloat16)
    table = torch.zeros(4, 4, dtype=torch.int32)
    starts = torch.arange(5, dtype=torch.int32) * 16
    counts = torch.zeros(4, dtype=torch.int32)
    for dtype, head_size in (
        (torch.bfloat16, 128),
        (torch.float16, 64),
        (torch.bfloat16, 256),
        (torch.float32, 128),
    ):
        name = f"{NAMES[dtype]} {head_size}"
        for kind, reqs in DECODES.items():
            yield (
                f"{kind}, {name}",
                lambda d=dtype, h=head_size, r=reqs: run_attention(1, 4096, h, d, r),
            )
        yield (
            f"prefill, {name}",
            lambda d=dtype, h=head_size: run_attention(99, 99, h, d),
        )
    every_score = {
        "sliding_window": 1024,
        "logits_soft_cap": 50.0,
        "alibi_slopes": torch.ones(32),
        "sinks": torch.ones(32),
    }
    every_mask = {
        "attention_chunk_size": 2048,
        "tree_mask": torch.ones(4, 32, 32, dtype=torch.bool),
        "position_bias": torch.ones(32, 257),
    }
    for kind, reqs in (DECODES | {"prefill": 4}).items():
        query_len = 99 if kind == "prefill" else 1
        tokens = reqs * query_len
        masks = every_mask | {"tree_mask": torch.ones(reqs, 32, 32, dtype=torch.bool)}
        rest = {
            "query_ranges": torch.zeros(tokens, 2, dtype=torch.int32),
            "out_scale": 2.0,
            "out": torch.zeros(tokens, 32, 128).to(torch.float8_e5m2),
        }
        for name, options in (
            ("window, cap, ALiBi, sinks", every_score),
            ("chunk, tree, bias", masks),
            ("all options", every_score | masks | rest),
            ("flags", {"causal": torch.ones(reqs, dtype=torch.bool)}),
            ("not causal", {"causal": False}),
        ):
            yield (
                f"{kind}, {name}",
                lambda q=query_len, r=reqs, o=options: run_attention(
                    q, 4096, 128, torch.bfloat16, r, **o
                ),
            )
        for dtype in TENSOR_SCALE_DTYPES:
            options = {"cache_dtype": dtype, "k_scale": torch.ones(8), "v_scale": 0.5}
            yield (
                f"{kind}, {str(dtype).removeprefix('torch.')} cache",
                lambda q=query_len, r=reqs, o=options: run_attention(
                    q, 4096, 128, torch.bfloat16, r, **o
                ),
            )
        for name, form in MEASURED.items():
            codes = measured_scales(form, 256) | {"cache_dtype": form.dtype}
            yield (
                f"{kind}, {name} cache",
                lambda q=query_len, r=reqs, o=codes: run_attention(
                    q, 4096, 128, torch.bfloat16, r, **o
                ),
            )
    # latents of batch-invariant rows, and values that are not columns of the keys
    for is_invariant in (True, False):
        yield (
            f"prefill, latent 576 of 512{', batch invariant' * is_invariant}",
            lambda b=is_invariant: run_attention(
                99, 4096, 576, torch.bfloat16, 4, (16, 1), 512, batch_invariant=b
            ),
        )
    # the most query heads per kv head that have a decode tile on every chip
    for heads, head_size, value_size in ((64, 256, 256), (32, 576, 512)):
        sizes = (head_size, torch.bfloat16, 2, (heads, 1), value_size)
        yield (
            f"few decodes, {heads} rows of {head_size} and {value_size}",
            lambda s=sizes: run_attention(1, 4096, *s),
        )
    for query_len, name, options in (
        (6, "bf16 128, 32 rows", {}),
        (16, "bf16 128, 64 rows", {}),
        (32, "bf16 128, 128 rows", {}),
        (6, "all options", every_score | every_mask),
        (
            16,
            "float8_e4m3fn cache",
            {
                "cache_dtype": TENSOR_SCALE_DTYPES[0],
                "k_scale": torch.ones(8),
                "v_scale": 0.5,
            },
        ),
    ):
        yield (
            f"append, {name}",
            lambda q=query_len, o=options: run_attention(
                q, 16384, 128, torch.bfloat16, **o
            ),
        )
    for query_len, name, options in (
        (1, "bf16 128, decodes", {}),
        (32, "bf16 128, 128 rows", {"logits_soft_cap": 50.0}),
        (
            1,
            "sinks, float8_e4m3fn cache",
            {
                "cache_dtype": TENSOR_SCALE_DTYPES[0],
                "sinks": torch.ones(32),
                "k_scale": torch.ones(8),
                "v_scale": 0.5,
            },
        ),
    ):
        yield (
            f"cascade, {name}",
            lambda q=query_len, o=options: run_attention(
                q, 16384, 128, torch.bfloat16, prefix_len=8192, **o
            ),
        )
    yield (
        "cascade, bf16 128, short rests",
        lambda: run_attention(1, 8448, 128, torch.bfloat16, reqs=64, prefix_len=8192),
    )
    yield (
        "prefill, int8_per_token_head cache of prompts",
        lambda: run_attention(
            99,
            99,
            128,
            torch.bfloat16,
            cache_dtype=torch.int8,
            **measured_scales(FORMATS["int8_per_token_head"], 7),
        ),
    )
    for name, form in MEASURED.items():
        codes = measured_scales(form, 1024) | {"cache_dtype": form.dtype}
        yield (
            f"append, {name} cache",
            lambda o=codes: run_attention(16, 16384, 128, torch.bfloat16, **o),
        )
    # in float16 weights are divided by the largest of their row
    for kind, query_len in (("decode", 1), ("prefill", 99)):
        for name in ("int8_per_token_head", "int4_per_token_head"):
            form = MEASURED[name]
            codes = measured_scales(form, 256) | {"cache_dtype": form.dtype}
            yield (
                f"{kind}, fp16, {name} cache",
                lambda q=query_len, o=codes: run_attention(
                    q, 4096, 128, torch.float16, **o
                ),
            )
    for kind, query_len, kv_len in (("alone", 99, 4096), ("spread", 1, 32768)):
        yield (
            f"prefill, batch invariant, {kind}",
            lambda q=query_len, k=kv_len: run_attention(
                q, k, 128, torch.bfloat16, batch_invariant=True
            ),
        )
    yield "prefill, encoder 64", lambda: run_encoder(99, 64)
    yield (
        "prefill, encoder 64, window",
        lambda: run_encoder(99, 64, sliding_window=16, logits_soft_cap=30.0),
    )
    latents = torch.zeros(64, 576, dtype=torch.bfloat16)
    latent_cache = torch.zeros(16, 16, 576, dtype=torch.bfloat16)
    for dtype, scale in ((torch.bfloat16, None), (torch.float8_e4m3fn, torch.ones(1))):
        yield (
            f"latent write, {str(dtype).removeprefix('torch.')}",
            lambda d=dtype, s=scale: twin.concat_and_cache_mla(
                latents[:, :512],
                latents[:, 512:],
                latent_cache.to(d),
                torch.arange(64),
                s,
            ),
        )
    yield from record_cases(twin)
    yield from latent_cases(twin)
    yield from sparse_cases(twin)
    yield (
        "prefill, latent, 16 heads",
        lambda: twin.latent_prefill_attention(
            q_nope=torch.zeros(64, 16, 128, dtype=torch.bfloat16),
            q_pe=torch.zeros(64, 16, 64, dtype=torch.bfloat16),
            kv_c=latents[:, :512],
            k_pe=latents[:, 512:],
            kv_cache=latent_cache,
            w_uk=torch.zeros(16, 128, 512, dtype=torch.bfloat16),
            w_uv=torch.zeros(16, 512, 128, dtype=torch.bfloat16),
            block_table=torch.zeros(4, 8, dtype=torch.int32),
            query_start_loc=starts,
            seq_lens=torch.full((4,), 99, dtype=torch.int32),
            max_query_len=16,
            max_seq_len=99,
            num_context_tokens=332,
        ),
    )
    yield (
        "merge, base 2",
        lambda: twin.merge_attn_states(
            ones,
            torch.zeros(8, 64),
            ones,
            torch.zeros(8, 64),
            prefix_lse_base=2.0,
            suffix_lse_base=2.0,
            output_lse=torch.zeros(8, 64),
        ),
    )
    yield (
        "write, e4m3 8x128",
        lambda: twin.reshape_and_cache(
            ones,
            ones,
            cache[0].to(torch.float8_e4m3fn),
            cache[1].to(torch.float8_e4m3fn),
            torch.arange(64),
            torch.ones(8),
            0.5,
        ),
    )
    for name, form in FORMATS.items():
        if not form.is_measured:
            continue
        codes, scales = (
            cache[..., : form.elements(128)].to(form.dtype),
            measured_scales(form, 16),
        )
        yield (
            f"write, {name} 8x128",
            lambda c=codes, s=scales, n=name: twin.reshape_and_cache(
                ones, ones, c[0], c[1], torch.arange(64), kv_cache_dtype=n, **s
            ),
        )
        if name in READ_ALIKE:
            continue
        yield (
            f"gather, {name} 8x128",
            lambda c=codes, s=scales: twin.gather_cache(
                c[0], c[1], table, starts, 64, dtype=torch.bfloat16, **s
            ),
        )
    yield (
        "gather, e5m2 8x128",
        lambda: twin.gather_cache(
            cache[0].to(torch.float8_e5m2),
            cache[1].to(torch.float8_e5m2),
            table,
            starts,
            64,
            k_scale=torch.ones(8),
            v_scale=0.5,
            dtype=torch.bfloat16,
        ),
    )
    yield (
        "merge, bf16 8x128",
        lambda: twin.merge_attn_states(
            ones, torch.zeros(8, 64), ones, torch.zeros(8, 64)
        ),
    )
    yield (
        "combine 4 parts",
        lambda: twin.lse_weighted_combine(
            torch.zeros(4, 16, 8, 128), torch.zeros(4, 16, 8)
        ),
    )
    yield (
        "write, bf16 8x128",
        lambda: twin.reshape_and_cache(
            ones, ones, cache[0], cache[1], torch.arange(64)
        ),
    )
    yield (
        "gather, bf16 8x128",
        lambda: twin.gather_cache(cache[0], cache[1], table, starts, 64),
    )
    yield (
        "copy, bf16 8x128",
        lambda: twin.copy_blocks([cache], torch.tensor([[1, 0]])),
    )
    ceilings = import_module("pagetwin.tools.bench.read_kernels")
    words, sums = torch.zeros(8, 8192, dtype=torch.int32), torch.zeros(4).int()
    yield "ceiling, in a row", lambda: ceilings.read(words, sums)
    yield (
        "ceiling, through a table",
        lambda: ceilings.read_pages(words, torch.arange(8).int(), sums),
    )
    yield "ceiling, nothing", lambda: ceilings.do_nothing(sums)
    combine = import_module("pagetwin.optimized.parallel.combine")
    for name, splits, sinks in (
        ("", 1, None), (", sinks", 1, torch.ones(16)), (", 3 splits", 3, None)
    ):  # fmt: skip
        yield (
            f"combine, 2 ranks{name}",
            lambda n=splits, s=sinks: combine.combine_received(
                torch.zeros(2, 16, n, 4, 136), torch.arange(2 * n),
                SimpleNamespace(splits=n, is_token=torch.ones(4, dtype=torch.bool)),
                s, torch.zeros(4, 16, 128, dtype=torch.bfloat16), None,
            ),
        )  # fmt: skip
    of_ranks = import_module("pagetwin.optimized.parallel.kernels.combine_ranks")
    for rank in (0, 1):
        yield (
            f"exchange and combine, 2 ranks, rank {rank}",
            lambda r=rank: combine.combine_received(
                torch.zeros(2, 16, 1, 4, 136), torch.arange(2),
                SimpleNamespace(splits=1, is_token=torch.ones(4, dtype=torch.bool)),
                None, torch.zeros(4, 16, 128, dtype=torch.bfloat16), None,
                of_ranks.Partners(
                    torch.zeros(2).long(), *torch.zeros(3, 4).int(), r, 1 << 24, 17408
                ),
            ),
        )  # fmt: skip
    exchange = import_module("pagetwin.optimized.parallel.kernels.exchange")
    numbers = torch.zeros(4, dtype=torch.int64)
    for name, to_all, adds in (
        ("all-gather", True, False),
        ("all-to-all", False, False),
        ("reduce-scatter", False, True),
    ):
        yield (
            f"exchange, {name}",
            lambda t=to_all, a=adds: exchange.exchange_kernel[(32,)](
                words, words.float() if a else words, numbers, sums, sums, 0, 8192,
                65536, 10**6, RANKS=2, TO_ALL=t, ADDS=a, BLOCK=2048, num_warps=8,
            ),
        )  # fmt: skip
    yield (
        "slots of 64 tokens",
        lambda: twin.compute_slot_mapping_device(starts, counts, table, 16, 64),
    )


def specialize(
    value: Any,
    path: tuple[int, ...],
    constants: dict[tuple[int, ...], Any],
    attributes: dict[tuple[int, ...], list[list[Any]]],
) -> Any:
    """Return the type of an argument as triton would; note what is constant or aligned."""
    if isinstance(value, tuple):
        types = [
            specialize(part, (*path, number), constants, attributes)
            for number, part in enumerate(value)
        ]
        return type(value)(*types)
    # triton makes a constant of an integer 1 (mostly a stride), and so do we
    if value is None or (isinstance(value, int) and value == 1):
        constants[path] = value
        return "constexpr"
    is_tensor = isinstance(value, torch.Tensor)
    if is_tensor or (isinstance(value, int) and value % 16 == 0):
        attributes[path] = [["tt.divisibility", 16]]
    if is_tensor:
        return f"*{NAMES[value.dtype]}"
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def specialize_launch(
    kernel: JITFunction, values: dict[str, Any]
) -> tuple[dict[str, Any], dict[tuple[int, ...], Any], dict[tuple[int, ...], Any]]:
    """Return the types, constants and alignments that triton compiles a launch for."""
    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, parameter in enumerate(kernel.params):
        value = values.get(parameter.name, parameter.default)
        if parameter.is_constexpr:
            signature[parameter.name] = "constexpr"
            constants[(index,)] = value
        else:
            signature[parameter.name] = specialize(
                value, (index,), constants, attributes
            )
    return signature, constants, attributes


def compile_launch(
    kernel: JITFunction, values: dict[str, Any], options: dict[str, int], chip: int
) -> dict[str, Any]:
    """Compile one recorded launch as triton would, and return what it uses."""
    signature, constants, attributes = specialize_launch(kernel, values)
    begin = time.perf_counter()
    compiled = triton.compile(
        ASTSource(
            fn=kernel, signature=signature, constexprs=constants, attrs=attributes
        ),
        target=GPUTarget("cuda", chip, 32),
        options=options,
    )
    return {
        "cubin": compiled.asm["cubin"],
        **resources(compiled.asm["cubin"]),
        "shared": compiled.metadata.shared,
        "warps": compiled.metadata.num_warps,
        "seconds": round(time.perf_counter() - begin, 2),
    }


def dump(cubin: bytes, what: str) -> str:
    """Return what cuobjdump says of a kernel."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        tool = Path(shutil.which("cuobjdump") or tool)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        return subprocess.run(
            [str(tool), what, str(file)], capture_output=True, text=True, check=True
        ).stdout


def loops_with_products(cubin: bytes) -> Iterator[list[str]]:
    """Yield the instructions of the loops over keys: the innermost ones with products of tiles."""
    found = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", dump(cubin, "-sass"))
    code = [(int(place, 16), words) for place, words in found]
    loops = []
    for place, words in code:
        target = re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", words)
        if target and int(target[1], 16) < place:
            loops.append((int(target[1], 16), place))
    for begin, end in loops:
        if any(begin <= a and b <= end and (a, b) != (begin, end) for a, b in loops):
            continue
        body = [words for place, words in code if begin <= place <= end]
        if any(re.search(r"\b[A-Z]*MMA", words) for words in body):
            yield body


def walk_over_keys(cubin: bytes) -> dict[str, int]:
    """Return what the loops over keys do.

    Returns:
        reloads: how often they go to the stack, for what was spilled.
        copies: how many copies to shared memory each starts and does not wait for, at least.
    """
    reloads = 0
    copies = []
    for body in loops_with_products(cubin):
        copies.append(sum("LDGSTS" in line for line in body))
        reloads += sum(bool(re.search(r"\b(LDL|STL)\b", line)) for line in body)
    assert copies, "no loop with products was found"
    return {"reloads": reloads, "copies": min(copies)}


def resources(cubin: bytes) -> dict[str, int]:
    """Return what a thread uses.

    Returns:
        registers: how many.
        stack: bytes set aside for what does not fit them.
        spills: how many instructions go to the stack; ptxas also sets bytes aside that none uses.
    """
    text = dump(cubin, "-res-usage")
    stack = max(map(int, re.findall(r"STACK:(\d+)", text)))
    return {
        "registers": max(map(int, re.findall(r"REG:(\d+)", text))),
        "stack": stack,
        "spills": len(re.findall(r"\b(?:LDL|STL)\b", dump(cubin, "-sass")))
        if stack
        else 0,
    }


def main(chips: list[int]) -> None:
    """Compile every case for every chip."""
    launches: list[Any] = []
    # what a launch would have written is read by the next one
    os.environ["PAGETWIN_CHECK_VALUES"] = "0"
    for chip in chips:
        pretend(chip, launches)
        for module in (
            "kernels.portable.host.tuning",
            "kernels.sm90.common.chip",
            "runtime.chip",
            "kernels.fp8",
            "kernels.latent_records.attend",
        ):
            for value in vars(import_module(f"pagetwin.optimized.{module}")).values():
                if hasattr(value, "cache_clear"):
                    value.cache_clear()
        seen, compiled = set(), set()
        for case, launch in cases():
            if chip != 90 and case.endswith(ONLY_FOR_ONE_CHIP):
                continue
            launches.clear()
            launch()
            for kernel, values, options in launches:
                # a prefill's launch for decode requests is compiled by the decode cases
                if case.startswith("prefill") and kernel.__name__ == "decode_kernel":
                    continue
                used_by = [values.get(param.name) for param in kernel.params]
                fixed = [
                    value
                    for param, value in zip(kernel.params, used_by, strict=True)
                    if param.is_constexpr
                ]
                key = (case, kernel.__name__, str(fixed))
                if key in seen or (chip in ONCE and kernel.__name__ in compiled):
                    continue
                seen.add(key)
                compiled.add(kernel.__name__)
                used = compile_launch(kernel, values, options, chip)
                cubin = used.pop("cubin")
                is_combination = kernel.__name__ == "latent_combine_kernel"
                if re.match(WALKED, case) and not is_combination:
                    used |= walk_over_keys(cubin)
                line = {"chip": chip, "case": case, "kernel": kernel.__name__} | used
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main([int(number) for number in sys.argv[1:]] or [80, 90, 100])
