"""nano-vllm on pagetwin by the names of flash-attn: tokens and throughput.

    python tests/gpu/serving/nano_vllm.py CHECKOUT OUTDIR --attention reference optimized fa3

CHECKOUT is an unchanged checkout of github.com/GeeeekExplorer/nano-vllm. The model is a Qwen3 with
the shapes of 0.6B and seeded weights, so nothing is downloaded. nano-vllm captures its decodes in
CUDA graphs, splits long prompts and reuses blocks of equal prefixes; with `reference` it runs
eagerly. `fa3` calls the operators of vLLM's wheel (the file that PAGETWIN_FA3 names).

Each attention has a process of its own. All tokens are scored afterwards by transformers' Qwen3 in
float32: how far the logit of a generated token is below the largest one. OUTDIR/nano_vllm.jsonl
gets a line per attention.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 8192
CONFIG = {
    "vocab_size": VOCABULARY,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "attention_bias": False,
    # larger than usual: otherwise the logits of random weights are all alike
    "initializer_range": 0.05,
}


def write_model(folder: Path) -> None:
    """Write a seeded checkpoint and a tokenizer whose words are numbers."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(**CONFIG, dtype="bfloat16")
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    write_tokenizer(folder, VOCABULARY)


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """Write a tokenizer whose words are numbers."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {str(number): number for number in range(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="1", unk_token="0"
    ).save_pretrained(folder)


def draw_prompts(count: int) -> tuple[list[list[int]], list[int]]:
    """Return prompts, of which a third have a prefix of 768 tokens in common, and their outputs."""
    drawn = random.Random(0)

    def tokens(number: int) -> list[int]:
        return [drawn.randrange(2, VOCABULARY) for _ in range(number)]

    prefix = tokens(768)
    prompts = [
        (prefix if index % 3 == 0 else []) + tokens(drawn.randint(100, 1024))
        for index in range(count)
    ]
    return prompts, [drawn.randint(32, 256) for _ in range(count)]


def fa3_module() -> types.ModuleType:
    """Return a module whose two functions call FlashAttention-3 of vLLM's wheel."""
    libraries: Any = torch.ops
    libraries.load_library(os.environ["PAGETWIN_FA3"])
    operator = libraries._vllm_fa3_C.fwd
    arguments = operator.default._schema.arguments
    required = {
        "softcap": 0.0,
        "has_softcap": False,
        "attention_chunk": 0,
        "is_rotary_interleaved": True,
        "num_splits": 0,
        "sm_margin": 0,
        "window_size_left": -1,
        "window_size_right": -1,
        "cp_world_size": 1,
        "cp_rank": 0,
        "is_causal": True,
    }

    def call(**given: Any) -> Any:
        given = required | given
        return operator(*(given.get(argument.name) for argument in arguments))[0]

    def flash_attn_varlen_func(
        q: Any, k: Any, v: Any, *, block_table: Any, **given: Any
    ) -> Any:
        given.pop("causal")
        starts = given.pop("cu_seqlens_k")
        if block_table is None:
            return call(q=q, k=k, v=v, cu_seqlens_k=starts, **given)
        used = starts.diff()
        return call(q=q, k=k, v=v, page_table=block_table, seqused_k=used, **given)

    def flash_attn_with_kvcache(
        q: Any, k: Any, v: Any, cache_seqlens: Any, block_table: Any, **given: Any
    ) -> Any:
        given.pop("causal")
        return call(
            q=q, k=k, v=v, seqused_k=cache_seqlens, page_table=block_table, **given
        )

    module = types.ModuleType("flash_attn")
    module.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    module.flash_attn_with_kvcache = flash_attn_with_kvcache  # type: ignore[attr-defined]
    return module


def serve(asked: argparse.Namespace, attention: str) -> dict[str, Any]:
    """Return tokens and times of one attention, in this process."""
    if attention == "fa3":
        sys.modules["flash_attn"] = fa3_module()
    else:
        from pagetwin.integrations.flash_attn import install

        install(attention)
    sys.path.insert(0, str(asked.checkout))
    from nanovllm import LLM, SamplingParams

    start = time.perf_counter()
    engine = LLM(
        str(asked.out / "model"),
        enforce_eager=attention == "reference",
        max_num_batched_tokens=4096,
        max_num_seqs=64,
        gpu_memory_utilization=asked.memory,
    )
    started = time.perf_counter() - start
    prompts, lengths = draw_prompts(asked.requests)
    # close to the largest logit: nano-vllm has no greedy sampling
    sampling = [SamplingParams(1e-6, length, True) for length in lengths]
    seconds, tokens = [], []
    # of the first turn some calls compile; in the second one, whole prompts are hits
    for _ in range(asked.turns):
        torch.cuda.synchronize()
        start = time.perf_counter()
        found = engine.generate(prompts, sampling, use_tqdm=False)
        torch.cuda.synchronize()
        seconds.append(round(time.perf_counter() - start, 3))
        tokens.append([answer["token_ids"] for answer in found])
    return {
        "attention": attention,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "start_s": round(started, 1),
        "seconds": seconds,
        "tokens": tokens,
        "blocks": len(engine.scheduler.block_manager.blocks),
    }


@torch.inference_mode()
def score(folder: Path, tokens: list[list[int]], prompts: list[list[int]]) -> Any:
    """Return how far each generated token's logit is below the largest one, in float32."""
    from transformers import Qwen3ForCausalLM

    torch.backends.cuda.matmul.allow_tf32 = False
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).cuda()
    missed = []
    for prompt, answer in zip(prompts, tokens, strict=True):
        ids = torch.tensor([prompt + answer], device="cuda")
        logits = model(ids, logits_to_keep=len(answer) + 1).logits[0, :-1]
        chosen = logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
        missed += (logits.amax(1) - chosen).tolist()
    return missed


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--attention", nargs="+", default=["reference", "optimized"])
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument(
        "--memory", type=float, default=0.2, help="share of the GPU's memory"
    )
    parser.add_argument(
        "--limit", type=float, default=240, help="seconds per attention"
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    if asked.one:
        record = serve(asked, asked.one)
        (asked.out / f"{asked.one}.json").write_text(json.dumps(record))
        return
    folder = asked.out / "model"
    if not folder.exists():
        write_model(folder)
    prompts, _ = draw_prompts(asked.requests)
    first: list[list[int]] | None = None
    for attention in asked.attention:
        command = [sys.executable, *sys.argv, "--one", attention]
        try:
            code = subprocess.run(command, timeout=asked.limit).returncode
        except subprocess.TimeoutExpired:
            code = 124
        if code:
            print(f"{attention}: exit code {code}", flush=True)
            continue
        record = json.loads((asked.out / f"{attention}.json").read_text())
        turns = record.pop("tokens")
        first = first or turns[0]
        missed = sorted(score(folder, turns[-1], prompts))
        pairs = list(zip(first, turns[-1], strict=True))
        record |= {
            "generated": len(missed),
            "equal_to_first": sum(one == other for one, other in pairs),
            "turns_equal": sum(
                a == b for a, b in zip(turns[0], turns[-1], strict=True)
            ),
            "largest_in_float32": sum(gap == 0 for gap in missed) / len(missed),
            "gap_99": missed[len(missed) * 99 // 100],
            "gap_max": missed[-1],
        }
        with (asked.out / "nano_vllm.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(record, flush=True)


if __name__ == "__main__":
    main()
