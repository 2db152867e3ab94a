"""vLLM's build for CPUs: its slot mapping serves ranks that share keys."""

import inspect
from typing import Any

import torch
from torch import Tensor


def share_keys_on_cpu() -> None:
    """Let vLLM's slot mapping for CPUs serve ranks that share keys, which it rejects otherwise."""
    from vllm.utils import cpu_triton_utils

    plain = cpu_triton_utils._compute_slot_mapping_kernel_impl
    parameters = inspect.signature(plain)

    def map_slots(*args: Any, **kwargs: Any) -> None:
        given = parameters.bind(*args, **kwargs)
        given.apply_defaults()
        if given.arguments["TOTAL_CP_WORLD_SIZE"] == 1:
            plain(*args, **kwargs)
        else:
            write_slots_of_rank(**given.arguments)

    cpu_triton_utils._compute_slot_mapping_kernel_impl = map_slots
    # until 0.30 an object holds the function
    holder = getattr(cpu_triton_utils, "compute_slot_mapping_kernel", None)
    if holder is not None:
        holder.func = map_slots


def write_slots_of_rank(
    num_tokens: int,
    query_start_loc: Tensor,
    positions: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    KV_CACHE_BLOCK_SIZE: int,
    TOTAL_CP_WORLD_SIZE: int,
    TOTAL_CP_RANK: int,
    CP_KV_CACHE_INTERLEAVE_SIZE: int,
    PAD_ID: int,
    **others: Any,
) -> None:
    """Write the slot of each new token on a rank, PAD_ID if another one stores it.

    The arguments have the names of vLLM's kernel. `others` are sizes of its launch.
    """
    run, ranks = CP_KV_CACHE_INTERLEAVE_SIZE, TOTAL_CP_WORLD_SIZE
    tokens = int(query_start_loc[-1])
    request = torch.repeat_interleave(
        torch.arange(len(query_start_loc) - 1), query_start_loc.diff().long()
    )
    position = positions[:tokens].long()
    # the keys of a rank are stored without gaps
    offset = position // (run * ranks) * run + position % run
    block = block_table[request, offset // KV_CACHE_BLOCK_SIZE].long()
    slot = block * KV_CACHE_BLOCK_SIZE + offset % KV_CACHE_BLOCK_SIZE
    is_own = position // run % ranks == TOTAL_CP_RANK
    slot_mapping.fill_(PAD_ID)
    slot_mapping[:tokens] = torch.where(is_own, slot, PAD_ID).to(slot_mapping.dtype)
