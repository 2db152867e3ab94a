"""Sparse latent attention (MLA) of vLLM, recorded: cache writes, selections, and attention.

vLLM's indexer writes the positions that each token selects to a buffer, and `forward_mqa` attends
to them. What is told is that buffer and, of pagetwin's own layers, the slots that they looked up.

Not compared: FP8 queries, writes of records of bytes, and the attention of vLLM's own kernels over
an FP8 cache or over records. Not recorded at all: indexers and their caches, ranks that share
latents, microbatches, and caches whose rows are not one per token. Prompts that vLLM attends to
with expanded latents are not selected for, and are left out.
"""

from dataclasses import replace
from typing import Any

from torch import Tensor

from ...contract.attention_options import AttentionOptions
from ...contract.cache_formats import CACHE_DTYPE_NAMES, TENSOR_SCALE_DTYPES
from ...contract.latent_formats import find_latent_format
from ..laws.selection import SelectedKeys
from ..recorder import Recorder
from .backend import StepGroups
from .vllm_latent import LatentReader, latent_parts, recorded_latent_impl
from .vllm_step import OWN_NAMES, PLAIN_DTYPES

PLAIN_SPARSE = ("FLASHMLA_SPARSE", "FLASH_ATTN_MLA_SPARSE", *OWN_NAMES)
"""Backends whose caches hold a latent, and then its rope key, element by element or as records."""


class SparseReader(LatentReader):
    """Reads vLLM's metadata and layers of sparse latent attention."""

    def tell_decodes(
        self,
        recorder: Recorder,
        name: str,
        group: str | None,
        impl: Any,
        q: Tensor | tuple[Tensor, Tensor],
        kv_cache: Tensor,
        metadata: Any,
        layer: Any,
        out: Tensor,
    ) -> None:
        """Tell the recorder what the tokens of a layer select, and what it has computed for them.

        Args:
            recorder, name, group, impl, q, kv_cache, metadata, layer, out: as in `LatentReader`.
        """
        query, rope = q if isinstance(q, tuple) else (q, None)
        buffer = getattr(impl, "topk_indices_buffer", None)
        if group is None or buffer is None or not len(query):
            return
        is_own = recorder.implementation in OWN_NAMES
        is_fp8 = impl.kv_cache_dtype in CACHE_DTYPE_NAMES
        is_record = find_latent_format(kv_cache) is not None
        is_plain = is_record or impl.kv_cache_dtype in PLAIN_DTYPES
        # kernels of vLLM round the numbers of such a cache, or the queries
        is_rounded = (is_fp8 or is_record) and not is_own
        if not is_plain or is_rounded or query.dtype in TENSOR_SCALE_DTYPES:
            return
        rank = out.shape[-1]
        if is_record:
            rows = latents = kv_cache[:, :, None]
        else:
            rows, latents, _ = latent_parts(kv_cache, rank, impl.kv_cache_dtype)
        options = AttentionOptions(causal=False)
        if is_fp8:
            scale = layer._k_scale
            options = replace(options, k_scale=scale, v_scale=scale)
        width = buffer.shape[1]
        most = min(width, int(getattr(metadata, "topk_tokens", None) or width))
        slots = getattr(impl, "recorded_slots", None)
        recorder.attended(
            name, query, out.view(*query.shape[:2], rank), rows, latents, impl.scale,
            options, group, query_rope=rope,
            selection=SelectedKeys(buffer[: len(query)], most, slots),
        )  # fmt: skip


def recorded_sparse_impl(
    base: Any, recorder: Recorder, reader: SparseReader, groups: StepGroups
) -> Any:
    """Return a subclass of an implementation of sparse latent attention that tells what it does.

    Args:
        base, recorder, reader, groups: as in `recorded_latent_impl`.
    """
    recorded: Any = recorded_latent_impl(base, recorder, reader, groups)
    if not hasattr(base, "find_slots"):
        return recorded

    class RecordedSparseImpl(recorded):  # type: ignore[misc]
        """Tells the recorder which slots pagetwin's own layers have looked up."""

        recorded_slots: Tensor | None = None

        def find_slots(self, *args: Any, **kwargs: Any) -> Tensor:
            slots: Tensor = super().find_slots(*args, **kwargs)
            self.recorded_slots = slots if reader.tells(recorder) else None
            return slots

        def forward_mqa(self, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().forward_mqa(*args, **kwargs)
            finally:
                self.recorded_slots = None

    return RecordedSparseImpl
