"""Steps of an engine for the SGLang plugin: pools, requests and batches as SGLang makes them."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from pagetwin.conformance.oracles.brute_force import (
    OracleRequest,
    attend_by_hand,
    judge_out,
    quantise_by_hand,
)
from torch import Tensor, nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_TOKENS, MAX_TOKENS, MAX_REQS = 384, 96, 4
SCALES = (0.5, 0.25)
"""Scales of keys and values of an FP8 cache."""


class Pool:
    """Keys and values of some layers, each [slots, heads, size]; all slots are NaN at first.

    Args:
        layers, heads, size, size_v: the layers.
        dtype: of the cache.
        slots: slots of the pool.
        page_size: Optional. If given, buffers are [pages, heads, page_size, size].
    """

    def __init__(
        self,
        layers: int,
        heads: int,
        size: int,
        size_v: int,
        dtype: torch.dtype,
        slots: int,
        page_size: int | None = None,
    ) -> None:
        self.dtype, self.page_size = dtype, page_size

        def buffer(width: int) -> Tensor:
            made = torch.full((slots, heads, width), torch.nan).to(DEVICE, dtype)
            if page_size is None:
                return made
            return made.view(-1, page_size, heads, width).transpose(1, 2).contiguous()

        self.keys = [buffer(size) for _ in range(layers)]
        self.values = [buffer(size_v) for _ in range(layers)]

    def get_kv_buffer(self, layer_id: int) -> tuple[Tensor, Tensor]:
        return self.keys[layer_id], self.values[layer_id]

    def set_kv_buffer(
        self,
        layer: Any,
        loc_info: Any,
        cache_k: Tensor,
        cache_v: Tensor,
        k_scale: Any = None,
        v_scale: Any = None,
    ) -> None:
        self.write(layer.layer_id, loc_info.loc, cache_k, cache_v, k_scale, v_scale)

    def write(
        self,
        layer_id: int,
        loc: Tensor,
        k: Tensor,
        v: Tensor,
        k_scale: Any,
        v_scale: Any,
    ) -> None:
        """Store keys and values, divided by their scales if the cache has another dtype."""
        given = ((self.keys, k, k_scale), (self.values, v, v_scale))
        for buffers, new, scale in given:
            if new.dtype != self.dtype:
                scale = 1.0 if scale is None else scale
                new = quantise_by_hand(new.cpu(), scale, self.dtype).to(DEVICE)
            buffer = buffers[layer_id]
            if self.page_size is not None:
                buffer = buffer.transpose(1, 2)
                place = (loc // self.page_size, loc % self.page_size)
            else:
                place = (loc,)
            as_bytes = buffer.view(torch.uint8) if self.dtype.itemsize == 1 else buffer
            as_bytes[place] = new.view(as_bytes.dtype)


def make_window_pools(full: Pool, own: Pool, page_size: int) -> Any:
    """Return SGLang's pools of a model with layers 0 (full) and 1 (with a window).

    Page p of the first has page (5 * p + 2) % pages of the second.
    """
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    class Pools(SWAKVPool):  # type: ignore[misc]
        def __init__(self) -> None:
            self.layers_mapping = {0: (0, False), 1: (0, True)}
            pages = NUM_TOKENS // page_size
            slot = torch.arange(NUM_TOKENS, device=DEVICE)
            page = (5 * (slot // page_size) + 2) % pages
            self.full_to_swa_index_mapping = page * page_size + slot % page_size

        def translate_loc_from_full_to_swa(self, kv_indices: Tensor) -> Tensor:
            return self.full_to_swa_index_mapping[kv_indices]

        def get_kv_buffer(self, layer_id: int) -> tuple[Tensor, Tensor]:
            inner, is_window = self.layers_mapping[layer_id]
            return (own if is_window else full).get_kv_buffer(inner)

        def set_kv_buffer(
            self, layer: Any, loc_info: Any, cache_k: Tensor, cache_v: Tensor,
            k_scale: Any = 1.0, v_scale: Any = 1.0,
        ) -> None:  # fmt: skip
            inner, is_window = self.layers_mapping[layer.layer_id]
            loc = loc_info.swa_loc if is_window else loc_info.loc
            pool = own if is_window else full
            pool.write(inner, loc, cache_k, cache_v, k_scale, v_scale)

        for name in SWAKVPool.__abstractmethods__:
            locals().setdefault(name, None)

    return Pools()


def make_runner(pool: Any, page_size: int, **given: Any) -> Any:
    """Return what the plugin reads of SGLang's model runner.

    Args:
        pool: the pool of keys and values.
        page_size: slots of a page.
        given: attributes that differ, of the runner or of its model's configuration.
    """
    config = {"head_dim": 32, "context_len": MAX_TOKENS, "is_encoder_decoder": False}
    plain: dict[str, Any] = {
        "token_to_kv_pool": pool,
        "req_to_token_pool": SimpleNamespace(
            req_to_token=torch.zeros(
                MAX_REQS + 1, MAX_TOKENS, dtype=torch.int32, device=DEVICE
            )
        ),
        "kv_index_translator": None,
        "page_size": page_size,
        "attention_chunk_size": None,
        "device": DEVICE,
        "dtype": torch.float32,
        "kv_cache_dtype": torch.float32,
        "use_mla_backend": False,
        "is_draft_worker": False,
        "model": nn.Module(),
    }
    for name, value in given.items():
        (config if name in config else plain)[name] = value
    return SimpleNamespace(model_config=SimpleNamespace(**config), **plain)


class Layer(SimpleNamespace):
    """A layer that can be a key of a dict, as SGLang's module can."""

    __hash__ = object.__hash__


