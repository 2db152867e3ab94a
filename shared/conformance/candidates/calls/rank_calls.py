"""Calls of a candidate's operations of several ranks, all of which run in this process.

The result is that of all ranks together: rows of all heads and tokens, as one rank returns them.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ....contract.attention_options import AttentionOptions
from ....contract.parallel import KeySplits
from ....engine.rank_group import RankGroup
from ...cases.batches import NAN
from ...cases.rank_calls import rank_call
from ...cases.ranks import RankLayout
from ...cases.signatures import SignedBatch
from ...cases.signed_calls import SignedCall
from ...checks.expect import expect_same
from ..setting import Setting
from .calling import Result, run_call, value_size_of
from .ranks import run_ranks

PROMPT_OPTIONS = (
    "sliding_window", "attention_chunk_size", "alibi_slopes", "position_bias",
    "logits_soft_cap", "sinks", "batch_invariant",
)  # fmt: skip
"""Options of a call over prompts that its ranks get."""


def run_signed(setting: Setting, batch: SignedBatch, built: SignedCall) -> Result:
    """Return the candidate's result of a batch, on one rank or on those of its signature.

    Raises:
        OutsideSupport: The call is outside of the candidate's declared support.
    """
    ranks = batch.signature.ranks
    if ranks is None:
        return run_call(setting, built.call)
    if ranks.is_step:
        out, lse = _run_step(setting, batch, built, ranks)
    else:
        out, lse = _run_prompts(setting, batch, built, ranks)
    tokens, heads, _ = built.call.query.shape
    shape = [tokens, heads, value_size_of(built.call)]
    expect_same("shape of the output", list(out.shape), shape)
    expect_same("dtype of the output", out.dtype, built.call.dtype)
    if _has_bits_of_one_rank(setting, batch, ranks):
        right, right_lse = _on_one_rank(setting, batch, built, ranks)
        expect_same("bits of rows, which are those of one rank", out, right)
        if lse is not None:
            expect_same(
                "bits of log-sum-exps, which are those of one rank", lse, right_lse
            )
    return out, lse


def _has_bits_of_one_rank(
    setting: Setting, batch: SignedBatch, ranks: RankLayout
) -> bool:
    """Return whether the candidate claims the bits of one rank, which it computes too."""
    if ranks.world_size == 1 or setting.candidate.why_unclaimed("batch_invariant"):
        return False
    if ranks.is_step:
        # with all heads on every rank, the splits alone differ
        return ranks.splits is not None and ranks.tp_world_size == ranks.world_size
    if batch.signature.choice["batch_invariant"] == "no":
        return False
    operations = setting.candidate.operations
    return setting.candidate.promises_all and "paged_attention" in operations


def _on_one_rank(
    setting: Setting, batch: SignedBatch, built: SignedCall, ranks: RankLayout
) -> Result:
    """Return the candidate's result on one rank."""
    if not ranks.is_step:
        return run_call(setting, built.call)
    alone = replace(ranks, world_size=1, tp_world_size=1)
    signature = replace(batch.signature, ranks=alone)
    return _run_step(setting, replace(batch, signature=signature), built, alone)


def _run_step(
    setting: Setting, batch: SignedBatch, built: SignedCall, ranks: RankLayout
) -> Result:
    """Return rows and log-sum-exps of all heads, group after group of ranks that share keys."""
    found: list[Result] = []
    for first in range(0, ranks.tp_world_size, ranks.world_size):

        def work(group: RankGroup, first: int = first) -> Result:
            return _step_of_rank(setting, batch, built, group, first + group.rank)

        found += run_ranks(ranks.world_size, work, batch.seed, setting.device)
    lses = [lse for _, lse in found if lse is not None]
    rows = torch.cat([out for out, _ in found], dim=1)
    return rows, torch.cat(lses) if lses else None


