"""SGLang's own engine on a CPU: greedy tokens of several attention backends, with the recorder.

    python tests/gpu/serving/sglang_cpu.py OUTDIR --backends torch_native pagetwin

The environment has pagetwin, SGLang's wheel (installed with --no-deps) and the packages that its
imports name. Its kernels are for CUDA: if `sgl_kernel` is missing, an empty module stands for it,
and torchvision is imported without compiled operators. The model is a Llama of 3 layers with seeded
weights in float32. Eleven requests run: chunks of 64 tokens, and prefixes from the radix cache.

Each backend has a process of its own. OUTDIR has a log of each, and the recorder's folders. Exit
code 1: tokens differ, or the recorder found something.
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

CONFIG = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "eos_token_id": 511,
    "bos_token_id": 0,
}
# Python imports it at the start of each process of the engine
SITE = """
import importlib.util, os, sys, types

class Nothing:
    def __init__(self, *given, **named):
        pass
    def __call__(self, *given, **named):
        return self

class Kernels(types.ModuleType):
    __path__ = []
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing()

if os.environ.get("SGLANG_USE_CPU_ENGINE"):
    if importlib.util.find_spec("sgl_kernel") is None:
        sys.modules["sgl_kernel"] = Kernels("sgl_kernel")
    import torch
    plain = torch.library.register_fake
    def register_fake(op, func=None, **named):
        if isinstance(op, str) and op.startswith("torchvision::"):
            return func or (lambda given: given)
        return plain(op, func, **named)
    torch.library.register_fake = register_fake
    try:
        import torchvision
    except ImportError:
        pass
    torch.library.register_fake = plain
"""


def prepare(folder: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Write what Python imports first, and return the variables of an engine on a CPU.

    Args:
        folder: for the module, which is written there.
        environment: whose PYTHONPATH is kept.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(SITE, encoding="utf-8")
    return {
        "PYTHONPATH": f"{folder}{os.pathsep}{environment.get('PYTHONPATH', '')}",
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
    }


def write_model(folder: Path) -> None:
    """Write a seeded checkpoint. Its weights are larger than usual, so that logits differ."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    size, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    head = CONFIG["head_dim"]
    own = {"q": CONFIG["num_attention_heads"] * head}
    own |= dict.fromkeys("kv", CONFIG["num_key_value_heads"] * head)
    shapes = {"model.embed_tokens": (CONFIG["vocab_size"], size)}
    shapes |= {"lm_head": (CONFIG["vocab_size"], size), "model.norm": (size,)}
    for number in range(CONFIG["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        shapes |= {f"{layer}.self_attn.{x}_proj": (own[x], size) for x in own}
        shapes[f"{layer}.self_attn.o_proj"] = (size, own["q"])
        shapes |= {f"{layer}.mlp.{x}_proj": (inner, size) for x in ("gate", "up")}
        shapes[f"{layer}.mlp.down_proj"] = (size, inner)
        for norm in ("input", "post_attention"):
            shapes[f"{layer}.{norm}_layernorm"] = (size,)
    weights = {
        f"{name}.weight": torch.ones(shape)
        if len(shape) == 1
        else 0.06 * torch.randn(shape)
        for name, shape in shapes.items()
    }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = {
        **CONFIG,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def prompts() -> list[list[int]]:
    """Return prompts of 1 to 150 tokens, the last with a prefix of another one."""
    drawn = random.Random(1)
    made = [
        [drawn.randrange(500) for _ in range(count)]
        for count in (5, 40, 150, 17, 33, 1, 90)
    ]
    return [*made, [*made[2][:100], 3, 4]]


def serve(model: str, backend: str, tokens: int) -> None:
    """Run the engine in this process, and print the tokens."""
    import sglang

    engine = sglang.Engine(
        model_path=model,
        device="cpu",
        attention_backend=backend,
        page_size=16,
        skip_tokenizer_init=True,
        dtype="float32",
        max_total_tokens=4096,
        mem_fraction_static=0.2,
        context_length=512,
        chunked_prefill_size=64,
        max_running_requests=8,
        disable_overlap_schedule=True,
        sampling_backend="pytorch",
        grammar_backend="none",
        log_level="info",
    )
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    all_prompts = prompts()
    found = engine.generate(input_ids=all_prompts, sampling_params=sampling)
    found += engine.generate(input_ids=all_prompts[:3], sampling_params=sampling)
    cached = sum(one["meta_info"]["cached_tokens"] for one in found)
    line = {"tokens": [one["output_ids"] for one in found], "cached": cached}
    print(f"RESULT {json.dumps(line)}", flush=True)
    engine.shutdown()


def main() -> None:
    """Run each backend in a process, and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--backends", nargs="+", default=["torch_native", "pagetwin"])
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    model = asked.out / "model"
    if asked.serve:
        serve(str(model), asked.serve, asked.tokens)
        return
    prepared = prepare(asked.out / "site", os.environ)
    write_model(model)
    found, is_wrong = {}, False
    for backend in asked.backends:
        folder = asked.out / f"recorded_{backend}"
        given = {
            "PAGETWIN_SGLANG_IMPLEMENTATION": "reference",
            **os.environ,
            **prepared,
            "PAGETWIN_RECORD": str(folder),
            "PAGETWIN_RECORD_EVERY": "1",
        }
        command = [sys.executable, __file__, str(asked.out), "--serve", backend]
        log = asked.out / f"{backend}.log"
        with log.open("w") as file:
            subprocess.run(
                [*command, "--tokens", str(asked.tokens)],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=given,
                check=False,
            )
        text = log.read_text(errors="replace")
        result = re.search(r"^RESULT (.*)$", text, re.M)
        checked = re.findall(r"flight recorder: (steps checked: .*)$", text, re.M)
        if result is None:
            raise SystemExit(f"{backend}: no result; the reason is in {log}")
        found[backend] = json.loads(result[1])
        print(f"{backend}: {found[backend]['cached']} tokens from the radix cache;")
        print(f"  {checked[-1] if checked else 'not recorded'}")
        is_wrong |= not checked or not checked[-1].endswith("violations: 0")
    first, *others = found.values()
    same = all(other == first for other in others)
    print("all have the same tokens" if same else "tokens differ")
    sys.exit(int(is_wrong or not same))


if __name__ == "__main__":
    main()
