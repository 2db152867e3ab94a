"""Times of two ways to compute requests with few new tokens in a model with latent attention.

    python tests/gpu/latent_paths.py RESULTS

*Decode*: project the queries into the latent space, attend to the latents, expand the averages.
*Prefill*: expand the latents of the sequence to keys and values, attend to the new tokens and to
the earlier ones, merge both results, with the operations that vLLM 0.25.1 takes for it. The vLLM
plugin computes a request as a decode up to `DECODE_THRESHOLD` new tokens.

RESULTS has one JSON object per line: query heads, requests, keys and new tokens of each, and the
medians of both ways in microseconds. Each is a CUDA graph that is replayed with a cold L2 cache.
"""

import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pagetwin.optimized import paged_attention
from torch import Tensor
from torch.nn.functional import linear
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func
from vllm.v1.attention.ops.merge_attn_states import merge_attn_states

RANK, ROPE, NOPE, VALUE, BLOCK_SIZE = 512, 64, 128, 128, 16
BF16: Any = {"dtype": torch.bfloat16, "device": "cuda"}
INT32: Any = {"dtype": torch.int32, "device": "cuda"}
attend = partial(
    flash_attn_varlen_func,
    fa_version=3,
    softmax_scale=(NOPE + ROPE) ** -0.5,
    return_softmax_lse=True,
)


class Requests:
    """Requests of equal lengths, with random numbers.

    Args:
        heads: query heads.
        reqs: requests.
        keys: keys of each, its new tokens included.
        new: new tokens of each.
    """

    def __init__(self, heads: int, reqs: int, keys: int, new: int) -> None:
        self.heads, self.reqs, self.keys, self.new = heads, reqs, keys, new
        self.context = keys - new
        blocks = reqs * (keys // BLOCK_SIZE)
        self.cache = torch.randn(blocks, BLOCK_SIZE, RANK + ROPE, **BF16)
        self.table = torch.randperm(blocks, device="cuda").int().view(reqs, -1)
        self.query = torch.randn(reqs * new, heads, NOPE + ROPE, **BF16)
        self.latents = torch.randn(reqs * new, RANK + ROPE, **BF16)
        self.up = torch.randn(heads * (NOPE + VALUE), RANK, **BF16) / 20
        self.w_uk = torch.randn(heads, NOPE, RANK, **BF16) / 20
        self.w_uv = torch.randn(heads, RANK, VALUE, **BF16) / 20
        self.gathered = torch.empty(reqs * self.context, RANK + ROPE, **BF16)
        order = torch.arange(reqs + 1, **INT32)
        self.starts, self.context_starts = order * new, order * self.context
        self.req_of_token = order[:-1].repeat_interleave(self.context)
        self.lens = torch.full((reqs,), keys, **INT32)
        self.zeros, self.scale = (
            torch.zeros(reqs, **INT32),
            torch.ones(1, device="cuda"),
        )

    def decode(self) -> Tensor:
        """Attend to the latents."""
        latent = torch.bmm(self.query[..., :NOPE].transpose(0, 1), self.w_uk)
        query = torch.cat([latent.transpose(0, 1), self.query[..., NOPE:]], dim=-1)
        key = self.cache[:, :, None]
        mean = paged_attention(
            query, key, key[..., :RANK], self.table, self.starts, self.lens, self.new,
            self.keys, scale=(NOPE + ROPE) ** -0.5,
        )  # fmt: skip
        return torch.bmm(mean.transpose(0, 1), self.w_uv)

    def expand(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of latents."""
        both = linear(latents[:, :RANK], self.up).view(-1, self.heads, NOPE + VALUE)
        key = torch.empty(len(latents), self.heads, NOPE + ROPE, **BF16)
        key[..., :NOPE] = both[..., :NOPE]
        key[..., NOPE:] = latents[:, None, RANK:]
        return key, both[..., NOPE:]

    def prefill(self) -> Tensor:
        """Attend to expanded keys."""
        starts, context = self.starts, self.context_starts
        key, value = self.expand(self.latents)
        out, lse = attend(
            self.query, key, value, cu_seqlens_q=starts, cu_seqlens_k=starts,
            max_seqlen_q=self.new, max_seqlen_k=self.new, causal=True,
        )  # fmt: skip
        ops.gather_and_maybe_dequant_cache(
            self.cache, self.gathered, self.table, context, self.req_of_token,
            len(self.gathered), "auto", self.scale, self.zeros,
        )  # fmt: skip
        key, value = self.expand(self.gathered)
        before, before_lse = attend(
            self.query, key, value, cu_seqlens_q=starts, cu_seqlens_k=context,
            max_seqlen_q=self.new, max_seqlen_k=self.context, causal=False,
        )  # fmt: skip
        merged = torch.empty_like(out)
        merge_attn_states(
            output=merged, prefix_output=before, prefix_lse=before_lse,
            suffix_output=out, suffix_lse=lse,
        )  # fmt: skip
        return merged


def measure(call: Callable[[], Tensor], times: int = 11) -> float:
    """Return the median of replays in microseconds."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    filler = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    found = []
    for _ in range(times):
        filler.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) * 1e3)
    return round(statistics.median(found), 2)


def main(path: Path) -> None:
    with path.open("w") as file:
        for heads, reqs, keys in (
            (16, 1, 1024), (16, 1, 8192), (16, 1, 32768), (16, 4, 1024), (16, 4, 8192),
            (128, 1, 1024), (128, 1, 8192), (128, 1, 32768), (128, 4, 1024),
        ):  # fmt: skip
            for new in (64, 128, 192, 256, 384, 512):
                given = Requests(heads, reqs, keys, new)
                line = {
                    "heads": heads, "requests": reqs, "keys": keys, "new": new,
                    "decode_us": measure(given.decode),
                    "prefill_us": measure(given.prefill),
                    "device": torch.cuda.get_device_name(),
                }  # fmt: skip
                print(json.dumps(line), file=file, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
