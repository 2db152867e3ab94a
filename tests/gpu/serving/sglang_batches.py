"""Batches of SGLang on its backend class: outputs and times beside FlashAttention-3, and graphs.

    python tests/gpu/serving/sglang_batches.py sglang_batches.json
    python tests/gpu/serving/sglang_batches.py x.json --smoke     a small batch, on a CPU too

SGLang is not needed: its classes are the stand-in of `tests/support/fake_sglang.py`. The pools,
requests and batches are those of a model with 32 query heads and 8 KV heads of 128 in bfloat16.
Each batch is attended to through `PagetwinSglangBackend`, and by FlashAttention-3 (the file that
PAGETWIN_FA3 names) with its plan prepared in advance. Some rows of both are compared with attention
in float32. Then both are timed as replays of captured graphs, in alternation.

Decodes and verifications are also captured with their metadata, as SGLang captures them: with rows
of padding, and replayed for other requests than those of the capture. FILE gets one line per batch.
"""

import argparse
import json
import os
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from pagetwin.tools.bench.libraries.flash_attention_3 import SETTINGS, FlashAttention3
from pagetwin.tools.bench.timing import (
    Stopwatch,
    captured,
    time_hosts,
    time_interleaved,
)
from support.fake_sglang import VERSIONS, fake_sglang
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS = 12
"""Rows of each batch that are compared with attention in float32."""
GRAPH_MODES = ("DECODE", "TARGET_VERIFY")


@dataclass(frozen=True)
class Case:
    """One batch.

    Args:
        name, mode: of the batch, and of SGLang's ForwardMode.
        new, keys: new tokens of each request, and its keys with them.
        page_size: slots of a page.
        window: Optional. SGLang's sliding_window_size. If None, all keys are visible.
        fp8: whether the cache has float8_e4m3fn. FlashAttention-3 is not run then.
    """

    name: str
    mode: str
    new: tuple[int, ...]
    keys: tuple[int, ...]
    page_size: int = 16
    window: int | None = None
    fp8: bool = False


