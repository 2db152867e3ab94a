"""Attention metadata of one step: start locations, lengths, block table and slots.

The scheduler decides how many tokens of each request a step computes. This file turns that
decision, three lists, into the tensors that the cache write and attention read. It runs once per
step, and all layers use its result. Layers with other block tables get metadata of their own.
"""

from collections.abc import Sequence

import torch

from ...contract.argument_types import typed
from ...contract.kinds import HOST
from ...contract.metadata_classes import CommonAttentionMetadata, PagedAttentionMetadata
from ...contract.shapes import BlockTable, CountsBuffer, SlotMapping
from ...engine.backend_interface import AttentionMetadataBuilder
from ...validation import validated
from ...validation.step import check_attn_groups
from ..cache.block_table import make_block_table
from ..cache.slot_mapping import compute_slot_mapping_batch


@typed
def build_common_attn_metadata(
    query_lens: Sequence[int],
    num_computed_tokens: Sequence[int],
    block_rows: Sequence[Sequence[int]],
    block_size: int,
    device: torch.device | str = "cpu",
) -> CommonAttentionMetadata:
    """Return one step's metadata from its requests, in the given order.

    Args:
        query_lens: [reqs] new tokens of each request; may be 0.
        num_computed_tokens: [reqs] tokens already in the cache.
        block_rows: [reqs] block ids of each request, in sequence order.
        block_size: slots in a block.
        device: device of the cache.

    Returns:
        The metadata. Its maxima are exact; they are 0 for an empty batch.

    Raises:
        IndexError: a sequence longer than its row, or a negative block id.
        ValueError: lists of different lengths, or a negative count.

    Source:
        vLLM's V1 model runner, before it builds a backend's metadata.

    Example:
        Request 0 decodes its fifth token; request 1 starts with three.

        >>> step = build_common_attn_metadata(
        ...     query_lens=[1, 3],
        ...     num_computed_tokens=[4, 0],
        ...     block_rows=[[7, 2], [5]],
        ...     block_size=4,
        ... )
        >>> step.query_start_loc, step.seq_lens
        (tensor([0, 1, 4], dtype=torch.int32), tensor([5, 3], dtype=torch.int32))
        >>> step.slot_mapping
        tensor([ 8, 20, 21, 22])
    """
    # step: compute the slots of the new tokens
    slot_mapping = compute_slot_mapping_batch(
        query_lens, num_computed_tokens, block_rows, block_size
    )
    # step: pad the rows to one table
    block_table = make_block_table(block_rows)
    # step: compute the start of each request
    starts = [0]
    for query_len in query_lens:
        starts.append(starts[-1] + query_len)
    query_start_loc = torch.tensor(starts, dtype=torch.int32, device=HOST)
    # step: compute the length of each sequence
    seq_lens = torch.tensor(
        [a + b for a, b in zip(num_computed_tokens, query_lens, strict=True)],
        dtype=torch.int32,
        device=HOST,
    )
    # step: copy everything to the device
    return CommonAttentionMetadata(
        query_start_loc=query_start_loc.to(device),
        query_start_loc_cpu=query_start_loc,
        seq_lens=seq_lens.to(device),
        seq_lens_cpu=seq_lens,
        num_computed_tokens_cpu=torch.tensor(
            num_computed_tokens, dtype=torch.int32, device=HOST
        ),
        num_reqs=len(query_lens),
        num_actual_tokens=starts[-1],
        max_query_len=max(query_lens, default=0),
        max_seq_len=max(seq_lens.tolist(), default=0),
        block_table_tensor=block_table.to(device),
        slot_mapping=slot_mapping.to(device),
    )


