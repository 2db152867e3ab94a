"""Greedy tokens of vLLM on two GPUs, compared with one: tensor and decode context parallelism.

    python tests/gpu/serving/ranks.py RESULTS --backends FLASH_ATTN CUSTOM

Each backend serves three times: on one GPU, with tensor parallelism on all, and with decode context
parallelism in addition. RESULTS gets a JSON line per engine, and one per comparison with one GPU.
The model has one KV head, which all ranks store, so ranks may share its keys. Its weights are
random and written to a file, from which each rank loads its part. Each rank is a process that makes
the same calls (vLLM's external launcher). Set NCCL_NVLS_ENABLE=0 where other users share the host.
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
from equality import compare, serve
from models import LLAMA, SMALL

MODEL = {**LLAMA, **SMALL, "num_key_value_heads": 1, "head_dim": 64}
WAYS = {"one GPU": (False, False), "tensor": (True, False), "context": (True, True)}
"""Whether heads, and whether keys, are distributed over all ranks."""


def write_checkpoint(folder: Path) -> None:
    """Write a model with random weights whose logits differ from token to token."""
    import transformers

    torch.manual_seed(0)
    names = {"architectures", "model_type", "torch_dtype"}
    sizes = {name: value for name, value in MODEL.items() if name not in names}
    config = transformers.LlamaConfig(**sizes, initializer_range=0.1)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)


def build(folder: Path, backend: str, ranks: int, shares_keys: bool) -> Any:
    """Return an `LLM` of this rank."""
    from pagetwin.integrations.vllm import register
    from vllm import LLM

    register()
    options: dict[str, Any] = {}
    if ranks > 1:
        options["distributed_executor_backend"] = "external_launcher"
        options["tensor_parallel_size"] = ranks
    if shares_keys:
        options["decode_context_parallel_size"] = ranks
    return LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=4096,
        max_num_seqs=32,
        max_num_batched_tokens=4096,
        enforce_eager=True,
        compilation_config={"mode": 0},
        gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=1 << 30,
        enable_prefix_caching=False,
        attention_backend=backend,
        seed=0,
        **options,
    )


def work(asked: argparse.Namespace) -> None:
    """Serve on one rank; rank 0 writes what was found."""
    found: dict[str, Any]
    try:
        began = time.time()
        llm = build(asked.folder, asked.work, asked.ranks, asked.shares_keys)
        built = time.time() - began
        rows = serve(llm, MODEL["vocab_size"], asked.longest)
        found = {"event": "served", "build_s": round(built, 1), "rows": rows}
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
        "--ranks", str(ranks), "--longest", str(asked.longest),
    ]  # fmt: skip
    command += ["--shares-keys"] if shares_keys else []
    processes = []
    for rank in range(ranks):
        where = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        where |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        where |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        processes.append(subprocess.Popen(command, env={**os.environ, **where}))
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
    parser.add_argument("--longest", type=int, default=1600, help="tokens of a prompt")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds per engine")
    parser.add_argument("--folder", type=Path, help="for a rank: where the model is")
    parser.add_argument("--work", default="", help="for a rank: its backend")
    parser.add_argument("--shares-keys", action="store_true", help="for a rank")
    asked = parser.parse_args()
    if asked.work:
        work(asked)
    gpus = torch.cuda.device_count()
    first = {"torch": torch.__version__, "ranks": asked.ranks, "gpus": gpus}

    def say(**fields: Any) -> None:
        line = json.dumps({**first, **fields})
        print(line[:400], flush=True)
        with asked.results.open("a") as file:
            file.write(line + "\n")

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_checkpoint(folder)
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