CHUNK = ((2048, *[1] * 63), (8192, *[4096] * 63))
CASES = (
    Case("decode 64x4k", "DECODE", (1,) * 64, (4096,) * 64),
    Case("decode 64x4k, pages of 64", "DECODE", (1,) * 64, (4096,) * 64, 64),
    Case("decode 64x4k, pages of 1", "DECODE", (1,) * 64, (4096,) * 64, 1),
    Case("decode 64x4k, FP8 cache", "DECODE", (1,) * 64, (4096,) * 64, fp8=True),
    Case(
        "decode of 1 to 128 thousand keys",
        "DECODE",
        (1,) * 16,
        tuple(1000 * 2 ** (req // 2) for req in range(16)),
    ),
    Case("decode 64x4k, window 1k", "DECODE", (1,) * 64, (4096,) * 64, window=1023),
    Case("chunk of 2k on 6k with 63 decodes", "MIXED", *CHUNK),
    Case("prompts 8x2k", "EXTEND", (2048,) * 8, (2048,) * 8),
    Case("verification 64x8 rows on 4k", "TARGET_VERIFY", (8,) * 64, (4096,) * 64),
)
SMOKE = (
    Case("decodes", "DECODE", (1,) * 3, (40, 17, 3)),
    Case("pages of 1", "DECODE", (1,) * 3, (40, 17, 3), 1),
    Case("chunk", "MIXED", (20, 1), (50, 9), window=7),
    Case("verification", "TARGET_VERIFY", (4, 4), (30, 20)),
)


class Batch:
    """The pool, requests and layer of a case, on a backend of the plugin.

    Args:
        case: the batch.
        heads, kv_heads, size, dtype: the layer.
        spare: rows of padding of a captured graph, after the requests.
    """

    def __init__(
        self, case: Case, heads: int, kv_heads: int, size: int, dtype: torch.dtype,
        spare: int = 0,
    ) -> None:  # fmt: skip
        from pagetwin.integrations.sglang import make_backend
        from sglang.srt.layers.radix_attention import AttentionType
        from sglang.srt.model_executor.forward_batch_info import ForwardMode
        from torch import nn

        torch.manual_seed(0)
        self.case, page, reqs = case, case.page_size, len(case.keys)
        draw = torch.Generator().manual_seed(0)
        pages = [-(-count // page) for count in case.keys]
        order = torch.randperm(sum(pages), generator=draw) + 1  # page 0 is padding
        most = max(pages) * page
        table = torch.zeros(reqs + 1, most, dtype=torch.int32)
        for req, own in enumerate(order.split(pages)):
            slots = own[:, None] * page + torch.arange(page)
            table[req + 1, : slots.numel()] = slots.flatten()
        slots_in_all = (sum(pages) + 1) * page
        cache_dtype = torch.float8_e4m3fn if case.fp8 else dtype
        shape = (slots_in_all, kv_heads, size)
        self.caches = [
            torch.randn(shape, device=DEVICE, dtype=dtype).to(cache_dtype)
            for _ in range(2)
        ]
        pool = SimpleNamespace(
            get_kv_buffer=lambda layer_id: self.caches, set_kv_buffer=None
        )
        model = SimpleNamespace(
            head_dim=size, context_len=most, is_encoder_decoder=False
        )
        self.backend = make_backend(
            SimpleNamespace(
                token_to_kv_pool=pool,
                req_to_token_pool=SimpleNamespace(req_to_token=table.to(DEVICE)),
                kv_index_translator=None,
                attention_chunk_size=None,
                page_size=page,
                device=DEVICE,
                dtype=dtype,
                kv_cache_dtype=cache_dtype,
                use_mla_backend=False,
                is_draft_worker=False,
                model=nn.Module(),
                model_config=model,
            )
        )
        self.layer = Layer(
            layer_id=0,
            tp_q_head_num=heads,
            qk_head_dim=size,
            v_head_dim=size,
            scaling=size**-0.5,
            logit_cap=0.0,
            sliding_window_size=-1 if case.window is None else case.window,
            use_irope=False,
            attn_type=AttentionType("decoder"),
            k_scale=torch.ones((), device=DEVICE) if case.fp8 else None,
            v_scale=torch.ones((), device=DEVICE) if case.fp8 else None,
        )
        width = case.new[0]
        rows = sum(case.new) + spare * width
        self.query = torch.randn(rows, heads, size, device=DEVICE, dtype=dtype)
        keys = torch.tensor(case.keys)
        is_verify = case.mode == "TARGET_VERIFY"
        lens = torch.cat([keys - (width if is_verify else 0), torch.ones(spare).long()])
        drafts = SimpleNamespace(
            draft_token_num=width, tree_topk=1, ragged_verify_layout=None
        )
        self.batch = SimpleNamespace(
            forward_mode=ForwardMode[case.mode],
            batch_size=reqs + spare,
            seq_lens=lens.to(DEVICE),
            seq_lens_cpu=lens,
            req_pool_indices=torch.cat(
                [torch.arange(reqs) + 1, torch.zeros(spare).long()]
            ).to(DEVICE),
            out_cache_loc=torch.zeros(rows, dtype=torch.int64, device=DEVICE),
            extend_seq_lens=torch.tensor(case.new, device=DEVICE),
            extend_seq_lens_cpu=list(case.new),
            spec_info=drafts if is_verify else None,
        )

    def attend(self) -> Tensor:
        """Return [tokens, heads, size] of the current step."""
        out: Tensor = self.backend.forward_extend(
            self.query.flatten(1), None, None, self.layer, self.batch
        )
        return out.view_as(self.query)

    def exact(self, row: int) -> Tensor:
        """Return [heads, size] of a row, in float32 from the pool."""
        case, start = self.case, 0
        req = next(
            number
            for number in range(len(case.new))
            if row < sum(case.new[: number + 1])
        )
        start = sum(case.new[:req])
        end = case.keys[req] - case.new[req] + row - start + 1
        first = 0 if case.window is None else max(0, end - 1 - case.window)
        table = self.backend.req_to_token_pool.req_to_token
        slots = table[req + 1, first:end].long()
        key, value = (cache[slots].float() for cache in self.caches)
        group = self.query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(group, 1) for x in (key, value))
        scores = torch.einsum("hd,khd->hk", self.query[row].float(), key)
        weights = (scores * self.layer.scaling).softmax(1)
        return torch.einsum("hk,khd->hd", weights, value)

    def worst(self, out: Tensor) -> float:
        """Return the largest error of some rows of an output."""
        tokens = sum(self.case.new)
        rows = {int(x) for x in torch.linspace(0, tokens - 1, ROWS)}
        errors = [(out[row].float() - self.exact(row)).abs().max() for row in rows]
        return float(torch.stack(errors).max())


class Layer(SimpleNamespace):
    """A layer that can be a key of a dict, as SGLang's module can."""

    __hash__ = object.__hash__


def flash_attention(work: Batch) -> Callable[[], Tensor]:
    """Return a call of FlashAttention-3 on the same batch, its plan prepared in advance."""
    library, step = FlashAttention3(DEVICE), work.backend.forward_metadata
    missing = library.missing()
    if missing:
        raise SystemExit(f"FlashAttention-3: {missing}")
    key, value = (
        cache.view(-1, work.case.page_size, *cache.shape[1:]) for cache in work.caches
    )
    out, window = torch.empty_like(work.query), work.case.window
    heads, size = work.query.shape[1:]
    given: dict[str, Any] = SETTINGS | {
        "cu_seqlens_q": step.query_start_loc,
        "max_seqlen_q": step.max_query_len,
        "max_seqlen_k": step.max_seq_len,
        "seqused_k": step.seq_lens,
        "page_table": step.block_table,
        "softmax_scale": work.layer.scaling,
        "is_causal": True,
        "window_size_left": -1 if window is None else window,
        "window_size_right": -1 if window is None else 0,
        "batch_size": len(step.seq_lens),
        "num_heads": heads,
        "num_heads_k": key.shape[2],
        "headdim": size,
        "headdim_v": size,
        "qkv_dtype": key.dtype,
        "page_size": work.case.page_size,
        "q": work.query,
        "k": key,
        "v": value,
        "out": out,
    }
    given["scheduler_metadata"] = library._bind("get_scheduler_metadata", given)()
    attend = library._bind("fwd", given)

    def call() -> Tensor:
        attend()
        return out

    return call


def replay_for_others(case: Case, sizes: tuple[Any, ...]) -> dict[str, float]:
    """Return errors of a graph that was captured with rows of padding, and replayed for others.

    The capture has a page table of zeros and one key per request, as SGLang's has. The replay has
    the batch of the case and three rows of padding.
    """
    work = Batch(case, *sizes, spare=3)
    backend, batch = work.backend, work.batch
    real = (batch.seq_lens.clone(), batch.req_pool_indices.clone())
    batch.seq_lens.fill_(1)
    batch.req_pool_indices.zero_()
    backend.init_cuda_graph_state(batch.batch_size, len(work.query))
    backend.init_forward_metadata_out_graph(batch, in_capture=True)

    def run() -> Tensor:
        backend.init_forward_metadata_in_graph(batch)
        return work.attend()

    run()
    torch.cuda.synchronize()
    graph = captured(run)
    assert graph is not None, f"{case.name}: not captured"
    batch.seq_lens.copy_(real[0])
    batch.req_pool_indices.copy_(real[1])
    graph.replay()
    torch.cuda.synchronize()
    first = graph.result.clone()
    graph.replay()
    same = bool(torch.equal(first, graph.result))
    return {"replayed": work.worst(first), "same bits": float(same)}


def measure(case: Case, sizes: tuple[Any, ...], repeats: int) -> dict[str, Any]:
    """Return errors and times of a case."""
    line = compare(case, Batch(case, *sizes), repeats)
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
        if case.mode in GRAPH_MODES:
            line["errors"] |= replay_for_others(case, sizes)
    return line


def compare(case: Case, work: Batch, repeats: int) -> dict[str, Any]:
    """Return errors and times of a batch, on a GPU beside FlashAttention-3."""
    backend, batch = work.backend, work.batch
    backend.init_forward_metadata(batch)
    line: dict[str, Any] = {"name": case.name, "errors": {}, "us": {}}
    line["errors"]["pagetwin"] = work.worst(work.attend())
    if DEVICE == "cpu":
        return line
    calls: dict[str, Callable[[], Any]] = {"pagetwin": work.attend}
    if not case.fp8:
        calls["fa3"] = flash_attention(work)
        line["errors"]["fa3"] = work.worst(calls["fa3"]())
    if case.mode in GRAPH_MODES:

        def with_metadata() -> Tensor:
            backend.init_forward_metadata_in_graph(batch)
            return work.attend()

        # the last one, since it replaces the step of the others
        calls["pagetwin with metadata"] = with_metadata
    graphs = {}
    for name, call in calls.items():
        call()
        torch.cuda.synchronize()
        graph = captured(call)
        assert graph is not None, f"{case.name}: {name} cannot be captured"
        graphs[name] = graph.replay
    order = random.Random(0)
    times = time_interleaved(graphs, repeats, order, Stopwatch(DEVICE))
    line["us"] = {name: statistics.median(own) for name, own in times.items()}
    backend.init_forward_metadata(batch)
    hosts: dict[str, Callable[[], Any]] = {
        "metadata": lambda: backend.init_forward_metadata(batch),
        "layer": work.attend,
    }
    line["host us"] = time_hosts(hosts, 7, order)
    return line


def main() -> None:
    """Print a line per case, and write all to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--repeats", type=int, default=40)
    asked = parser.parse_args()
    sizes = (32, 8, 128, torch.bfloat16)
    cases = CASES
    if asked.smoke:
        sizes, cases = (4, 2, 32, torch.float32), SMOKE
        if DEVICE == "cpu":
            os.environ.setdefault("PAGETWIN_SGLANG_IMPLEMENTATION", "reference")
    lines = []
    with fake_sglang(VERSIONS[-1]):
        for case in cases:
            if asked.only in case.name:
                lines.append(measure(case, sizes, asked.repeats))
                print(json.dumps(lines[-1]), flush=True)
                asked.file.write_text(json.dumps(lines, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
