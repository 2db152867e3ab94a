"""Decode context parallelism inside vLLM: layers whose ranks share each sequence's keys.

vLLM gives each rank its query heads and all new keys, and a slot for those keys that the rank
stores. So the cache is written as on one rank, and `DecodeContextParallel` attends over vLLM's
process group. In a step of decodes each new token is a request of its own, and attends to the first
ones of each rank's keys. In a step with prompts each request attends to the earlier keys as a
whole, so that they are read once per tile of queries, and that alone is exchanged. Its new tokens
attend to each other on each rank (`NewBlocks`).
"""

import weakref
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from ...contract.attention_options import AttentionOptions
from ...contract.cache_formats import CacheFormat
from ...contract.operations import Implementation
from ...contract.parallel import RankBatch
from ...engine.rank_group import RankGroup
from .caches import NEW_BLOCK_SIZE, NewBlocks, count_blocks, find_new_blocks


@dataclass(frozen=True)
class LayerKind:
    """What layers of the same sizes share, of one interleave size.

    Args:
        step: `DecodeContextParallel` of the implementation.
        interleave_size: consecutive positions that one rank stores.
        context, new: [max tokens, num_heads, head_size_v] float32, for attention to earlier and to
            new keys of prompts.
        lses: [2, num_heads, max tokens] float32, their log-sum-exps.
        new_caches: [blocks, 16, kv_heads, size], for the new keys and values of prompts.
        new_scales: `k_scale` and `v_scale` of these, [blocks, 16, kv_heads], if they are measured;
            otherwise empty, as they are those of the layer.
    """

    step: Any
    interleave_size: int
    context: Tensor
    new: Tensor
    lses: Tensor
    new_caches: tuple[Tensor, Tensor]
    new_scales: dict[str, Any]


_KINDS: "weakref.WeakKeyDictionary[Any, dict[tuple[Any, ...], LayerKind]]" = (
    weakref.WeakKeyDictionary()
)
"""The kinds of layers by vLLM's group."""


@dataclass(frozen=True)
class SharedBatch:
    """A step's `RankBatch`, and the layers that have read it.

    Args:
        kind: what the batch depends on, apart from the step's tensors: slots of a block, whether a
            graph is captured, and whether it has earlier keys alone.
        batch: requests and keys of this rank.
        new_blocks: Optional. Where the new keys are. If None, they are among the shared ones.
        readers: ids of the layers that have attended with it.
    """

    kind: tuple[int, bool, bool]
    batch: RankBatch
    new_blocks: NewBlocks | None
    readers: set[int]