class EngineSteps:
    """One or two layers, a backend of the plugin, and requests that grow step by step.

    Args:
        num_reqs: requests.
        heads, kv_heads, size, size_v, dtype: the layers.
        cache_dtype: Optional. Of the cache. If None, that of the model.
        page_size: slots of a page.
        has_windows: whether layer 1 has a window and a pool of its own.
        heads_first: whether a page has its heads before its slots.
        options: further attributes of the layers, by SGLang's names, and `sinks`.

    Attributes:
        has_names: whether the requests of a step have names. Those of SGLang's dummy runs do not.
    """

    def __init__(
        self,
        num_reqs: int = 3,
        heads: int = 4,
        kv_heads: int = 2,
        size: int = 32,
        size_v: int | None = None,
        dtype: torch.dtype = torch.float32,
        cache_dtype: torch.dtype | None = None,
        page_size: int = 16,
        has_windows: bool = False,
        heads_first: bool = False,
        attention_chunk_size: int | None = None,
        sinks: Tensor | None = None,
        **options: Any,
    ) -> None:
        from pagetwin.integrations.sglang.backend import PagetwinSglangBackend
        from sglang.srt.layers.radix_attention import AttentionType

        self.heads, self.kv_heads, self.dtype = heads, kv_heads, dtype
        self.has_names = True
        self.size, self.size_v = size, size_v or size
        self.page_size, self.chunk_size = page_size, attention_chunk_size
        self.sinks = None if sinks is None else sinks.to(DEVICE)
        self.cache_dtype = cache_dtype or dtype
        sizes = (1, kv_heads, size, self.size_v, self.cache_dtype, NUM_TOKENS)
        order = page_size if heads_first else None
        self.pool: Any = Pool(*sizes, order)
        if has_windows:
            self.pool = make_window_pools(self.pool, Pool(*sizes, order), page_size)
        self.runner = make_runner(
            self.pool,
            page_size,
            attention_chunk_size=attention_chunk_size,
            dtype=dtype,
            kv_cache_dtype=self.cache_dtype,
        )
        self.backend = PagetwinSglangBackend(self.runner)
        scales = [torch.tensor(number, device=DEVICE) for number in SCALES]
        plain = {
            "tp_q_head_num": heads,
            "tp_k_head_num": kv_heads,
            "tp_v_head_num": kv_heads,
            "head_dim": size,
            "qk_head_dim": size,
            "v_head_dim": self.size_v,
            "scaling": size**-0.5,
            "logit_cap": 0.0,
            "sliding_window_size": -1,
            "use_irope": False,
            "is_cross_attention": False,
            "xai_temperature_len": -1,
            "attn_type": AttentionType("decoder"),
            "k_scale": scales[0] if self.is_fp8 else None,
            "v_scale": scales[1] if self.is_fp8 else None,
            **options,
        }
        first = {**plain, "sliding_window_size": -1} if has_windows else plain
        self.layers = [Layer(layer_id=0, **first)]
        if has_windows:
            self.layers.append(Layer(layer_id=1, **plain))
        self.random = torch.Generator().manual_seed(5)
        self.keys = [[self._rows(kv_heads, 0, size)] * num_reqs for _ in self.layers]
        self.values = [
            [self._rows(kv_heads, 0, self.size_v)] * num_reqs for _ in self.layers
        ]
        pages = torch.randperm(
            NUM_TOKENS // page_size - 1, generator=torch.Generator().manual_seed(3)
        )
        # page 0 is SGLang's padding; rows of the pool are not in the order of the requests
        self.rows = torch.tensor([3, 1, 4, 2])[:num_reqs]
        width = MAX_TOKENS // page_size
        for req, row in enumerate(self.rows.tolist()):
            own = pages[req * width : (req + 1) * width] + 1
            slots = own[:, None] * page_size + torch.arange(page_size)
            self.runner.req_to_token_pool.req_to_token[row] = slots.flatten()

    @property
    def is_fp8(self) -> bool:
        """Whether the cache has codes of one byte."""
        return self.cache_dtype.itemsize == 1

    def _rows(self, heads: int, count: int, size: int) -> Tensor:
        shape = (count, heads, size)
        return torch.randn(shape, generator=self.random).to(DEVICE, self.dtype)

    def batch(self, mode: str, query_lens: Sequence[int], padding: int = 0) -> Any:
        """Return SGLang's description of a step whose keys `self.keys` has already.

        Args:
            mode: name of a ForwardMode.
            query_lens: new tokens of each request.
            padding: rows of a CUDA graph after the last request.
        """
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        reqs, new = len(query_lens), torch.tensor(query_lens)
        ends = torch.tensor([len(key) for key in self.keys[0][:reqs]])
        table = self.runner.req_to_token_pool.req_to_token.cpu()
        slots = [
            table[row, end - count : end]
            for row, end, count in zip(self.rows, ends, new, strict=False)
        ]
        width = int(new[0])
        slots.append(torch.zeros(padding * width, dtype=torch.int32))
        is_verify = mode == "TARGET_VERIFY"
        lens = torch.cat([ends - (new if is_verify else 0), torch.ones(padding).long()])
        rows = torch.cat([self.rows[:reqs], torch.zeros(padding).long()])
        is_extend = mode in ("EXTEND", "MIXED")
        drafts = SimpleNamespace(
            draft_token_num=width, topk=1, tree_topk=1, ragged_verify_layout=None
        )
        return SimpleNamespace(
            forward_mode=ForwardMode[mode],
            batch_size=reqs + padding,
            rids=[f"request {req}" for req in range(reqs)] if self.has_names else None,
            req_pool_indices=rows.to(DEVICE),
            seq_lens=lens.to(DEVICE),
            seq_lens_cpu=lens,
            out_cache_loc=torch.cat(slots).long().to(DEVICE),
            spec_info=drafts if is_verify else None,
            extend_seq_lens=new.to(DEVICE) if is_extend else None,
            extend_seq_lens_cpu=list(query_lens) if is_extend else None,
        )

    def step(
        self,
        mode: str,
        query_lens: Sequence[int],
        padding: int = 0,
        graph: bool = False,
    ) -> float:
        """Run a step, and return the largest error of its outputs divided by their budgets.

        Args:
            mode: name of a ForwardMode.
            query_lens: new tokens of each request.
            padding: rows of a CUDA graph after the last request.
            graph: whether the metadata is read as in a captured graph.
        """
        tokens = sum(query_lens)
        drawn = []
        for number in range(len(self.layers)):
            rows = tokens + padding * query_lens[0]
            query = self._rows(self.heads, rows, self.size)
            key = self._rows(self.kv_heads, rows, self.size)
            value = self._rows(self.kv_heads, rows, self.size_v)
            for stored, new in ((self.keys, key), (self.values, value)):
                for req, part in enumerate(new[:tokens].split(list(query_lens))):
                    own = stored[number]
                    stored[number] = [
                        *own[:req],
                        torch.cat([own[req], part]),
                        *own[req + 1 :],
                    ]
            drawn.append((query, key, value))
        batch = self.batch(mode, query_lens, padding)
        if graph:
            self.backend.init_cuda_graph_state(8, 32)
            self.backend.init_forward_metadata_out_graph(batch, in_capture=True)
            self.backend.init_forward_metadata_in_graph(batch)
        else:
            self.backend.init_forward_metadata(batch)
        run = (
            self.backend.forward_decode
            if mode == "DECODE"
            else self.backend.forward_extend
        )
        kwargs = {} if self.sinks is None else {"sinks": self.sinks}
        errors = []
        for number, (query, key, value) in enumerate(drawn):
            layer = self.layers[number]
            out = run(
                query.flatten(1), key.clone(), value.clone(), layer, batch,
                save_kv_cache=True, **kwargs,
            )  # fmt: skip
            assert out.shape == (len(query), self.heads * self.size_v)
            out = out.view(len(query), self.heads, self.size_v)
            errors.append(self.judge(number, query[:tokens], query_lens, out[:tokens]))
        return max(errors)

    def judge(
        self, number: int, query: Tensor, query_lens: Sequence[int], out: Tensor
    ) -> float:
        """Return the error of an output of a layer divided by its budget; at most 1 is correct."""
        layer = self.layers[number]
        parts = query.cpu().split(list(query_lens))
        requests = [
            OracleRequest(part, *self.stored(number, req))
            for req, part in enumerate(parts)
        ]
        window = layer.sliding_window_size
        options = {
            "causal": layer.attn_type.value == "decoder",
            "scale": layer.scaling,
            "sliding_window": window + 1 if window > -1 else None,
            "attention_chunk_size": self.chunk_size if layer.use_irope else None,
            "logits_soft_cap": layer.logit_cap or None,
            "sinks": None if self.sinks is None else self.sinks.float(),
        }
        if self.is_fp8:
            options |= dict(zip(("k_scale", "v_scale"), SCALES, strict=True))
        answer = attend_by_hand(requests, options, len(out))
        same = answer.out.to(self.dtype)
        verdict = judge_out(out, answer, same, self.dtype)
        return verdict.worst if verdict.finite else float("inf")

    def stored(self, number: int, req: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a request as the cache of a layer has them."""
        key, value = self.keys[number][req].cpu(), self.values[number][req].cpu()
        if not self.is_fp8:
            return key, value
        return (
            quantise_by_hand(key, SCALES[0], self.cache_dtype),
            quantise_by_hand(value, SCALES[1], self.cache_dtype),
        )
