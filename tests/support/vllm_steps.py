"""Steps of an engine for the vLLM plugin: caches and metadata as vLLM makes them."""

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
from pagetwin.contract.layer_pages import measured_format
from torch import Tensor

from support.fake_vllm import recorded
from support.token_rows import through_codes

BLOCK_SIZE, NUM_BLOCKS, MAX_BLOCKS = 16, 40, 6
STORAGE = {
    "auto": None,
    "int8_per_token_head": torch.int8,
    "fp8_inc": torch.float8_e4m3fn,
}
"""The dtypes of caches that vLLM does not allocate as bytes, by its name. None is the dtype of the
model."""
FP8 = {
    **dict.fromkeys(("fp8", "fp8_inc", "fp8_e4m3"), torch.float8_e4m3fn),
    "fp8_e5m2": torch.float8_e5m2,
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
POISON = 0x7F
"""A byte that is NaN in both FP8 dtypes."""


def vllm_config(layers: dict[str, Any], drafts: int = 0, **model: Any) -> Any:
    """Return what the plugin reads of vLLM's configuration, with further fields of the model."""
    return SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=layers),
        scheduler_config=SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=48),
        model_config=SimpleNamespace(max_model_len=MAX_BLOCKS * BLOCK_SIZE, **model),
        speculative_config=SimpleNamespace(num_speculative_tokens=drafts),
    )


def attention_spec(
    kv_heads: int, head_size: int, dtype: torch.dtype, kv_cache_dtype: str = "auto"
) -> Any:
    """Return the stand-in's description of a layer's cache, before the backend changes it."""
    from vllm.v1.kv_cache_interface import AttentionSpec, KVQuantMode

    # the mode tells the bytes of a cache, not the rule of its writer
    mode = kv_cache_dtype.removesuffix("_vllm").removesuffix("_4over6").upper()
    return AttentionSpec(
        num_kv_heads=kv_heads,
        head_size=head_size,
        head_size_v=head_size,
        dtype=dtype,
        kv_quant_mode=getattr(KVQuantMode, mode, KVQuantMode.NONE),
    )


def make_cache(
    version: str,
    backend: Any,
    kv_heads: int,
    head_size: int,
    dtype: torch.dtype,
    kv_cache_dtype: str = "auto",
) -> Tensor:
    """Return a layer's cache as that version of vLLM allocates it, full of NaN."""
    sizes = (NUM_BLOCKS, BLOCK_SIZE, kv_heads, head_size, kv_cache_dtype)
    if hasattr(backend, "get_kv_cache_shape"):
        shape = backend.get_kv_cache_shape(*sizes)
        order = backend.get_kv_cache_stride_order()
    else:  # vLLM's layout LBNHC
        spec = attention_spec(kv_heads, head_size, dtype, kv_cache_dtype)
        made = backend.customize_spec(spec)
        content = made.state_content_bytes
        content = 2 * head_size if content is None else content // dtype.itemsize
        shape = (NUM_BLOCKS, made.num_head_slots or kv_heads, BLOCK_SIZE, content)
        order = (0, 2, 1, 3)
    packed = torch.empty([shape[axis] for axis in order], dtype=dtype)
    packed.fill_(torch.nan if dtype.is_floating_point else POISON)
    return packed.permute([order.index(axis) for axis in range(len(order))])