class SharedKeys:
    """Attention of one layer over keys that the ranks of vLLM's group share.

    Args:
        run: the implementation.
        num_heads: query heads of this rank.
        head_size: elements of a key.
        scale: factor of the dot products.
        num_kv_heads: KV heads that each rank stores.
        form: format of its cache.
        owns_cache: whether the layer's new keys are in its cache, not those of another layer.
        config: vLLM's configuration.
        group: vLLM's group of decode context parallelism.
    """

    def __init__(
        self,
        run: Implementation,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        form: CacheFormat,
        owns_cache: bool,
        config: Any,
        group: Any,
    ) -> None:
        self.run, self.config, self.group = run, config, group
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.num_kv_heads, self.form = num_kv_heads, form
        self.owns_cache = owns_cache
        speculative = getattr(config, "speculative_config", None)
        drafts = getattr(speculative, "num_speculative_tokens", None) or 0
        self.decode_query_len = 1 + int(drafts)
        self.kind: LayerKind | None = None

    def allocate(self, query: Tensor, output: Tensor) -> LayerKind:
        """Return what layers of this kind share, made once.

        vLLM calls each layer while it measures memory, so the buffers are part of that. All ranks
        call it in the same order, and are compared.

        Args:
            query: [tokens, num_heads, head_size] of any step.
            output: [tokens, num_heads, head_size_v].
        """
        # vLLM may change it until it has allocated the caches
        interleave_size = int(self.config.parallel_config.cp_kv_cache_interleave_size)
        if self.kind is not None and self.kind.interleave_size == interleave_size:
            return self.kind
        value_size, device = output.shape[-1], query.device
        sizes = (self.num_heads, self.head_size, value_size)
        of_cache = (self.num_kv_heads, self.form.name)
        name = (self.run.name, *sizes, *of_cache, interleave_size, query.dtype, device)
        kinds = _KINDS.setdefault(self.group, {})
        if name not in kinds:
            tokens = int(self.config.scheduler_config.max_num_batched_tokens)
            ranks = RankGroup(
                self.group.device_group,
                timeout=default_pg_timeout.total_seconds(),
                device=device,
            )
            step = self.run.DecodeContextParallel(
                ranks,
                self.num_heads,
                self.head_size,
                tokens,
                interleave_size,
                value_head_size=value_size,
                dtype=query.dtype,
                device=device,
            )
            shape = (2, tokens, self.num_heads, value_size)
            partials = torch.empty(shape, dtype=torch.float32, device=device)
            blocks = count_blocks(
                tokens, int(self.config.scheduler_config.max_num_seqs)
            )
            slots = (blocks, NEW_BLOCK_SIZE, self.num_kv_heads)
            key, value = (
                torch.empty(
                    (*slots, self.form.elements(size)),
                    dtype=self.form.dtype or query.dtype,
                    device=device,
                )
                for size in sizes[1:]
            )
            measured = {}
            if self.form.is_measured:
                k_scale, v_scale = map(self.form.empty_scales, (key, value))
                measured = {"k_scale": k_scale, "v_scale": v_scale}
            kinds[name] = LayerKind(
                step,
                interleave_size,
                partials[0],
                partials[1],
                partials.new_empty(2, self.num_heads, tokens),
                (key, value),
                measured,
            )
        self.kind = kinds[name]
        return self.kind

    def attend(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        caches: tuple[Tensor, Tensor],
        metadata: Any,
        out: Tensor,
        options: AttentionOptions,
    ) -> None:
        """Write attention of this rank's query heads over the whole sequences into `out`.

        Args:
            query: [tokens, num_heads, head_size] of the step, padding included.
            key, value: [tokens, kv_heads, size] of its new tokens, those that other ranks store
                included. If None, they are read from the caches, once per new token.
            caches: key and value cache of this rank.
            metadata: the `PagetwinMetadata` of the step. All layers that it serves share a batch.
            out: [tokens, num_heads, head_size_v], modified in place.
            options: as in `DecodeContextParallel.attend`.

        Raises:
            NotImplementedError: `causal` is set per request.
        """
        if not isinstance(metadata.causal, bool):
            raise NotImplementedError(
                "causal is a tensor: expected one value for all requests with decode context"
                " parallelism; choose another --attention-backend"
            )
        kind = self.allocate(query, out)
        has_prompts = metadata.max_query_len > self.decode_query_len
        if key is None or value is None or not (has_prompts and self.owns_cache):
            shared = self._batch_of(kind.step, caches[0], metadata, False)
            kind.step.attend(
                query, *caches, shared.batch, self.scale, out, options=options
            )
            return
        shared = self._batch_of(kind.step, caches[0], metadata, True)
        blocks, tokens = shared.new_blocks, len(query)
        assert blocks is not None
        context, new, lses = (
            kind.context[:tokens], kind.new[:tokens], kind.lses[..., :tokens],
        )  # fmt: skip
        kind.step.attend(
            query, *caches, shared.batch, self.scale, context, lses[0],
            # the sink counts once, with the new keys
            replace(options, sinks=None),
        )  # fmt: skip
        options = replace(options, **kind.new_scales)
        named = {"kv_cache_dtype": self.form.name} if kind.new_scales else {}
        self.run.reshape_and_cache(
            key, value, *kind.new_caches, blocks.slot_mapping, options.k_scale, options.v_scale,
            k_global_scale=options.k_global_scale, v_global_scale=options.v_global_scale, **named,
        )  # fmt: skip
        starts, longest = metadata.query_start_loc, metadata.max_query_len
        self.run.paged_attention(
            query, *kind.new_caches, blocks.block_table, starts, blocks.lens, longest,
            longest, self.scale, new, lses[1],
            options=replace(options, causal=metadata.causal),
        )  # fmt: skip
        out.copy_(self.run.merge_attn_states(context, lses[0], new, lses[1]))

    def _batch_of(
        self, step: Any, key_cache: Tensor, metadata: Any, is_context: bool
    ) -> SharedBatch:
        """Return the batch of a step, with all keys or with those before the step.

        It is prepared by the first layer, and so inside of a graph that captures the step. A layer
        that reads it again is in another step, whose tensors vLLM has changed in place.
        """
        is_captured = key_cache.is_cuda and torch.cuda.is_current_stream_capturing()
        kind = (key_cache.shape[1], is_captured, is_context)
        shared: SharedBatch | None = metadata.shared_batch
        if shared is None or shared.kind != kind or id(self) in shared.readers:
            starts, lens = metadata.query_start_loc, metadata.seq_lens
            batch = step.prepare(
                key_cache,
                metadata.block_table,
                starts,
                lens - starts.diff() if is_context else lens,
                metadata.num_actual_tokens,
                metadata.max_seq_len,
                metadata.causal and not is_context,
                metadata.max_query_len,
            )
            blocks = find_new_blocks(metadata) if is_context else None
            shared = SharedBatch(kind, batch, blocks, set())
            metadata.shared_batch = shared
        shared.readers.add(id(self))
        return shared
