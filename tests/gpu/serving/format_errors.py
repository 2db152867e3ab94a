"""What cache formats cost a small trained model: error of attention, perplexity, and a far needle.

    python tests/gpu/serving/format_errors.py FOLDER > record.jsonl
    python docs/hooks/page_data.py cache_formats record.jsonl --date DATE --commit COMMIT
    python tests/gpu/serving/format_errors.py FOLDER --noise 1e-7

FOLDER is what `real_weights.py` has written. The model reads its page of text once in each format.
Keys and values of every layer, in bfloat16, are stored and loaded by the reference's files of the
format, and attended to in float32. The error is that of the outputs of attention,
with the queries, keys and values of the unchanged model, relative to their norm.

With --noise, every embedding is multiplied by 1 plus a random number of that size. The lines then
show what this changes: a number that is rounded to another code changes all later layers.
"""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from pagetwin.contract.cache_formats import FORMATS, CacheFormat
from pagetwin.reference.cache.formats import FILES
from real_weights import load, tokens
from torch import Tensor

NEEDLE_KEYS = 131_072


def stored(key: Tensor, value: Tensor, form: CacheFormat) -> tuple[Tensor, Tensor]:
    """Return keys and values as a cache gives them back: [tokens, kv_heads, head_size] float32."""
    file, found = FILES[form.file], []
    for numbers in (key.bfloat16(), value.bfloat16()):
        given = 1.0 if form.is_quantised else None
        codes, measured = file.store(numbers, given, form.dtype)
        scale = given if measured is None else measured
        found.append(file.load(codes, scale, torch.float32))
    return found[0], found[1]


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Return causal attention in the dtype of the arguments: [tokens, query_heads, head_size]."""
    group = query.shape[1] // key.shape[1]
    key, value = (side.repeat_interleave(group, 1) for side in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(later, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value)


class Attention:
    """Attention of a model whose keys and values are stored in a format.

    Args:
        form: Optional. If None, they are used as they are.
    """

    def __init__(self, form: CacheFormat | None) -> None:
        self.form = form
        self.calls: list[tuple[Tensor, Tensor, Tensor, float]] = []

    def __call__(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *args: Any,
        **more: Any,
    ) -> tuple[Tensor, None]:
        """Return the output of a layer, as transformers calls it: [1, heads, tokens, size]."""
        scale = more["scaling"]
        q, k, v = (side[0].transpose(0, 1) for side in (query, key, value))
        self.calls.append((q, k, v, scale))
        if self.form is not None:
            k, v = stored(k, v, self.form)
        return attend(q, k, v, scale)[None], None


@torch.no_grad()
def read_text(
    model: Any, ids: list[int], form: CacheFormat | None
) -> tuple[Tensor, Any]:
    """Return the log-probabilities of a text, and the arguments of each layer's attention."""
    from transformers import AttentionInterface

    attention = Attention(form)
    AttentionInterface.register("formats", attention)
    model.set_attn_implementation("formats")
    logits = model(torch.tensor([ids]), use_cache=False).logits[0]
    chosen = logits[:-1].log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])
    return chosen[:, 0], attention.calls


def perplexity(found: Tensor) -> float:
    """Return the perplexity of log-probabilities, to three decimals."""
    return round(math.exp(-float(found.mean())), 3)


@torch.no_grad()
def show_noise(model: Any, ids: list[int], noise: float) -> None:
    """Print what noise in the embeddings changes with every format."""
    weight = model.get_input_embeddings().weight
    plain, generator = weight.clone(), torch.Generator().manual_seed(0)
    noisy = plain * (1 + noise * torch.randn(plain.shape, generator=generator))
    for form in (None, *FORMATS.values()):
        found = []
        for values in (plain, noisy):
            weight.copy_(values)
            found.append(read_text(model, ids, form)[0])
        line = {
            "format": form.name if form else None,
            "noise": noise,
            "perplexity": [perplexity(one) for one in found],
            "logprob_difference_max": round(
                float((found[0] - found[1]).abs().max()), 6
            ),
        }
        print(json.dumps(line), flush=True)


def needle_weight(form: CacheFormat) -> float:
    """Return the weight of a key whose score exceeds the others' by about 20, of 131,072 keys."""
    generator = torch.Generator().manual_seed(0)
    key = torch.randn(NEEDLE_KEYS, 1, 128, generator=generator)
    query = torch.randn(1, 1, 128, generator=generator)
    at = NEEDLE_KEYS // 3
    key[at] = query[0] * 25 * 128**0.5 / query.square().sum()
    found, _ = stored(key, key, form)
    scores = (found[:, 0].double() @ query[0, 0].double()) * 128**-0.5
    return float(scores.softmax(0)[at])


def main() -> None:
    """Print a line of JSON per format."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--noise", type=float, default=0.0)
    asked = parser.parse_args()
    model, ids = load(asked.folder), tokens(asked.folder, "text")
    if asked.noise:
        show_noise(model, ids, asked.noise)
        return
    plain, calls = read_text(model, ids, None)
    print(
        f"{len(ids)} tokens, perplexity without a cache: {perplexity(plain)}",
        file=sys.stderr,
    )
    for form in FORMATS.values():
        errors = []
        for query, key, value, scale in calls:
            exact = attend(*(side.double() for side in (query, key, value)), scale)
            kept = (side.double() for side in stored(key, value, form))
            off = attend(query.double(), *kept, scale) - exact
            errors.append(float(off.norm() / exact.norm()))
        line = {
            "format": form.name,
            "bytes": form.page_bytes(1, 1, 128, 128, torch.bfloat16),
            "error": round(sum(errors) / len(errors), 5),
            "largest_error": round(max(errors), 5),
            "perplexity": perplexity(read_text(model, ids, form)[0]),
            "needle_weight": round(needle_weight(form), 5),
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
