"""Greedy tokens of several attention backends on one small model, compared with each other.

    python tests/gpu/serving/equality.py RESULTS --model gemma --backends FLASH_ATTN CUSTOM

Two correct backends differ where two tokens are nearly equally probable, and from there on a prompt
is another one. So each prompt is compared until its first difference. RESULTS gets a JSON line per
backend, and one per pair. `CUSTOM:reference` is this project's backend with its reference. The
engines run one after the other in this process, without graphs. With vLLM's build for CPUs, CUSTOM
runs in Triton's interpreter, where bfloat16 is wrong:

    export TRITON_INTERPRET=1
    python tests/gpu/serving/equality.py RESULTS --model small --backends CPU_ATTN CUSTOM \
        --dtype float32 --prompts 4 --new 8 --longest 60

A model with an indexer needs DeepGEMM, which vLLM's indexer calls, and a GPU. Its prompts are
longer than the selection, and a rounding may change the last keys of one:

    python tests/gpu/serving/equality.py RESULTS --model sparse-deepseek \
        --backends FLASHMLA_SPARSE CUSTOM CUSTOM:reference --kv-cache-dtype fp8_ds_mla
"""

import argparse
import gc
import json
import os
import random
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from models import DRAFTS, MODELS, draw_prompt, engine_options, write_model
from weights import seed_weights

CUDA = torch.cuda.is_available()
TOP = 5

Rows = list[tuple[list[int], list[dict[int, float]]]]
"""The tokens of each prompt, and the log-probabilities of the most probable ones at each step."""


def build(asked: argparse.Namespace, backend: str, folder: Path) -> Any:
    """Return an `LLM` with seeded weights."""
    from pagetwin.integrations.vllm import register
    from vllm import LLM
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    register()
    backend, _, twin = backend.partition(":")
    default = "optimized" if CUDA else asked.implementation
    os.environ["PAGETWIN_VLLM_IMPLEMENTATION"] = twin or default
    DummyModelLoader.load_weights = lambda self, model, config: seed_weights(model)
    options: dict[str, Any] = {}
    if asked.ngram:
        options["speculative_config"] = DRAFTS
    return LLM(
        model=str(write_model(folder, asked.model)),
        load_format="dummy",
        dtype=asked.dtype,
        kv_cache_dtype=asked.kv_cache_dtype,
        max_num_seqs=32,
        enforce_eager=True,
        compilation_config={"mode": 0},
        gpu_memory_utilization=0.05,
        kv_cache_memory_bytes=1 << 30,
        enable_prefix_caching=False,
        attention_backend=backend,
        seed=0,
        **engine_options(asked.model, 4096, 4096),
        **options,
    )


def layers(llm: Any) -> list[str]:
    """Return the classes that run the model's attention layers."""
    core = llm.llm_engine.engine_core.engine_core
    model = core.model_executor.driver_worker.worker.model_runner.get_model()
    found = {type(module.impl) for module in model.modules() if hasattr(module, "impl")}
    return sorted(f"{kind.__module__}.{kind.__name__}" for kind in found)


def serve(llm: Any, asked: argparse.Namespace) -> Rows:
    """Return greedy tokens and log-probabilities; each prompt repeats a part of itself."""
    from vllm import SamplingParams

    draw = random.Random(7)
    prompts = [
        draw_prompt(asked.model, draw, draw.randrange(8, asked.longest))
        for _ in range(asked.prompts)
    ]
    params = SamplingParams(
        temperature=0.0,
        max_tokens=asked.new,
        ignore_eos=True,
        detokenize=False,
        logprobs=TOP,
    )
    rows = []
    for output in llm.generate(prompts, params, use_tqdm=False):
        one = output.outputs[0]
        tops = [
            {token: float(given.logprob) for token, given in step.items()}
            for step in one.logprobs
        ]
        rows.append((list(one.token_ids), tops))
    return rows


def compare(rows: Rows, others: Rows) -> dict[str, Any]:
    """Return how the greedy tokens of two engines differ."""
    equal, before, margins, worst = 0, 0, [], 0.0
    for (tokens, tops), (theirs, their_tops) in zip(rows, others, strict=True):
        pairs = enumerate(zip(tokens, theirs, strict=True))
        at = next((step for step, (one, two) in pairs if one != two), len(tokens))
        before += at
        for step in range(at):
            token = tokens[step]
            worst = max(worst, abs(tops[step][token] - their_tops[step][token]))
        if at == len(tokens):
            equal += 1
            continue
        other = tops[at].get(theirs[at])
        margins.append(None if other is None else tops[at][tokens[at]] - other)
    known = [margin for margin in margins if margin is not None]
    return {
        "prompts": len(rows),
        "equal_prompts": equal,
        "tokens": sum(len(tokens) for tokens, _ in rows),
        "tokens_before_first_difference": before,
        "margin_at_first_difference_max": round(max(known, default=0.0), 4),
        "not_in_top": margins.count(None),
        "logprob_difference_before_max": round(worst, 5),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--model", choices=list(MODELS), default="tiny")
    parser.add_argument("--backends", nargs="+", default=["FLASH_ATTN", "CUSTOM"])
    parser.add_argument("--ngram", action="store_true", help="speculative decoding")
    parser.add_argument("--longest", type=int, default=1600, help="tokens of a prompt")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--new", type=int, default=48, help="tokens after a prompt")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--implementation", default="optimized", help="on a CPU")
    asked = parser.parse_args()
    import vllm

    first = {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if CUDA else "cpu",
        "model": asked.model,
        "dtype": asked.dtype,
        "kv_cache_dtype": asked.kv_cache_dtype,
        "ngram": asked.ngram,
        "implementation": "optimized" if CUDA else asked.implementation,
    }

    def say(**fields: Any) -> None:
        with asked.results.open("a") as file:
            file.write(json.dumps({**first, **fields}) + "\n")

    done: dict[str, Rows] = {}
    for backend in asked.backends:
        began = time.time()
        try:
            with tempfile.TemporaryDirectory() as folder:
                llm = build(asked, backend, Path(folder))
            built = time.time() - began
            rows = serve(llm, asked)
            again = serve(llm, asked)
            repeated = sum(
                one[0] == two[0] for one, two in zip(rows, again, strict=True)
            )
            say(
                event="served",
                backend=backend,
                layers=layers(llm),
                build_s=round(built, 1),
                repeated_prompts=repeated,
            )
            for other, theirs in done.items():
                pair = compare(rows, theirs)
                say(event="compared", backend=backend, other=other, **pair)
            done[backend] = rows
            del llm
        except Exception as error:
            traceback.print_exc()
            message = f"{type(error).__name__}: {error}"[:600]
            say(event="failed", backend=backend, error=message)
        gc.collect()
        from vllm.distributed import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()
    # vLLM's shutdown takes seconds
    os._exit(0)


if __name__ == "__main__":
    main()