class EngineSteps:
    """One layer with its cache, and sequences that grow step by step.

    Args:
        version: version of the stand-in that is installed.
        num_reqs: sequences.
        heads, kv_heads, head_size, dtype: the layer.
        kv_cache_dtype: vLLM's name of the cache's dtype.
        attn_type: kind of attention.
        device: device of the tensors.
        source: Optional. Steps whose layer owns the cache that this layer reads. If None, the
            layer has a cache of its own.
        model: Optional. Fields of vLLM's `ModelConfig`, by name. If None, it has the length alone.
        clamp: whether the layer limits its images to its window.
        backend: Optional. The backend class. If None, that of the plugin.
        options: further arguments of the layer, by name.
    """

    def __init__(
        self,
        version: str,
        num_reqs: int = 3,
        heads: int = 4,
        kv_heads: int = 2,
        head_size: int = 32,
        dtype: torch.dtype = torch.float32,
        kv_cache_dtype: str = "auto",
        attn_type: str = "decoder",
        device: str = DEVICE,
        source: "EngineSteps | None" = None,
        model: dict[str, Any] | None = None,
        clamp: bool = False,
        backend: Any = None,
        **options: Any,
    ) -> None:
        from pagetwin.integrations.vllm.plugin import choose_backend

        self.version, self.options, self.device = version, options, device
        self.heads, self.kv_heads, self.head_size = heads, kv_heads, head_size
        self.dtype, self.fp8 = dtype, FP8.get(kv_cache_dtype)
        self.measured = measured_format(kv_cache_dtype)
        backend = backend or choose_backend()
        self.impl = backend.get_impl_cls()(
            heads,
            head_size,
            head_size**-0.5,
            kv_heads,
            options.get("alibi_slopes"),
            options.get("sliding_window"),
            kv_cache_dtype,
            options.get("logits_soft_cap"),
            attn_type,
            None if source is None else "first",
            sinks=options.get("sinks"),
        )
        self.layer = SimpleNamespace(
            impl=self.impl,
            _k_scale=torch.tensor(0.5, device=device),
            _v_scale=torch.tensor(0.25, device=device),
            _k_scale_float=0.5,
            _v_scale_float=0.25,
            mm_prefix_clamp_sliding_window=clamp,
        )
        self.config = vllm_config({"layer": self.layer}, **(model or {}))
        self.of_step: dict[str, Any] = {}
        self.builder = backend.get_builder_cls()(
            None, ["layer"], self.config, torch.device(device)
        )
        self.impl.bounds = None  # warm-up has tests of its own
        self.random = torch.Generator().manual_seed(5)
        cache_dtype = STORAGE.get(kv_cache_dtype, torch.uint8) or dtype
        if source is None:
            sizes = (kv_heads, head_size, cache_dtype, kv_cache_dtype)
            cache = make_cache(version, backend, *sizes)
            self.cache = torch.empty_like(cache, device=device).copy_(cache)
            self.keys = [self._rows(kv_heads, 0) for _ in range(num_reqs)]
            self.values = [self._rows(kv_heads, 0) for _ in range(num_reqs)]
        else:
            self.cache, self.keys, self.values = (
                source.cache,
                source.keys,
                source.values,
            )
        blocks = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(3))
        self.block_table = (
            blocks[: num_reqs * MAX_BLOCKS].view(num_reqs, MAX_BLOCKS).to(torch.int32)
        )

    def _rows(self, heads: int, count: int) -> Tensor:
        shape = (count, heads, self.head_size)
        return torch.randn(shape, generator=self.random).to(self.device, self.dtype)

    def slots(self, req: int, first: int, last: int) -> Tensor:
        """Return the slots of positions of a sequence."""
        positions = torch.arange(first, last)
        blocks = self.block_table[req, positions // BLOCK_SIZE].long()
        return blocks * BLOCK_SIZE + positions % BLOCK_SIZE

    def common(self, query_lens: Sequence[int], causal: Any, padding: int) -> Any:
        """Return vLLM's description of a step, whose tensors are longer than the step."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        reqs, counts = len(query_lens), torch.tensor([0, *query_lens])
        starts = counts.cumsum(0).to(torch.int32)
        lens = torch.tensor([len(key) for key in self.keys], dtype=torch.int32)
        slots = [
            self.slots(req, len(self.keys[req]) - count, len(self.keys[req]))
            for req, count in enumerate(query_lens)
        ]
        spare = torch.full((2,), -7, dtype=torch.int32)
        device = self.device
        fields = dict(
            query_start_loc=torch.cat([starts, spare]).to(device),
            query_start_loc_cpu=starts,
            seq_lens=torch.cat([lens, spare]).to(device),
            num_reqs=reqs,
            num_actual_tokens=int(starts[-1]) + padding,
            max_query_len=max(query_lens),
            max_seq_len=MAX_BLOCKS * BLOCK_SIZE,
            block_table_tensor=torch.cat([self.block_table] * 2).to(device),
            slot_mapping=torch.cat([*slots, torch.full((padding,), -1)]).to(device),
            causal=causal.to(device) if isinstance(causal, Tensor) else causal,
            seq_lens_cpu_upper_bound=lens,
            **self.of_step,
        )
        known = recorded(self.version)["modules"]["vllm.v1.attention.backend"]
        taken = known["classes"]["CommonAttentionMetadata"]["attributes"]
        assert set(fields) <= set(taken)
        return CommonAttentionMetadata(**fields)

    def step(
        self,
        query_lens: Sequence[int],
        causal: Any = True,
        padding: int = 2,
        prefix: int = 0,
        output_scale: Tensor | None = None,
        **masks: Any,
    ) -> float:
        """Run a step, and return the error of its output divided by the budget.

        Args:
            query_lens: new tokens of each sequence.
            causal: as in vLLM's metadata.
            padding: rows after the last token, as in a captured graph. They are NaN.
            prefix: keys that all sequences share.
            output_scale: Optional. Scale of an FP8 output. If None, it is not quantised.
            masks: options of the oracle in place of the layer's.
        """
        tokens, owns = sum(query_lens), self.impl.kv_sharing_target_layer_name is None
        query = self._rows(self.heads, tokens + padding)
        new = self._rows(2 * self.kv_heads, tokens + padding)
        query[tokens:] = new[tokens:] = torch.nan
        key, value = new.split(self.kv_heads, 1)
        if owns:
            for req, part in enumerate(key[:tokens].split(list(query_lens))):
                self.keys[req] = torch.cat([self.keys[req], part])
            for req, part in enumerate(value[:tokens].split(list(query_lens))):
                self.values[req] = torch.cat([self.values[req], part])
        common = self.common(query_lens, causal, padding)
        metadata = self.builder.build(prefix, common)
        if owns:
            self.impl.do_kv_cache_update(
                self.layer, key, value, self.cache, metadata.slot_mapping
            )
        out = torch.full_like(query, torch.nan)
        scale = None
        if output_scale is not None:
            out, scale = out.to(torch.float8_e4m3fn), output_scale.to(self.device)
        self.impl.forward(
            self.layer, query, key, value, self.cache, metadata, out, scale
        )
        return self.judge(query, query_lens, causal, out, output_scale, **masks)

    def judge(
        self,
        query: Tensor,
        query_lens: Sequence[int],
        causal: Any,
        out: Tensor,
        output_scale: Tensor | None = None,
        **masks: Any,
    ) -> float:
        """Return the error of an output divided by its budget; at most 1 is correct.

        Args:
            query, query_lens, causal, out, output_scale: of the step.
            masks: options of the oracle in place of the layer's.
        """
        tokens = sum(query_lens)
        parts = query[:tokens].cpu().split(list(query_lens))
        requests = [
            OracleRequest(part, *self.stored(req)) for req, part in enumerate(parts)
        ]
        options = {
            "causal": causal,
            "scale": self.head_size**-0.5,
            **{
                name: torch.tensor(given) if name == "alibi_slopes" else given
                for name, given in self.options.items()
            },
        }
        options |= masks
        if self.fp8 and not self.impl.own.is_uncached:
            options |= {"k_scale": 0.5, "v_scale": 0.25}
        answer = attend_by_hand(requests, options, tokens)
        same = answer.out.to(self.dtype)
        verdict = judge_out(out[:tokens], answer, same, self.dtype, output_scale)
        return verdict.worst if verdict.finite else float("inf")

    def stored(self, req: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a sequence as a cache has them."""
        key, value = self.keys[req].cpu(), self.values[req].cpu()
        if self.impl.own.is_uncached:
            return key, value
        if self.measured is not None:
            numbers = (0.5, 0.25) if self.measured.has_global_scale else (None, None)
            key, value = (
                through_codes(self.measured, rows, number)
                for rows, number in zip((key, value), numbers, strict=True)
            )
            return key, value
        if not self.fp8:
            return key, value
        return quantise_by_hand(key, 0.5, self.fp8), quantise_by_hand(
            value, 0.25, self.fp8
        )