@validated(check_attn_groups)
def build_attn_metadata(
    attn_metadata_builders: Sequence[AttentionMetadataBuilder],
    num_reqs: int,
    num_tokens: int,
    query_start_loc: CountsBuffer,
    query_start_loc_cpu: CountsBuffer,
    seq_lens: CountsBuffer,
    seq_lens_cpu: CountsBuffer,
    num_computed_tokens_cpu: CountsBuffer,
    block_tables: Sequence[BlockTable],
    slot_mappings: Sequence[SlotMapping],
    layer_names: Sequence[Sequence[str]],
    num_tokens_padded: int | None = None,
) -> dict[str, PagedAttentionMetadata]:
    """Return the metadata of every layer: one object per group of layers.

    Layers that share a block table form a group. A model with both sliding-window and full
    attention has two. The buffers may be longer than the batch; their rest is not read.

    Args:
        attn_metadata_builders: one per group.
        num_reqs: requests in the batch.
        num_tokens: new tokens in the batch.
        query_start_loc, query_start_loc_cpu: [reqs + 1 or more] start of each request's new
            tokens.
        seq_lens, seq_lens_cpu: [reqs or more] tokens of each sequence after the step.
        num_computed_tokens_cpu: [reqs or more] tokens in the cache before the step.
        block_tables: per group [reqs or more, max_blocks].
        slot_mappings: per group [tokens or more].
        layer_names: per group the names of its layers.
        num_tokens_padded: Optional. Slots that the metadata keeps, at least `num_tokens`: a CUDA
            graph runs on so many tokens. If None, as many as there are tokens.

    Returns:
        The metadata by layer name; layers of one group share one object.

    Raises:
        IndexError: a group has no builder, table or slots.
        ValueError: no request, a buffer shorter than the batch, or fewer padded tokens than
            tokens.

    Source:
        vLLM's function of that name. Its runner passes `num_tokens_padded`.

    Example:
        Two decodes; the buffers hold a third request.

        >>> builder = BACKENDS[0].get_builder_cls()(
        ...     KVCacheSpec(16, 2, 32, torch.float16), ["layer.0", "layer.1"], "cpu"
        ... )
        >>> starts = torch.tensor([0, 1, 2, 0], dtype=torch.int32)
        >>> seq_lens = torch.tensor([7, 3, 0], dtype=torch.int32)
        >>> metadata = build_attn_metadata(
        ...     [builder],
        ...     num_reqs=2,
        ...     num_tokens=2,
        ...     query_start_loc=starts,
        ...     query_start_loc_cpu=starts,
        ...     seq_lens=seq_lens,
        ...     seq_lens_cpu=seq_lens,
        ...     num_computed_tokens_cpu=torch.tensor([6, 2], dtype=torch.int32),
        ...     block_tables=[torch.tensor([[4], [9], [0]], dtype=torch.int32)],
        ...     slot_mappings=[torch.tensor([70, 146])],
        ...     layer_names=[["layer.0", "layer.1"]],
        ... )
        >>> metadata["layer.0"] is metadata["layer.1"]
        True
        >>> metadata["layer.0"].seq_lens, metadata["layer.0"].max_query_len
        (tensor([7, 3], dtype=torch.int32), 1)
    """
    num_slots = num_tokens if num_tokens_padded is None else num_tokens_padded
    # step: slice the buffers to the batch
    starts = query_start_loc_cpu[: num_reqs + 1]
    lens = seq_lens_cpu[:num_reqs]
    attn_metadata: dict[str, PagedAttentionMetadata] = {}
    # step: build once per group and assign the result to its layers
    for group, names in enumerate(layer_names):
        common = CommonAttentionMetadata(
            query_start_loc=query_start_loc[: num_reqs + 1],
            query_start_loc_cpu=starts,
            seq_lens=seq_lens[:num_reqs],
            seq_lens_cpu=lens,
            num_computed_tokens_cpu=num_computed_tokens_cpu[:num_reqs],
            num_reqs=num_reqs,
            num_actual_tokens=num_tokens,
            max_query_len=int(starts.diff().max()),
            max_seq_len=int(lens.max()),
            block_table_tensor=block_tables[group][:num_reqs],
            slot_mapping=slot_mappings[group][:num_slots],
        )
        metadata = attn_metadata_builders[group].build(0, common)
        attn_metadata.update(dict.fromkeys(names, metadata))
    return attn_metadata
