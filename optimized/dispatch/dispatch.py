"""Attention calls without a shared prefix: their options, validation and launch plans."""

import torch

from ...contract.attention_options import DEFAULT_OPTIONS, AttentionOptions
from ..runtime.plan_cache import PlanCache
from .choice import launch_attention, make_attention_plan
from .pipeline import Pipeline

MAX_PLANS = 512
"""Plans that are kept. A model needs one per kind of layer and step; a plan is a few KiB of host
memory, and making one takes 0.1 to 0.3 ms."""

PLAIN = {causal: AttentionOptions(causal=causal) for causal in (True, False)}
"""Options of calls that set none."""
_CAUSAL_MEMOS = {True: "_causal", False: "_not_causal"}

PIPELINE = Pipeline(PlanCache(MAX_PLANS), make_attention_plan, launch_attention)
"""Calls of paged attention and of encoder attention."""


def choose_options(options: AttentionOptions, causal: bool) -> AttentionOptions:
    """Return the options of a call with `causal` set.

    The result is kept in the options' own dictionary, so a layer that passes
    the same options in every step gets the same object.

    Args:
        options: as the caller gave them.
        causal: the operation's default.
    """
    if options is DEFAULT_OPTIONS:
        return PLAIN[causal]
    if options.causal is not None:
        return options
    memo, name = options.__dict__, _CAUSAL_MEMOS[causal]
    if name not in memo:
        memo[name] = options.with_causal(causal)
    found: AttentionOptions = memo[name]
    return found


def reject_compute_dtype(compute_dtype: torch.dtype) -> None:
    """Reject a dtype of the arithmetic other than float32.

    Raises:
        NotImplementedError: always; the reference takes any.
    """
    raise NotImplementedError(
        f"compute_dtype = {compute_dtype}: expected torch.float32, in which the kernels"
        " accumulate; the reference takes any"
    )
