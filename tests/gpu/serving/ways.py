"""Greedy tokens of a family's model by each way into this project: one function per engine.

`engine_table.py` runs each engine in a process of its own and compares the tokens.
"""

import argparse
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import families
import real_weights
import torch
from families import ENCODER_DECODER, FAMILIES
from models import SAMPLE_RATE

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
KERNEL = "pagetwin/flash-attn2"
"""transformers decodes over block tables by kernels whose name has a 2 or a 3 after "flash"."""
VERIFIED = "kernels-community/vllm-flash-attn3"
"""The one kernel that transformers takes for gpt-oss; it gets the folder of `KERNEL`."""

OWN_BACKEND = "FLASH_ATTN" if CUDA else "CPU_ATTN"
"""What vLLM itself chooses."""
CALLS: Counter[str] = Counter()

Found = tuple[list[list[int]], dict[str, Any]]
"""The tokens of each prompt, and what shows which functions ran."""


def load(asked: argparse.Namespace, family: str) -> Any:
    """Return the model of transformers with the weights of its folder."""
    torch.backends.cuda.matmul.allow_tf32 = False
    return families.build(family).to(getattr(torch, asked.dtype)).to(DEVICE)


def run_plain(asked: argparse.Namespace, family: str) -> Found:
    """Run the library alone, all prompts in one padded batch."""
    model = load(asked, family)
    shown: dict[str, Any] = {}
    if family == real_weights.FAMILY:
        shown["scores"] = real_weights.score_call(model, families.real_text())
    return families.library_tokens(model, family), shown


def run_transformers(asked: argparse.Namespace, family: str) -> Found:
    """Run `generate` of the integration, in few blocks, so that prompts come in chunks."""
    from pagetwin.integrations.transformers import Statistics, generate

    model, statistics = load(asked, family), Statistics()
    limits: dict[str, Any] = {"max_new_tokens": families.NEW_TOKENS, "eos_token_id": []}
    given: Any = families.prompts(family)
    if family == "Whisper":
        given = list(families.features(family).to(model.dtype).to(DEVICE))
    if family in ENCODER_DECODER:
        limits["decoder_prompt"] = [FAMILIES[family][1]["decoder_start_token_id"]]
    else:
        limits["max_batch_tokens"] = 64
    tokens = generate(model, given, asked.twin, **limits, statistics=statistics)
    shown: dict[str, Any] = {"calls": sum(statistics.calls.values())}
    if family == real_weights.FAMILY:
        text = families.real_text()
        shown["scores"] = real_weights.score_steps(model, text, asked.twin)
    return tokens, shown


def run_continuous(asked: argparse.Namespace, family: str) -> Found:
    """Run the library's continuous batching with the names of flash-attn as a kernel of the Hub."""
    from pagetwin.integrations.flash_attn import write_hub_kernel

    folder = Path(tempfile.mkdtemp()) / "kernel"
    write_hub_kernel(folder, asked.twin)
    os.environ["LOCAL_KERNELS"] = f"{KERNEL}={folder}:{VERIFIED}={folder}"
    import transformers

    calls = _count_calls()
    model = load(asked, family)
    name = VERIFIED if family == "gpt-oss" else KERNEL
    model.set_attn_implementation(name, allow_all_kernels=True)
    if family in ENCODER_DECODER:
        raise NotImplementedError(
            "its requests are prompts of a decoder; it has no encoder"
        )
    config = transformers.GenerationConfig(
        max_new_tokens=families.NEW_TOKENS,
        do_sample=False,
        eos_token_id=-1,
        pad_token_id=0,
    )
    sizes: dict[str, Any] = {"num_blocks": 64, "max_batch_tokens": 64}
    sizes["use_cuda_graph"] = asked.graphs
    found = model.generate_batch(
        families.prompts(family),
        generation_config=config,
        continuous_batching_config=transformers.ContinuousBatchingConfig(**sizes),
        progress_bar=False,
    )
    failed = [str(one.error) for one in found.values() if one.error]
    if failed or len(found) < len(families.LENGTHS):
        raise RuntimeError(f"the generation loop ended: {failed[:1]}")
    by_prompt = {tuple(one.prompt_ids): one.generated_tokens for one in found.values()}
    tokens = [list(by_prompt[tuple(prompt)]) for prompt in families.prompts(family)]
    shown: dict[str, Any] = {"calls": dict(calls)}
    if family == real_weights.FAMILY:
        # by flash_attn_func: continuous batching has no log-probabilities of prompts
        model.set_attn_implementation(name, allow_all_kernels=True)
        shown["scores"] = real_weights.score_call(model, families.real_text())
    return tokens, shown


def _count_calls() -> Counter[str]:
    """Count the calls of each function of flash-attn from now on."""
    from pagetwin.integrations.flash_attn import FlashAttention
    from pagetwin.integrations.flash_attn.install import FUNCTIONS

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*given: Any, **named: Any) -> Any:
            CALLS[name] += 1
            return function(*given, **named)

        return call

    for name in FUNCTIONS:
        function = getattr(FlashAttention, name)
        if not hasattr(function, "__wrapped__"):
            setattr(FlashAttention, name, counted(name, function))
    CALLS.clear()
    return CALLS