def _step_of_rank(
    setting: Setting, batch: SignedBatch, built: SignedCall, group: RankGroup, rank: int
) -> Result:
    """Return rows and log-sum-exps of a rank's heads, whose object may have served a step."""
    ranks, signature = batch.signature.ranks, batch.signature
    assert ranks is not None
    _expect_heads(setting, batch, rank)
    call = rank_call(batch, built, rank)
    tokens, heads, size = call.query.shape
    step = setting.candidate.DecodeContextParallel(
        group,
        num_query_heads=heads,
        head_size=size,
        max_num_tokens=max(1, tokens),
        interleave_size=ranks.interleave_size,
        exchange=ranks.exchange,
        splits=None if ranks.splits is None else KeySplits(*ranks.splits),
        value_head_size=value_size_of(built.call),
        dtype=call.query.dtype,
        device=setting.device,
    )
    if batch.seed % 2:
        # a step without tokens comes before
        step.prepare(
            call.caches[0],
            call.arguments["block_table"],
            torch.zeros_like(call.arguments["query_start_loc"]),
            torch.zeros_like(call.arguments["seq_lens"]),
            num_tokens=tokens,
            max_seq_len=0,
        )
    prepared = step.prepare(call.caches[0], num_tokens=tokens, **call.arguments)
    options = dict(call.options)
    scale = options.pop("scale", None)
    if call.caches[0].element_size() > 1:
        step.write(*call.tokens, *call.caches, prepared)
    shape = (tokens, heads, value_size_of(built.call))
    given = _outputs(built, shape)
    if signature.choice["batch_invariant"] == "yes":
        options["batch_invariant"] = True
    out = step.attend(
        call.query,
        *call.caches,
        prepared,
        scale=scale,
        options=AttentionOptions(**options),
        **given,
    )
    _expect_given(out, given)
    for name, cache, right in zip(
        ("key_cache", "value_cache"), call.caches, call.after, strict=True
    ):
        expect_same(f"{name} of rank {rank} after the step", cache, right)
    return out, given.get("lse")


def _expect_heads(setting: Setting, batch: SignedBatch, rank: int) -> None:
    """Compare the heads of a rank under tensor parallelism, if the candidate computes them."""
    signature, ranks = batch.signature, batch.signature.ranks
    assert ranks is not None
    if "get_tp_heads" not in setting.candidate.operations:
        return
    if ranks.tp_world_size == ranks.world_size and signature.kv_heads > 1:
        return  # each rank stores all KV heads
    sizes = (signature.query_heads, signature.kv_heads)
    found = setting.candidate.get_tp_heads(*sizes, ranks.tp_world_size, rank)
    own, stored = ranks.heads_of(rank, *sizes)
    expect_same(
        f"heads of rank {rank}",
        [found.query_start, found.query_stop, found.kv_start, found.kv_stop],
        [own.start, own.stop, stored.start, stored.stop],
    )


def _run_prompts(
    setting: Setting, batch: SignedBatch, built: SignedCall, ranks: RankLayout
) -> Result:
    """Return rows and log-sum-exps of all tokens, in the order of the batch."""

    def work(group: RankGroup) -> tuple[Tensor, Tensor, Tensor | None]:
        return _prompts_of_rank(setting, batch, built, group)

    found = run_ranks(ranks.world_size, work, batch.seed, setting.device)
    tokens = torch.cat([token for token, _, _ in found])
    expect_same(
        "tokens of all ranks", tokens.sort().values.cpu(), torch.arange(len(tokens))
    )
    expect_same("number of tokens", len(tokens), sum(batch.query_lens))
    place = tokens.argsort()
    lses = [lse for _, _, lse in found if lse is not None]
    rows = torch.cat([rows_of_rank for _, rows_of_rank, _ in found])[place]
    return rows, torch.cat(lses, dim=1)[:, place] if lses else None


def _prompts_of_rank(
    setting: Setting, batch: SignedBatch, built: SignedCall, group: RankGroup
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return a rank's tokens, their rows and their log-sum-exps."""
    ranks, call = batch.signature.ranks, built.call
    assert ranks is not None
    prefill = getattr(setting.candidate, ranks.operation)(
        group, block_size=batch.signature.block_size, device=setting.device
    )
    share = prefill.prepare(list(batch.query_lens))
    own = share.tokens
    rows = call.query[own], built.keys[own], built.values[own]
    given = _outputs(built, (len(own), call.query.shape[1], value_size_of(call)))
    taken = {
        name: call.arguments[name] for name in PROMPT_OPTIONS if name in call.arguments
    }
    out = prefill.attend(
        *rows,
        share,
        scale=call.arguments.get("scale"),
        options=AttentionOptions(**taken),
        **given,
    )
    _expect_given(out, given)
    return own, out, given.get("lse")


def _outputs(built: SignedCall, shape: tuple[int, int, int]) -> dict[str, Any]:
    """Return the outputs that the call passes, full of NaN."""
    call, given = built.call, {}
    if call.out_dtype is not None:
        given["out"] = call.query.new_full(shape, NAN)
    if call.wants_lse:
        lse = (shape[1], shape[0])
        given["lse"] = torch.full(
            lse, NAN, dtype=torch.float32, device=call.query.device
        )
    return given


def _expect_given(out: Tensor, given: dict[str, Any]) -> None:
    """Compare the returned output with the one that was passed."""
    if "out" in given:
        expect_same(
            "the given output is returned", out.data_ptr(), given["out"].data_ptr()
        )
