"""Decode context parallelism inside vLLM: layers whose ranks share each sequence's keys.

vLLM gives each rank its query heads and all new keys, and a slot for those keys that the rank
stores. So the cache is written as on one rank, and `DecodeContextParallel` attends: each new token
is a request of its own, and attends to the first ones of each rank's keys. Prompts, decodes and
drafts are the same to it. It runs over vLLM's process group.
"""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from ...contract.attention_options import AttentionOptions
from ...contract.operations import Implementation
from ...contract.parallel import RankBatch
from ...engine.rank_group import RankGroup

_STEPS: "weakref.WeakKeyDictionary[Any, dict[tuple[Any, ...], Any]]" = (
    weakref.WeakKeyDictionary()
)
"""The `DecodeContextParallel` of each kind of layer, by vLLM's group."""


class SharedBatch:
    """A step's `RankBatch`, and the layers that have read it.

    Args:
        kind: what the batch depends on, apart from the step's tensors.
        batch: requests and keys of this rank.
        readers: ids of the layers that have attended with it.
    """

    def __init__(self, kind: tuple[int, bool], batch: RankBatch) -> None:
        self.kind, self.batch = kind, batch
        self.readers: set[int] = set()


class SharedKeys:
    """Attention of one layer over keys that the ranks of vLLM's group share.

    Args:
        run: the implementation.
        num_heads: query heads of this rank.
        head_size: elements of a key.
        config: vLLM's configuration.
        group: vLLM's group of decode context parallelism.
    """

    def __init__(
        self,
        run: Implementation,
        num_heads: int,
        head_size: int,
        config: Any,
        group: Any,
    ) -> None:
        self.run, self.config, self.group = run, config, group
        self.num_heads, self.head_size = num_heads, head_size
        self._step: Any = None
        self._interleave_size = 0

    def allocate(self, query: Tensor, output: Tensor) -> Any:
        """Return the `DecodeContextParallel` of this kind of layer, made once per kind.

        vLLM calls each layer while it measures memory, so the buffers are part of that. All ranks
        call it in the same order, and are compared.

        Args:
            query: [tokens, num_heads, head_size] of any step.
            output: [tokens, num_heads, head_size_v].
        """
        # vLLM may change it until it has allocated the caches
        interleave_size = int(self.config.parallel_config.cp_kv_cache_interleave_size)
        if self._step is not None and self._interleave_size == interleave_size:
            return self._step
        kind = (
            *(self.run.name, self.num_heads, self.head_size, output.shape[-1]),
            *(interleave_size, query.dtype, query.device),
        )
        steps = _STEPS.setdefault(self.group, {})
        if kind not in steps:
            ranks = RankGroup(
                self.group.device_group,
                timeout=default_pg_timeout.total_seconds(),
                device=query.device,
            )
            steps[kind] = self.run.DecodeContextParallel(
                ranks,
                self.num_heads,
                self.head_size,
                int(self.config.scheduler_config.max_num_batched_tokens),
                interleave_size,
                value_head_size=output.shape[-1],
                dtype=query.dtype,
                device=query.device,
            )
        self._step, self._interleave_size = steps[kind], interleave_size
        return self._step

    def attend(
        self,
        query: Tensor,
        caches: tuple[Tensor, Tensor],
        metadata: Any,
        scale: float,
        out: Tensor,
        options: AttentionOptions,
    ) -> None:
        """Write attention of this rank's query heads over the whole sequences into `out`.

        Args:
            query: [tokens, num_heads, head_size] of the step, padding included.
            caches: key and value cache of this rank.
            metadata: the `PagetwinMetadata` of the step. All layers that it serves share a batch.
            scale: factor of the dot products.
            out: [tokens, num_heads, head_size_v], modified in place.
            options: as in `DecodeContextParallel.attend`.

        Raises:
            NotImplementedError: `causal` is set per request.
        """
        step = self.allocate(query, out)
        batch = self._batch_of(step, caches[0], metadata)
        step.attend(query, *caches, batch, scale, out, options=options)

    def _batch_of(self, step: Any, key_cache: Tensor, metadata: Any) -> RankBatch:
        """Return the batch of a step.

        It is prepared by the first layer, and so inside of a graph that captures the step. A layer
        that reads it again is in another step, whose tensors vLLM has changed in place.
        """
        is_captured = key_cache.is_cuda and torch.cuda.is_current_stream_capturing()
        kind = (key_cache.shape[1], is_captured)
        shared: SharedBatch | None = metadata.shared_batch
        if shared is None or shared.kind != kind or id(self) in shared.readers:
            if not isinstance(metadata.causal, bool):
                raise NotImplementedError(
                    "causal is a tensor: expected one value for all requests with decode context"
                    " parallelism; choose another --attention-backend"
                )
            batch = step.prepare(
                key_cache,
                metadata.block_table,
                metadata.query_start_loc,
                metadata.seq_lens,
                metadata.num_actual_tokens,
                metadata.max_seq_len,
                metadata.causal,
            )
            shared = metadata.shared_batch = SharedBatch(kind, batch)
        shared.readers.add(id(self))
        return shared.batch


def share_keys(
    impl: Any, run: Implementation, num_heads: int, head_size: int, **layer: Any
) -> SharedKeys | None:
    """Return how a layer attends to keys that ranks share; None if they are not shared.

    Args:
        impl: vLLM's implementation of the layer, which has the numbers of ranks.
        run: the implementation that runs it.
        num_heads, head_size: of the layer.
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
    return SharedKeys(run, num_heads, head_size, config, get_dcp_group())


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
