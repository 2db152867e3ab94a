"""A parallel implementation as one function per rank, in the form that the laws call."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from ...contract.attention_options import (
    DEFAULT_OPTIONS,
    AttentionOptions,
    unpack_options,
)
from ...contract.operations import load_implementation
from ...contract.parallel import RankBatch
from ...validation.parallel import check_rank_attention
from .candidate import OutsideSupport

RankFunction = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class RankStep:
    """The step that a rank gets, before anything is derived from it.

    Args:
        interleave_size: Consecutive positions that one rank stores. Rank r of n stores position p
            if `p // interleave_size % n == r`.
        block_table: [reqs, max_blocks], this rank's. Its keys are stored without gaps, in the order
            of their positions.
        query_start_loc: [reqs + 1] where each request's new tokens start.
        seq_lens: [reqs] keys of each sequence on all ranks together.
        max_seq_len: At least every entry of `seq_lens`.
        causal: Whether a token attends only to keys up to its own position.
    """

    interleave_size: int
    block_table: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    max_seq_len: int
    causal: bool


@dataclass(frozen=True)
class _StepBatch(RankBatch):
    """The reference's batch, with the step that it was prepared from."""

    step: RankStep


def step_of_ranks(function: RankFunction, options: Collection[str] = ()) -> Any:
    """Return a `DecodeContextParallel` that attends with a function per rank.

    The batch is prepared and the new tokens are written as in the reference. Steps with fixed
    splits are outside of its support.

    Args:
        function: It is called on every rank as `function(ranks, step, query, key_cache,
            value_cache, scale, **options)` and returns the rows [tokens, heads, value_head_size]
            and log-sum-exps [heads, tokens] of this rank's heads. `ranks` is a RankGroup, whose
            collectives it calls; `step` is a RankStep.
        options: Those of `logits_soft_cap`, `sinks`, `k_scale` and `v_scale` that the function
            takes.
    """
    base: Any = load_implementation("reference").operations["DecodeContextParallel"]

    def init(self: Any, *given: Any, **named: Any) -> None:
        base.__init__(self, *given, **named)
        if self.fixed_splits is not None:
            raise OutsideSupport("splits")

    def prepare(
        self: Any,
        key_cache: Tensor,
        block_table: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        num_tokens: int,
        max_seq_len: int,
        causal: bool = True,
        max_query_len: int | None = None,
    ) -> RankBatch:
        found = base.prepare(
            self, key_cache, block_table, query_start_loc, seq_lens, num_tokens,
            max_seq_len, causal, max_query_len,
        )  # fmt: skip
        step = RankStep(
            self.of_rank[2], block_table, query_start_loc, seq_lens, max_seq_len, causal
        )
        parts = {field.name: getattr(found, field.name) for field in fields(RankBatch)}
        return _StepBatch(**parts, step=step)

    def attend(
        self: Any,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        batch: _StepBatch,
        scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        options: AttentionOptions = DEFAULT_OPTIONS,
    ) -> Tensor:
        check_rank_attention(
            query, key_cache, value_cache, batch, self.num_query_heads, self.of_rank[0],
            options, None, out, lse,
        )  # fmt: skip
        given = unpack_options(options)
        given.pop("causal", None)
        if outside := [name for name in given if name not in taken]:
            raise OutsideSupport(", ".join(outside))
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        rows, lses = function(
            self.ranks, batch.step, query, key_cache, value_cache, scale, **given
        )
        if lse is not None:
            lse.copy_(lses)
        return rows.to(query.dtype) if out is None else out.copy_(rows)

    taken = frozenset(options)
    methods = {"__init__": init, "prepare": prepare, "attend": attend}
    return type("DecodeContextParallel", (base,), methods)
