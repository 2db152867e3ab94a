"""Decode context parallelism inside vLLM: layers whose ranks share each sequence's keys.

vLLM gives each rank its query heads and all new keys, and a slot for those keys that the rank
stores. So the cache is written as on one rank, and `DecodeContextParallel` attends over vLLM's
process group. Each new token is a request of its own, and attends to the first ones of each rank's
keys. A step with prompts attends to their new keys on each rank, without the cache, and exchanges
attention to the earlier keys alone.
"""

import weakref
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from ...contract.attention_options import AttentionOptions
from ...contract.operations import Implementation
from ...contract.parallel import RankBatch
from ...engine.rank_group import RankGroup


@dataclass(frozen=True)
class LayerKind:
    """What layers of the same sizes share, of one interleave size.

    Args:
        step: `DecodeContextParallel` of the implementation.
        interleave_size: consecutive positions that one rank stores.
        context, new: [max tokens, num_heads, head_size_v] float32, for attention to earlier and to
            new keys of prompts.
    """

    step: Any
    interleave_size: int
    context: Tensor
    new: Tensor


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
        readers: ids of the layers that have attended with it.
    """

    kind: tuple[int, bool, bool]
    batch: RankBatch
    readers: set[int]


class SharedKeys:
    """Attention of one layer over keys that the ranks of vLLM's group share.

    Args:
        run: the implementation.
        num_heads: query heads of this rank.
        head_size: elements of a key.
        scale: factor of the dot products.
        takes_new_keys: whether the cache has the new keys as the layer gets them, so that it need
            not be read for them.
        config: vLLM's configuration.
        group: vLLM's group of decode context parallelism.
    """

    def __init__(
        self,
        run: Implementation,
        num_heads: int,
        head_size: int,
        scale: float,
        takes_new_keys: bool,
        config: Any,
        group: Any,
    ) -> None:
        self.run, self.config, self.group = run, config, group
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.takes_new_keys = takes_new_keys
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
        name = (self.run.name, *sizes, interleave_size, query.dtype, device)
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
            kinds[name] = LayerKind(step, interleave_size, partials[0], partials[1])
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
                included. If None, they are read from the caches.
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
        if key is None or value is None or not (has_prompts and self.takes_new_keys):
            batch = self._batch_of(kind.step, caches[0], metadata, False)
            kind.step.attend(query, *caches, batch, self.scale, out, options=options)
            return
        batch = self._batch_of(kind.step, caches[0], metadata, True)
        tokens = len(query)
        context, new = kind.context[:tokens], kind.new[:tokens]
        lses = context.new_empty(2, self.num_heads, tokens)
        kind.step.attend(
            query, *caches, batch, self.scale, context, lses[0],
            # the sink counts once, with the new keys
            replace(options, sinks=None),
        )  # fmt: skip
        starts, longest = metadata.query_start_loc, metadata.max_query_len
        self.run.encoder_attention(
            query, key, value, starts, starts, longest, longest, self.scale, new, lses[1],
            options=replace(options, causal=metadata.causal),
        )  # fmt: skip
        out.copy_(self.run.merge_attn_states(context, lses[0], new, lses[1]))

    def _batch_of(
        self, step: Any, key_cache: Tensor, metadata: Any, is_context: bool
    ) -> RankBatch:
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
            )
            shared = metadata.shared_batch = SharedBatch(kind, batch, set())
        shared.readers.add(id(self))
        return shared.batch


def share_keys(
    impl: Any,
    run: Implementation,
    num_heads: int,
    head_size: int,
    scale: float,
    takes_new_keys: bool,
    **layer: Any,
) -> SharedKeys | None:
    """Return how a layer attends to keys that ranks share; None if they are not shared.

    Args:
        impl: vLLM's implementation of the layer, which has the numbers of ranks.
        run: the implementation that runs it.
        num_heads, head_size, scale, takes_new_keys: as in `SharedKeys`.
        layer: its arguments that ranks may not take.

    Raises:
        NotImplementedError: something that ranks with a share of the keys do not compute.
    """
    check_ranks(impl, "pcp_world_size")
    ranks = getattr(impl, "dcp_world_size", 1)
    # an encoder has no cache: its heads are computed where they are
    if ranks == 1 or layer["attn_type"] in ("encoder", "encoder_only"):
        return None
    from vllm.config import get_current_vllm_config_or_none
    from vllm.distributed.parallel_state import get_dcp_group

    config: Any = get_current_vllm_config_or_none()
    check_shared_layer(ranks, run, config, **layer)
    sizes = (num_heads, head_size, scale)
    return SharedKeys(run, *sizes, takes_new_keys, config, get_dcp_group())


def check_shared_layer(
    ranks: int,
    run: Implementation,
    config: Any,
    sliding_window: int | None,
    alibi_slopes: list[float] | None,
    attn_type: str,
    is_batch_invariant: bool,
) -> None:
    """Raise NotImplementedError if ranks with a share of the keys cannot compute a layer."""
    distances = "a rank does not know how far apart its keys are"
    found = {
        f"sliding_window = {sliding_window}": (sliding_window is not None, distances),
        f"alibi_slopes = {alibi_slopes}": (alibi_slopes is not None, distances),
        f"attn_type = {attn_type}": (
            attn_type == "encoder_decoder",
            "an encoder's keys are stored whole",
        ),
        "VLLM_BATCH_INVARIANT = 1": (
            is_batch_invariant,
            "partial results are grouped by ranks",
        ),
        "enable_dbo or ubatch_size": (
            config.parallel_config.use_ubatching,
            "microbatches would share the buffers of the exchange",
        ),
        f"implementation {run.name}": (
            "DecodeContextParallel" not in run.operations,
            "it has no DecodeContextParallel",
        ),
    }
    for name, (is_found, reason) in found.items():
        if is_found:
            raise NotImplementedError(
                f"{name} with decode_context_parallel_size = {ranks}: expected"
                f" decode_context_parallel_size = 1, since {reason}; or choose another"
                " --attention-backend"
            )


def check_ranks(impl: Any, *names: str) -> None:
    """Raise NotImplementedError if one of these numbers of ranks is above 1."""
    for name in names:
        ranks = getattr(impl, name, 1)
        if ranks > 1:
            raise NotImplementedError(
                f"{name} = {ranks}: expected 1, since this backend does not exchange partial"
                " results between these ranks; choose another --attention-backend"
            )
