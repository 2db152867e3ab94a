"""What is timed on a GPU, and how?

A case is one batch; every implementation that can run it is timed on the same tensors, with a cold
L2 cache. What a case moves and computes at least is listed with its times. record.py runs this file
as a process of its own, which may crash:

    python tests/gpu/timing.py LINES.jsonl --device cuda
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.contract.operations import load_implementation
from pagetwin.tools.bench.timing import Stopwatch, captured, quartiles, time_host

FLUSH_BYTES = 1 << 30
BLOCK_SIZE = 16
Timed = tuple[str, Callable[[], Any]]
Case = tuple[list[Timed], dict[str, float]]
Heads = tuple[int, int, int]
"""Query heads, kv heads, elements of a head."""


def attention_case(
    queries: list[int],
    keys: list[int],
    device: str,
    heads: Heads,
    *,
    value_size: int | None = None,
    cache_dtype: torch.dtype = torch.bfloat16,
    causal: bool = True,
    most_seen: int | None = None,
    with_reference: bool = True,
    **options: Any,
) -> Case:
    """Return the attention of one batch by every implementation, and its bytes and flops.

    Args:
        queries, keys: of each request.
        device: where it runs.
        heads: of the batch.
        value_size: elements of a value. If None, those of a key.
        cache_dtype: of the cache; FP8 needs scales among the options.
        causal: whether queries are the sequence's last tokens, or see all of another one.
        most_seen: keys that a query attends to at most, under a window or in a chunk.
        with_reference: whether the reference is timed too.
        options: those of `paged_attention`.
    """
    query_heads, kv_heads, head_size = heads
    dtype = torch.bfloat16
    query, cache, table = random_batch(queries, keys, device, heads, cache_dtype)
    value_size = value_size or head_size
    out = torch.empty(len(query), query_heads, value_size, dtype=dtype, device=device)
    starts = torch.tensor([0, *queries], dtype=torch.int32).cumsum(0).int().to(device)
    lens = torch.tensor(keys, dtype=torch.int32, device=device)
    values = cache[1][..., :value_size]

    def attend(twin: str) -> Callable[[], Any]:
        operation = load_implementation(twin).paged_attention
        batch = (table, starts, lens, max(queries), max(keys))
        return lambda: operation(
            query,
            cache[0],
            values,
            *batch,
            out=out,
            options=AttentionOptions(causal=causal, **options),
        )

    cases: list[Timed] = [("reference", attend("reference"))] if with_reference else []
    cases.append(("triton", attend("optimized")))
    if set(queries) == {1} and causal and not options and value_size == head_size:
        cases.append(("xformers", xformers_decode(query, cache, keys, table)))
    seen = [
        min(kv - new + place + 1 if causal else kv, most_seen or kv)
        for new, kv in zip(queries, keys, strict=True)
        for place in range(new)
    ]
    read = sum(
        min(kv, (most_seen or kv) + new - 1)
        for new, kv in zip(queries, keys, strict=True)
    )
    row = kv_heads * (head_size + value_size) * cache.element_size()
    rows = sum(queries) * query_heads * (head_size + value_size)
    return cases, {
        "bytes": read * row + rows * dtype.itemsize,
        "flops": 2 * sum(seen) * query_heads * (head_size + value_size),
    }


def random_batch(
    queries: list[int],
    keys: list[int],
    device: str,
    heads: Heads,
    cache_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, a cache and a table of scattered blocks."""
    query_heads, kv_heads, head_size = heads
    torch.manual_seed(0)
    blocks = [-(-count // BLOCK_SIZE) for count in keys]
    order = torch.randperm(sum(blocks), dtype=torch.int32)
    table = torch.zeros(len(keys), max(blocks), dtype=torch.int32)
    for req, row in enumerate(order.split(blocks)):
        table[req, : len(row)] = row
    sizes = (BLOCK_SIZE, kv_heads, head_size)
    cache = torch.randn(2, sum(blocks), *sizes, dtype=torch.bfloat16, device=device)
    query = torch.randn(sum(queries), query_heads, head_size, dtype=torch.bfloat16)
    return query.to(device), cache.to(cache_dtype), table.to(device)


def xformers_decode(
    query: torch.Tensor, cache: torch.Tensor, keys: list[int], table: torch.Tensor
) -> Callable[[], Any]:
    """Return xFormers' split-K over a batch of decodes."""
    from pagetwin.optimized.backends.xformers_split_k import (
        build_decode_bias,
        split_k_attention,
    )

    bias = build_decode_bias(keys, table, BLOCK_SIZE)
    scale = query.shape[-1] ** -0.5
    return lambda: split_k_attention(query, cache[0], cache[1], bias, scale)


def encoder_case(reqs: int, length: int, device: str, heads: Heads) -> Case:
    """Return the attention of an encoder, and torch's own on the same tokens as a batch."""
    query_heads, kv_heads, head_size = heads
    torch.manual_seed(0)
    width = (query_heads + 2 * kv_heads) * head_size
    fused = torch.randn(reqs * length, width, dtype=torch.bfloat16, device=device)
    parts = fused.unflatten(1, (-1, head_size)).split(
        [query_heads, kv_heads, kv_heads], dim=1
    )
    starts = torch.arange(reqs + 1, dtype=torch.int32, device=device) * length
    operation = load_implementation("optimized").encoder_attention
    dense = [
        part.unflatten(0, (reqs, length)).transpose(1, 2).contiguous() for part in parts
    ]
    attend = torch.nn.functional.scaled_dot_product_attention
    cases: list[Timed] = [
        ("triton", lambda: operation(*parts, starts, starts, length, length)),
        ("torch", lambda: attend(*dense, enable_gqa=query_heads != kv_heads)),
    ]
    flops = 4 * reqs * length * length * query_heads * head_size
    return cases, {"bytes": 2 * fused.nbytes, "flops": flops}


def cascade_case(reqs: int, prefix: int, own: int, device: str, heads: Heads) -> Case:
    """Return decodes that share a prefix, which is read once or by each of them."""
    keys = [prefix + own] * reqs
    query, cache, table = random_batch([1] * reqs, keys, device, heads, torch.bfloat16)
    table[:, : prefix // BLOCK_SIZE] = table[0, : prefix // BLOCK_SIZE].clone()
    starts = torch.arange(reqs + 1, dtype=torch.int32, device=device)
    lens = torch.tensor(keys, dtype=torch.int32, device=device)
    batch = (query, cache[0], cache[1], table, starts, lens, 1, prefix + own)
    twin = load_implementation("optimized")
    cases: list[Timed] = [
        ("triton, cascade", lambda: twin.cascade_attention(*batch, prefix)),
        ("triton, plain", lambda: twin.paged_attention(*batch)),
    ]
    query_heads, kv_heads, head_size = heads
    read = (prefix + reqs * own) * kv_heads * head_size
    flops = 4 * sum(keys) * query_heads * head_size
    return cases, {"bytes": 4 * read + 2 * query.nbytes, "flops": flops}


def write_case(
    tokens: int,
    device: str,
    heads: Heads,
    cache_dtype: torch.dtype = torch.bfloat16,
    **scales: Any,
) -> Case:
    """Return the write of that many tokens to scattered slots."""
    _, kv_heads, head_size = heads
    torch.manual_seed(0)
    sizes = (kv_heads, head_size)
    key = torch.randn(tokens, *sizes, dtype=torch.bfloat16, device=device)
    blocks = tokens // BLOCK_SIZE + 4
    cache = torch.zeros(2, blocks, BLOCK_SIZE, *sizes, dtype=cache_dtype, device=device)
    slots = torch.randperm(tokens).to(device)

    def write(twin: str) -> Callable[[], Any]:
        operation = load_implementation(twin).reshape_and_cache
        return lambda: operation(key, key, cache[0], cache[1], slots, **scales)

    cases = [("reference", write("reference")), ("triton", write("optimized"))]
    written = key.numel() * cache.element_size()
    return cases, {"bytes": 2 * (key.nbytes + written), "flops": 0}


def slot_case(reqs: int, device: str) -> Case:
    """Return the slots of a step: a prefill chunk among each 32 decodes."""
    queries = [128 if req % 32 == 31 else 1 for req in range(reqs)]
    starts = torch.tensor([0, *queries], dtype=torch.int32).cumsum(0).int().to(device)
    computed = torch.full((reqs,), 2048, dtype=torch.int32, device=device)
    table = torch.randint(0, 10**6, (reqs, 160), dtype=torch.int32, device=device)

    def compute(twin: str) -> Callable[[], Any]:
        operation = load_implementation(twin).compute_slot_mapping_device
        return lambda: operation(starts, computed, table, 16, sum(queries))

    cases = [("reference", compute("reference")), ("triton", compute("optimized"))]
    return cases, {"bytes": 8 * sum(queries), "flops": 0}


def all_cases(device: str, smoke: bool) -> dict[str, Callable[[], Case]]:
    """Return every case by its name; tiny ones to try the script itself."""
    heads = (4, 2, 32) if smoke else (32, 8, 128)
    small_heads = (4, 4, 16) if smoke else (20, 20, 64)
    latent_heads = (2, 1, 48) if smoke else (16, 1, 576)
    latent = 32 if smoke else 512
    few = 16 if smoke else 1
    rows, kv = 64 // few, 4096 // few**2 * (2 if smoke else 1)
    chunk, window = 1024 // few // (4 if smoke else 1), kv // 4
    prompt, source = 8192 // few**2, 1500 // few
    decodes = ([1] * rows, [kv] * rows, device, heads)
    prefill = ([prompt], [prompt], device, heads)

    def timed(*batch: Any, **options: Any) -> Callable[[], Case]:
        return lambda: attention_case(*batch, with_reference=False, **options)

    def per_head(*sizes: int) -> torch.Tensor:
        return torch.rand(heads[0], *sizes, device=device)

    fp8 = {"k_scale": 1.0, "v_scale": 1.0}
    drafts = ([4] * rows, [kv] * rows, device, heads)
    tree = torch.ones(rows, 4, 4, dtype=torch.bool, device=device).tril()
    scores = {
        "logits_soft_cap": 50.0,
        "alibi_slopes": per_head(),
        "sinks": per_head(),
    }
    mixed = (
        [1] * (32 // few) + [chunk] * 2,
        [kv] * (32 // few) + [2 * chunk] * 2,
        device,
        heads,
    )
    shape = f"{rows} rows x {kv} keys"
    return {
        f"decode, {shape}": lambda: attention_case(*decodes),
        f"decode, {shape}, window {window}": timed(
            *decodes, most_seen=window, sliding_window=window
        ),
        f"decode, {shape}, chunks of {window}": timed(
            *decodes, most_seen=window, attention_chunk_size=window
        ),
        f"decode, {shape}, FP8 e4m3": timed(
            *decodes, cache_dtype=torch.float8_e4m3fn, **fp8
        ),
        f"decode, {shape}, FP8 e5m2": timed(
            *decodes, cache_dtype=torch.float8_e5m2, **fp8
        ),
        f"decode, {shape}, cap, ALiBi, sinks": timed(*decodes, **scores),
        f"decode, {shape}, position bias": timed(*decodes, position_bias=per_head(257)),
        f"verify, {rows} x 4 queries x {kv} keys": timed(*drafts),
        f"verify, {rows} x 4 queries x {kv} keys, trees": timed(
            *drafts, tree_mask=tree
        ),
        f"cross, {rows} rows x {source} keys, {small_heads[0]} heads": timed(
            [1] * rows, [source] * rows, device, small_heads, causal=False
        ),
        f"latent, {shape}, {latent_heads[0]} heads of {latent_heads[2]}": timed(
            *decodes[:3], latent_heads, value_size=latent
        ),
        f"prefill, 1 x {prompt}": lambda: attention_case(*prefill),
        f"prefill, 1 x {prompt}, window {window}": timed(
            *prefill, most_seen=window, sliding_window=window
        ),
        f"prefill, 1 x {prompt}, FP8 e4m3": timed(
            *prefill, cache_dtype=torch.float8_e4m3fn, **fp8
        ),
        f"prefill, 1 x {prompt}, cap, ALiBi, sinks": timed(*prefill, **scores),
        f"prefill, 1 x {prompt}, position bias": timed(
            *prefill, position_bias=per_head(257)
        ),
        f"encoder, {32 // few} x {source}, {small_heads[0]} heads": lambda: (
            encoder_case(32 // few, source, device, small_heads)
        ),
        f"mixed, {32 // few} decodes of {kv} keys, 2 chunks of {chunk}": lambda: (
            attention_case(*mixed)
        ),
        f"cascade, {rows} rows, {kv} keys shared, {window} of their own": lambda: (
            cascade_case(rows, kv, window, device, heads)
        ),
        f"cache write, {8192 // few} tokens": lambda: write_case(
            8192 // few, device, heads
        ),
        f"cache write, {8192 // few} tokens, FP8 e4m3": lambda: write_case(
            8192 // few, device, heads, torch.float8_e4m3fn, **fp8
        ),
        f"slot mapping, {256 // few} rows": lambda: slot_case(256 // few, device),
    }


def measure(file: Path, device: str, smoke: bool) -> int:
    """Time every case and write one line of JSON each; return 1 if one failed."""
    failed = False
    with file.open("w", encoding="utf-8") as sink:
        for name, make in all_cases(device, smoke).items():
            try:
                timed, work = make()
            except Exception as error:
                timed, work = [], {}
                row = {"case": name, "failed": f"{type(error).__name__}: {error}"}
                print(json.dumps(row), file=sink, flush=True)
                failed = True
            for implementation, call in timed:
                row = {"case": name, "implementation": implementation, **work}
                try:
                    row |= time_call(call, device, repeats=3 if smoke else 30)
                except Exception as error:
                    row["failed"] = f"{type(error).__name__}: {error}"[:600]
                    failed = True
                print(json.dumps(row), file=sink, flush=True)
    return int(failed)


def time_call(call: Callable[[], Any], device: str, repeats: int) -> dict[str, Any]:
    """Return median and quartiles in microseconds, fewer runs if one takes long.

    On a GPU what is timed is a captured graph where the call can be captured, so that the host's
    share does not show; that is timed by itself.
    """
    stopwatch = Stopwatch(device, FLUSH_BYTES)
    host = time_host(call)
    graph = captured(call) if stopwatch.on_gpu else None
    timed = call if graph is None else graph.replay
    repeats = max(3, min(repeats, int(5e6 / max(stopwatch.time(timed), 1))))
    low, median, high = quartiles([stopwatch.time(timed) for _ in range(repeats)])
    return {
        "median_us": round(median, 2),
        "quartiles_us": [round(low, 2), round(high, 2)],
        "runs": repeats,
        "graph": graph is not None,
        "host_us": round(host, 1),
    }


def main() -> int:
    """Time every case; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", type=Path, help="gets a line of JSON for each time")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, no figures")
    asked = parser.parse_args()
    return measure(asked.file, asked.device, asked.smoke)


if __name__ == "__main__":
    sys.exit(main())
