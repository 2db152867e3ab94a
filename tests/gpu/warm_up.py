"""Times of the warm-up with an empty kernel cache, and whether calls after it compile anything.

    python tests/gpu/warm_up.py [--threads 1 16] [--only llama gpt-oss gemma latent]

Prints one JSON line per model and number of threads. Each runs in a process of its own. The exit
code is 1 if a later call compiled a kernel or gave a wrong result.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch
import triton
from pagetwin import optimized
from pagetwin.optimized import AttentionOptions, WarmUpSpec, warm_up
from torch import Tensor

CAPPED = {"logits_soft_cap": 50.0}
MODELS: dict[str, tuple[int, int, int, list[dict[str, Any]]]] = {
    "llama": (32, 8, 128, [{}]),
    "gpt-oss": (64, 8, 64, [{"sinks": 64, "sliding_window": 128}, {"sinks": 64}]),
    "gemma": (16, 8, 256, [{**CAPPED, "sliding_window": 4096}, CAPPED]),
    "latent": (16, 1, 576, [{}]),
}
"""Query heads, KV heads, head size, and the options of each kind of layer. `sinks` is their number.
"""
LATENT_SIZE = 512
"""Elements of the values of a latent cache, which are the first of its keys."""
BLOCKS, BLOCK_SIZE = 4096, 16
BOUNDS = {"max_num_reqs": 256, "max_query_len": 8192, "max_seq_len": 8192}
CALLS = [
    ([1], 700), ([1] * 7, 4000), ([1] * 30, 8000), ([1] * 200, 8000), ([1] * 256, 300),
    ([64, 1] * 4, 2000), ([700] * 3, 8000), ([8192], 8192), ([1, 5, 9, 1] * 10, 3000),
    ([2] * 33, 8000),
]  # fmt: skip
"""New tokens of each request, and keys of all of them."""


def make_cache(name: str, kv_heads: int, size: int) -> tuple[Tensor, Tensor]:
    """Return keys and values of zeros, [BLOCKS, BLOCK_SIZE, kv_heads, size]."""
    shape = (BLOCKS, BLOCK_SIZE, kv_heads, size)
    if name == "latent":
        key = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
        return key, key[..., :LATENT_SIZE]
    pair = torch.zeros(
        BLOCKS, 2, *shape[1:], dtype=torch.bfloat16, device="cuda"
    ).unbind(1)
    return pair[0], pair[1]


def count_wrong(
    key: Tensor, value: Tensor, heads: int, options: AttentionOptions, longest: int
) -> int:
    """Make all calls, and return how many outputs are not 0, which all values are."""
    wrong = 0
    for lens, keys in CALLS:
        new = [min(length, longest) for length in lens]
        keys = max(keys, *new)
        starts = torch.tensor([0, *new], device="cuda").cumsum(0).int()
        query = torch.randn(
            sum(new), heads, key.shape[3], dtype=key.dtype, device="cuda"
        )
        table = torch.zeros(len(new), 512, dtype=torch.int32, device="cuda")
        seq_lens = torch.full_like(starts[1:], keys)
        out = optimized.paged_attention(
            query, key, value, table, starts, seq_lens, max(new), keys, options=options
        )
        wrong += bool((out != 0).any())
    return wrong


def run(name: str, threads: int) -> dict[str, Any]:
    """Warm up for a model, make calls, and return what was compiled and when."""
    compiled: list[tuple[str, float]] = []

    def note(
        src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool
    ) -> None:
        stages = sum(stage for _, stage in times.lowering_stages)
        compiled.append((src.name, (times.ir_initialization + stages) / 1e6))

    triton.knobs.compilation.listener = note
    heads, kv_heads, size, kinds = MODELS[name]
    key, value = make_cache(name, kv_heads, size)
    options = []
    for kind in kinds:
        sinks = {"sinks": torch.ones(heads, device="cuda")} if "sinks" in kind else {}
        options.append(AttentionOptions(**{**kind, **sinks}))
    # latent prefills are not paged calls
    bounds = {**BOUNDS, "max_query_len": 1} if name == "latent" else BOUNDS
    spec = WarmUpSpec(
        key_cache=key, value_cache=value, num_query_heads=heads, num_threads=threads,
        options=tuple(options), **bounds,
    )  # fmt: skip
    torch.cuda.synchronize()
    began, used = time.perf_counter(), sum(os.times()[:4])
    warm_up(spec)
    torch.cuda.synchronize()
    found = {
        "model": name,
        "threads": threads,
        "cpus": len(os.sched_getaffinity(0)),
        "seconds": round(time.perf_counter() - began, 1),
        "cpu_seconds": round(sum(os.times()[:4]) - used, 1),
        "kernels": len(compiled),
        "slowest_s": round(max(seconds for _, seconds in compiled), 1),
    }
    before = len(compiled)
    longest = bounds["max_query_len"]
    found["wrong"] = sum(
        count_wrong(key, value, heads, option, longest) for option in options
    )
    torch.cuda.synchronize()
    found["compiled_later"] = [kernel for kernel, _ in compiled[before:]]
    return found


def main() -> int:
    """Run each model with each number of threads in a process with an empty cache."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--only", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    first = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    if asked.one:
        print(json.dumps(first | run(asked.only[0], asked.threads[0])), flush=True)
        return 0
    is_right = True
    for threads in asked.threads:
        for name in asked.only:
            command = [sys.executable, __file__, "--one", "--only", name]
            with tempfile.TemporaryDirectory() as folder:
                done = subprocess.run(
                    [*command, "--threads", str(threads)],
                    env={**os.environ, "TRITON_CACHE_DIR": folder},
                    stdout=subprocess.PIPE,
                    text=True,
                    check=False,
                )
            print(done.stdout, end="", flush=True)
            found = json.loads(done.stdout) if done.returncode == 0 else {}
            is_right &= found.get("wrong") == 0 and not found.get("compiled_later")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