def run_vllm(asked: argparse.Namespace, family: str) -> Found:
    """Run the engine of vLLM; without a twin, on its own backend."""
    os.environ["PAGETWIN_VLLM_IMPLEMENTATION"] = asked.twin or "reference"
    options: dict[str, Any] = {"compilation_config": {"mode": 0}}
    if not CUDA:
        # its platform for CPUs has no latent attention: the keys of all heads are computed
        os.environ["VLLM_MLA_DISABLE"] = "1"
        # its compiled rotary embedding for CPUs is wrong for a query of 3 axes (0.32.0)
        if family.startswith("DeepSeek"):
            options["compilation_config"]["custom_ops"] = ["none"]
    from pagetwin.integrations.vllm import register
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.model_executor.models import registry

    # otherwise vLLM imports each architecture in another process first
    registry._run_in_subprocess = lambda function: function()
    register()
    folder = families.write(family, asked.work, asked.dtype)
    if asked.graphs:
        options["compilation_config"]["cudagraph_mode"] = "FULL_DECODE_ONLY"
    else:
        options["enforce_eager"] = True
    given: Any = [{"prompt_token_ids": prompt} for prompt in families.prompts(family)]
    if family == "Whisper":
        start = [FAMILIES[family][1]["decoder_start_token_id"]]
        given = [
            {
                "encoder_prompt": {
                    "prompt": "",
                    "multi_modal_data": {"audio": (tones, SAMPLE_RATE)},
                },
                "decoder_prompt": {"prompt_token_ids": start},
            }
            for tones in families.audio(family)
        ]
        options["max_num_batched_tokens"] = 16 * 50 * families.AUDIO_SECONDS
    else:
        options |= {
            "skip_tokenizer_init": True,
            "max_num_batched_tokens": families.LONGEST,
        }
    llm = LLM(
        model=str(folder),
        dtype=asked.dtype,
        max_model_len=families.LONGEST,
        max_num_seqs=32,
        gpu_memory_utilization=0.05,
        kv_cache_memory_bytes=1 << 28,
        attention_backend="CUSTOM" if asked.twin else OWN_BACKEND,
        seed=0,
        **options,
    )
    params = SamplingParams(
        temperature=0.0,
        max_tokens=families.NEW_TOKENS,
        ignore_eos=True,
        detokenize=False,
    )
    found = llm.generate(given, params, use_tqdm=False)
    shown: dict[str, Any] = {}
    if family == real_weights.FAMILY:
        shown["scores"] = real_weights.score_vllm(llm, families.real_text())
    core = llm.llm_engine.engine_core.engine_core
    model = core.model_executor.driver_worker.worker.model_runner.get_model()
    kinds = {type(layer.impl) for layer in model.modules() if hasattr(layer, "impl")}
    shown["layers"] = sorted(f"{kind.__module__}.{kind.__name__}" for kind in kinds)
    del llm, core, model
    cleanup_dist_env_and_memory()
    tokens = [list(output.outputs[0].token_ids) for output in found]
    return tokens, shown


def run_sglang(asked: argparse.Namespace, family: str) -> Found:
    """Run the engine of SGLang on a CPU; without a twin, on its backend of plain torch."""
    rejected = {"Whisper": "cross-attention"}
    rejected |= dict.fromkeys(("DeepSeek V2", "DeepSeek V3"), "latent attention (MLA)")
    if family in rejected:
        raise NotImplementedError(f"the plugin rejects {rejected[family]}")
    if family in ENCODER_DECODER:
        raise NotImplementedError(f"{family} has no SGlang implementation")
    os.environ["PAGETWIN_SGLANG_IMPLEMENTATION"] = asked.twin or "reference"
    import sglang

    engine = sglang.Engine(
        model_path=str(families.write(family, asked.work, asked.dtype)),
        device="cpu",
        attention_backend="pagetwin" if asked.twin else "torch_native",
        page_size=16,
        skip_tokenizer_init=True,
        dtype=asked.dtype,
        max_total_tokens=2048,
        mem_fraction_static=0.2,
        context_length=families.LONGEST,
        chunked_prefill_size=64,
        max_running_requests=8,
        disable_overlap_schedule=True,
        sampling_backend="pytorch",
        grammar_backend="none",
    )
    sampling = {"temperature": 0, "max_new_tokens": families.NEW_TOKENS}
    sampling["ignore_eos"] = True
    try:
        found = engine.generate(
            input_ids=families.prompts(family), sampling_params=sampling
        )
    finally:
        engine.shutdown()
    return [list(one["output_ids"]) for one in found], {}


def run_nano(asked: argparse.Namespace, family: str) -> Found:
    """Run nano-vllm on the names of flash-attn; its sampling is nearly greedy."""
    from pagetwin.integrations.flash_attn import install

    if family != "Qwen3":
        raise NotImplementedError("nano-vllm has Qwen3 alone")
    install(asked.twin)
    sys.path.insert(0, str(asked.nano))
    from nano_vllm import write_tokenizer
    from nanovllm import LLM, SamplingParams

    folder = families.write(family, asked.work, asked.dtype)
    write_tokenizer(folder, families.VOCABULARY)
    engine = LLM(
        str(folder),
        enforce_eager=not asked.graphs,
        max_model_len=families.LONGEST,
        max_num_batched_tokens=256,
        gpu_memory_utilization=0.3,
    )
    sampling = SamplingParams(1e-6, families.NEW_TOKENS, True)
    found = engine.generate(families.prompts(family), sampling, use_tqdm=False)
    return [list(answer["token_ids"]) for answer in found], {}


ENGINES: dict[str, Callable[[argparse.Namespace, str], Found]] = {
    "plain": run_plain,
    "transformers": run_transformers,
    "continuous": run_continuous,
    "vllm": run_vllm,
    "sglang": run_sglang,
    "nano": run_nano,
}
"""The engines by the names of the command line and of the record."""
