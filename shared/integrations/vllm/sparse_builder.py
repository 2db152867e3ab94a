"""Step metadata of sparse latent attention (MLA) for vLLM: each token is a query of its own.

A token attends to the keys that the indexer has selected for it. So prompts, decodes and drafts are
alike, and the host needs no lengths: of each token the request is stored, in a buffer that captured
CUDA graphs read.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionMetadataBuilder

from ...contract.step_positions import step_positions
from .builder import CapturesUniformBatches, give_bounds


@dataclass
class PagetwinSparseMetadata:
    """One step of sparse layers that share a block table.

    vLLM divides tokens into decodes, which attend to latents, and prefills, for which it expands
    latents. Here all requests are decodes.

    Args:
        num_actual_tokens: rows of the step, padding of a captured graph included.
        num_reqs: requests of the step.
        max_query_len, max_seq_len: upper bounds of the requests' new tokens and keys.
        query_start_loc: [reqs + 1] int32 first row of each request.
        seq_lens: [reqs] int32 keys of each request, its new tokens included.
        block_table: [reqs, max_blocks] int32.
        slot_mapping: [tokens] int64 slot of each new token; -1 if it is not stored.
        req_id_per_token: [tokens] int32 request of each row; -1 for padding.
        block_size: slots per block.
        num_decodes, num_decode_tokens: all requests, and all rows.
        num_prefills, prefill, decode: as vLLM reads them. No request is a prefill.
    """

    num_actual_tokens: int
    num_reqs: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    req_id_per_token: Tensor
    block_size: int
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int = 0
    prefill: None = None
    decode: None = None


class PagetwinSparseBuilder(CapturesUniformBatches, AttentionMetadataBuilder):
    """Turns vLLM's description of a step into `PagetwinSparseMetadata`, on the device.

    Args:
        kv_cache_spec, layer_names, vllm_config, device: as in vLLM.
    """

    supports_draft_decode_metadata_update: bool = True

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.block_size = int(kv_cache_spec.block_size)
        tokens = int(vllm_config.scheduler_config.max_num_batched_tokens)
        self.requests = torch.full((tokens,), -1, dtype=torch.int32, device=device)
        give_bounds(vllm_config, layer_names)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: Any,
        fast_build: bool = False,
    ) -> PagetwinSparseMetadata:
        """Return the metadata of a step.

        Args:
            common_prefix_len: not used, since no prefix is read by several requests at once.
            common_attn_metadata: vLLM's description of the step.
            fast_build: not used, since there is one way.
        """
        common = common_attn_metadata
        reqs, tokens = common.num_reqs, common.num_actual_tokens
        starts, lens = common.query_start_loc[: reqs + 1], common.seq_lens[:reqs]
        found, _ = step_positions(starts, lens, tokens)
        self.requests[:tokens].copy_(found)
        return PagetwinSparseMetadata(
            num_actual_tokens=tokens,
            num_reqs=reqs,
            max_query_len=int(common.max_query_len),
            max_seq_len=int(common.max_seq_len),
            query_start_loc=starts,
            seq_lens=lens,
            block_table=common.block_table_tensor[:reqs],
            slot_mapping=common.slot_mapping,
            req_id_per_token=self.requests[:tokens],
            block_size=self.block_size,
            num_decodes=reqs,
            num_decode_tokens=tokens,
        )
