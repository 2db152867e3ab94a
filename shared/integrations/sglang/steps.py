"""Steps of SGLang: page table, offsets of new tokens and sequence lengths, from a ForwardBatch."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class SglangStep:
    """What the layers read in one step.

    Args:
        block_table: [reqs, max_pages] int32 pages of each request.
        query_start_loc: [reqs + 1] int32 first new token of each request.
        seq_lens: [reqs] int32 keys of each request, its new tokens included.
        max_query_len, max_seq_len: upper bounds of the new tokens and keys of a request.
        window_table, window_slots: Optional. Pages of requests and slots of new tokens in the
            pool of the layers with a window. If None, all layers have one pool.
    """

    block_table: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    max_query_len: int
    max_seq_len: int
    window_table: Tensor | None = None
    window_slots: Tensor | None = None


def read_step(
    batch: Any, req_to_token: Tensor, page_size: int, windows: Any, in_graph: bool
) -> SglangStep | None:
    """Return a step; None if it has no request. The host does not wait for the device.

    Args:
        batch: SGLang's `ForwardBatch`.
        req_to_token: [reqs, max_tokens] int32 slot of each token, consecutive within a page.
        page_size: slots of a page.
        windows: Optional. SGLang's pools, if the layers with a window have one of their own.
        in_graph: whether a CUDA graph is captured. Its bounds are those of any later step.

    Raises:
        NotImplementedError: the kind of the step, or its drafts, are not served.
    """
    reqs, mode = int(batch.batch_size), batch.forward_mode
    if not reqs:
        return None
    new = count_new_tokens(batch)
    # SGLang's lengths leave out the tokens that are verified
    drafts = new if new and mode.is_target_verify() else 0
    firsts = req_to_token[:, ::page_size]  # first slot of each page
    longest = firsts.shape[1] * page_size
    if not in_graph and batch.seq_lens_cpu is not None:
        longest = min(longest, int(batch.seq_lens_cpu[:reqs].max()) + drafts)
    if new is not None:
        starts = torch.arange(reqs + 1, dtype=torch.int32, device=req_to_token.device)
        starts, max_query_len = starts * new, new
    elif in_graph:
        raise NotImplementedError(
            f"forward_mode = {mode.name} in a CUDA graph: expected as many new tokens per request"
        )
    else:
        ends = torch.cumsum(batch.extend_seq_lens, 0, dtype=torch.int32)
        starts = torch.nn.functional.pad(ends, (1, 0))
        max_query_len = int(max(batch.extend_seq_lens_cpu))
    rows = batch.req_pool_indices[:reqs].long()
    slots = firsts[:, : -(-longest // page_size)][rows]
    own = (None, None)
    if windows is not None:
        translate = windows.translate_loc_from_full_to_swa
        pages = (translate(slots.long()) // page_size).to(torch.int32)
        own = (pages, translate(batch.out_cache_loc))
    table, lens = slots // page_size, batch.seq_lens[:reqs] + drafts
    lens = lens.to(torch.int32)
    return SglangStep(table, starts, lens, max_query_len, longest, *own)


def count_new_tokens(batch: Any) -> int | None:
    """Return the new tokens of each request of a step; None if they may differ.

    Raises:
        NotImplementedError: the kind of the step, or its drafts, are not served.
    """
    mode, drafts = batch.forward_mode, batch.spec_info
    if mode.is_decode_or_idle():
        return 1
    if mode.is_dllm_extend():
        raise NotImplementedError(f"forward_mode = {mode.name}: expected causal steps")
    if not mode.is_target_verify():
        return None
    topk = getattr(drafts, "tree_topk", getattr(drafts, "topk", 1))
    if topk != 1 or drafts.ragged_verify_layout is not None:
        raise NotImplementedError(
            "drafts in a tree or of several lengths: expected --speculative-eagle-topk 1, and as"
            " many drafts for every request"
        )
    return int(drafts.draft_token_num)
