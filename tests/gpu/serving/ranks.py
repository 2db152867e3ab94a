"""Greedy tokens of vLLM on two GPUs, compared with one: tensor and decode context parallelism.

    python tests/gpu/serving/ranks.py RESULTS --backends FLASH_ATTN CUSTOM
    python tests/gpu/serving/ranks.py RESULTS --backends FLASH_ATTN CUSTOM --graphs --interleave 16

Each backend serves three times: on one GPU, with tensor parallelism on all, and with decode context
parallelism in addition. RESULTS gets a JSON line per engine, and one per comparison with one GPU.
The model has one KV head, which all ranks store, so ranks may share its keys. Its weights are
random and written to a file, from which each rank loads its part. Each rank is a process that makes
the same calls (vLLM's external launcher). Set NCCL_NVLS_ENABLE=0 where other users share the host.

With vLLM's build for CPUs, ranks are processes joined by gloo. Its CPU_ATTN does not share keys. An
engine on two ranks leaves its segments in /dev/shm, which must be removed before the next one:

    export TRITON_INTERPRET=1
    python tests/gpu/serving/ranks.py RESULTS --backends CUSTOM --model small-one-kv-head \
        --ways "one GPU" context --dtype float32 --prompts 4 --new 8 --longest 60 --step 64 \
        --limit 600
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from cpu import share_keys_on_cpu
from equality import compare, layers, serve
from models import MODELS
from run import WORK, environment

CUDA = torch.cuda.is_available()
WAYS = {"one GPU": (False, False), "tensor": (True, False), "context": (True, True)}
"""Whether heads, and whether keys, are distributed over all ranks."""
PASSED = (
    "model", "dtype", "implementation", "prompts", "new", "longest", "step", "interleave",
)  # fmt: skip
"""The options of the command line that each rank gets."""


def write_checkpoint(folder: Path, name: str) -> None:
    """Write a model with random weights whose logits differ from token to token."""
    import transformers

    torch.manual_seed(0)
    names = {"architectures", "model_type", "torch_dtype"}
    model = MODELS[name]
    sizes = {key: value for key, value in model.items() if key not in names}
    config = transformers.LlamaConfig(**sizes, initializer_range=0.1)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def build(asked: argparse.Namespace) -> Any:
    """Return an `LLM` of this rank."""
    from pagetwin.integrations.vllm import register
    from vllm import LLM

    register()
    if not CUDA:
        os.environ["PAGETWIN_VLLM_IMPLEMENTATION"] = asked.implementation
        share_keys_on_cpu()
    options: dict[str, Any] = {}
    if asked.ranks > 1:
        options["distributed_executor_backend"] = "external_launcher"
        options["tensor_parallel_size"] = asked.ranks
    if asked.shares_keys:
        options["decode_context_parallel_size"] = asked.ranks
        options["cp_kv_cache_interleave_size"] = asked.interleave
    compilation: dict[str, Any] = {"mode": 0}
    if asked.graphs:
        compilation["cudagraph_mode"] = "FULL_DECODE_ONLY"
    return LLM(
        model=str(asked.folder),
        skip_tokenizer_init=True,
        dtype=asked.dtype,
        max_model_len=4096,
        max_num_seqs=32,
        # the longest prompts are computed in several steps
        max_num_batched_tokens=asked.step,
        enforce_eager=not asked.graphs,
        compilation_config=compilation,
        gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=1 << 30,
        enable_prefix_caching=False,
        attention_backend=asked.work,
        seed=0,
        **options,
    )


def work(asked: argparse.Namespace) -> None:
    """Serve on one rank; rank 0 writes what was found."""
    found: dict[str, Any]
    try:
        began = time.time()
        llm = build(asked)
        built = time.time() - began
        rows = serve(llm, asked)
        found = {"event": "served", "layers": layers(llm), "rows": rows}
        found["build_s"] = round(built, 1)
    except Exception as error:
        traceback.print_exc()
        message = f"{type(error).__name__}: {error}"[:600]
        found = {"event": "failed", "error": message}
    if os.environ.get("RANK", "0") == "0":
        asked.results.write_text(json.dumps(found))
    # vLLM's shutdown takes seconds
    os._exit(0)


def run_engine(
    asked: argparse.Namespace, backend: str, way: str, folder: Path
) -> dict[str, Any]:
    """Return what an engine has found; each of its ranks is a process with a time limit."""
    splits_heads, shares_keys = WAYS[way]
    ranks = asked.ranks if splits_heads else 1
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    file = folder / "found.json"
    file.unlink(missing_ok=True)
    command = [
        sys.executable, __file__, str(file), "--work", backend, "--folder", str(folder),
        "--ranks", str(ranks),
    ]  # fmt: skip
    for name in PASSED:
        command += [f"--{name}", str(getattr(asked, name))]
    command += ["--shares-keys"] if shares_keys else []
    command += ["--graphs"] if asked.graphs else []
    processes = []
    for rank in range(ranks):
        where = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        where |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        where |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        processes.append(subprocess.Popen(command, env={**environment(WORK), **where}))
    end = time.monotonic() + asked.limit
    late = []
    for rank, process in enumerate(processes):
        try:
            process.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            late.append(rank)
            process.kill()
    if file.exists():
        found: dict[str, Any] = json.loads(file.read_text())
        return found
    return {"event": "failed", "error": f"no result; ranks after the limit: {late}"}


def restored(rows: list[Any]) -> list[Any]:
    """Return rows whose tokens are numbers again, which JSON has made text."""
    return [
        (
            tokens,
            [{int(token): value for token, value in top.items()} for top in tops],
        )
        for tokens, tops in rows
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--backends", nargs="+", default=["FLASH_ATTN", "CUSTOM"])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--model", choices=list(MODELS), default="one-kv-head")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--implementation", default="optimized", help="on a CPU")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--new", type=int, default=48, help="tokens after a prompt")
    parser.add_argument("--longest", type=int, default=1600, help="tokens of a prompt")
    parser.add_argument("--step", type=int, default=1024, help="new tokens of a step")
    parser.add_argument("--interleave", type=int, default=1, help="positions in a row")
    parser.add_argument("--graphs", action="store_true", help="decodes are captured")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds per engine")
    parser.add_argument("--folder", type=Path, help="for a rank: where the model is")
    parser.add_argument("--work", default="", help="for a rank: its backend")
    parser.add_argument("--shares-keys", action="store_true", help="for a rank")
    asked = parser.parse_args()
    if asked.work:
        work(asked)
    import vllm

    first = {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "ranks": asked.ranks,
        "device": torch.cuda.get_device_name() if CUDA else "cpu",
        "gpus": torch.cuda.device_count(),
        "graphs": asked.graphs,
        **{name: getattr(asked, name) for name in PASSED},
    }

    def say(**fields: Any) -> None:
        line = json.dumps({**first, **fields})
        print(line[:800], flush=True)
        with asked.results.open("a") as file:
            file.write(line + "\n")

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_checkpoint(folder, asked.model)
        for backend in asked.backends:
            one: list[Any] = []
            for way in asked.ways:
                found = run_engine(asked, backend, way, folder)
                rows = restored(found.pop("rows", []))
                say(backend=backend, way=way, **found)
                if rows and one:
                    pair = compare(rows, one)
                    say(event="compared", backend=backend, way=way, **pair)
                one = one or rows


if __name__ == "__main__":
    main()
