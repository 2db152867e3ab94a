"""Laws of combining partial results by log-sum-exp.

The expected result is a weighted mean in float64. Partial results are empty in some rows, which
then hold NaN. They are views with different strides. Their log-sum-exps are close together, far
apart, or far from 0.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from ...contract.budgets import ROUNDINGS_INSIDE, SCORE_EPS, moved_by_scores
from ..candidates.setting import Setting
from ..cases.batches import DTYPES, NAN
from ..cases.reuse import compiled
from ..checks.canaries import expect_own_memory, kept
from ..checks.expect import Disagreement, expect_budget, expect_rejection, expect_same
from .invariance import far_apart
from .law import law

INF = math.inf
VIEWS = ("packed", "heads first", "padded", "every other element")


@dataclass(frozen=True)
class Parts:
    """Partial results over several sets of keys, described by a few numbers.

    Args:
        parts, tokens, heads, size: Number of partial results, tokens and heads, and elements per
            head.
        dtype: Dtype of the outputs.
        views: Memory layout of each partial result: one of VIEWS.
        spread: Standard deviation of the log-sum-exps.
        level: Mean of the log-sum-exps.
        empty: Fraction of the rows in which a partial result is empty.
        mark: Log-sum-exp of an empty row.
        base_2: Whether the log-sum-exps are logarithms to base 2.
        with_prefix: Optional. Number of tokens that have a prefix result. If None, all tokens
            have one.
        wants_lse: Whether the combined log-sum-exp is requested.
        lse_dtype: Dtype of the log-sum-exps.
        seed: Seed of the values.
    """

    parts: int
    tokens: int
    heads: int
    size: int
    dtype: torch.dtype
    views: tuple[str, ...]
    spread: float
    level: float
    empty: float
    mark: float
    base_2: bool
    with_prefix: int | None = None
    wants_lse: bool = True
    lse_dtype: torch.dtype = torch.float32
    seed: int = 0

    def draw(self, device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
        """Return each partial result: output [tokens, heads, size], log-sum-exp [heads, tokens]."""
        generator = torch.Generator().manual_seed(self.seed)
        outputs, lses = [], []
        for part in range(self.parts):
            shape = (self.tokens, self.heads, self.size)
            output = torch.randn(shape, generator=generator)
            # so that the first element of a merged row is the sum of its shares
            output[..., 0] = 1
            lse = torch.randn(shape[:2], generator=generator) * self.spread + self.level
            is_empty = torch.rand(shape[:2], generator=generator) < self.empty
            output[is_empty], lse[is_empty] = NAN, self.mark
            view = self.views[part]
            outputs.append(viewed(output.to(self.dtype).to(device), view))
            lses.append(viewed(lse.T.to(self.lse_dtype).to(device), view))
        return outputs, lses


def viewed(tensor: Tensor, view: str) -> Tensor:
    """Return the same numbers in the memory layout `view`, with NaN in the gaps."""
    if view == "heads first":
        return tensor.transpose(0, 1).contiguous().transpose(0, 1)
    if view == "packed":
        return tensor.contiguous()
    step, more = (2, 0) if view == "every other element" else (1, 3)
    width = tensor.shape[-1]
    wide = tensor.new_full((*tensor.shape[:-1], step * width + more), NAN)
    found = wide[..., : step * width : step]
    return found.copy_(tensor)


@st.composite
def all_parts(draw: st.DrawFn, parts: int | None = None) -> Parts:
    """Return partial results. The whole case is drawn from one seed."""
    pick = Random(draw(st.integers(0, 2**20)))
    kernel = compiled(pick)
    count = pick.choice([1, 2, 3, 5]) if parts is None else parts
    tokens = pick.choice([0, 1, 2, 7, 8, 9, 17, 33])
    return Parts(
        parts=count,
        tokens=tokens,
        heads=kernel.choice([1, 2, 3, 5]),
        size=kernel.choice([1, 5, 16, 24, 80]),
        dtype=kernel.choice(DTYPES),
        views=tuple(kernel.choice(VIEWS) for _ in range(count)),
        spread=pick.choice([0.0, 0.5, 5.0, 60.0, 1e4]),
        level=pick.choice([0.0, 0.0, 7.0, -300.0, 3e4, -9e4, 1e6, -1e8]),
        empty=pick.choice([0.0, 0.3, 0.8, 1.0]),
        mark=pick.choice([-INF, -INF, INF]),
        base_2=kernel.random() < 0.4,
        with_prefix=pick.choice([None, None, 0, tokens, pick.randint(0, tokens)]),
        wants_lse=kernel.random() < 0.8,
        lse_dtype=kernel.choice([torch.float32, torch.float32, torch.float64]),
        seed=pick.randrange(2**16),
    )


def join(outputs: Tensor, shares: Tensor) -> Tensor:
    """Return the weighted mean of partial outputs.

    Args:
        outputs: [parts, tokens, heads, size] partial outputs. Empty rows are not read.
        shares: [parts, tokens, heads], 0 in empty rows.
    """
    return (shares[..., None] * outputs).sum(0)


def budget_terms(
    outputs: Tensor, shares: Tensor, natural: Tensor
) -> tuple[Tensor, None, Tensor, Tensor]:
    """Return the arguments of `judge_rows` from `magnitude` on.

    Args:
        outputs: [parts, tokens, heads, size] partial outputs, 0 in empty rows.
        shares, natural: [parts, tokens, heads] shares and natural log-sum-exps.
    """
    average = join(outputs.abs(), shares)
    # the rounding error of a weight grows with the log-sum-exps that it is computed from
    is_empty = natural == -INF
    errors = SCORE_EPS * natural.abs().masked_fill(is_empty, 0.0).amax(0)
    # each token and head is a row of parts
    weights = shares.flatten(1).T[:, None]
    moved = moved_by_scores(
        weights,
        errors.flatten()[:, None, None].expand_as(weights),
        outputs.abs().flatten(1, 2).transpose(0, 1),
        average.flatten(0, 1)[:, None],
    ).view(average.shape)
    empty = is_empty[..., None]
    smallest = outputs.masked_fill(empty, INF).amin(0)
    largest = outputs.masked_fill(empty, -INF).amax(0)
    every = torch.stack([smallest, largest])
    return average, None, moved, every.masked_fill(every.isinf(), 0.0)


def expect_joined(
    parts: Parts,
    outputs: list[Tensor],
    lses: list[Tensor],
    output: Tensor,
    lse: Tensor | None,
) -> None:
    """Check a combined result against the partial results.

    Args:
        parts: Description of the partial results.
        outputs: [tokens, heads, size] output of each partial result.
        lses: [tokens, heads] log-sum-exp of each partial result.
        output: [tokens, heads, size] combined output.
        lse: Optional. [tokens, heads] combined log-sum-exp. If None, it is not checked.

    Raises:
        Disagreement: a dtype, a shape, an empty row, or an error outside the error budget.
    """
    unit = math.log(2) if parts.base_2 else 1.0
    given = torch.stack(lses).cpu()
    given = given.masked_fill(~given.isfinite(), -INF)
    largest = given.masked_fill(given == -INF, 0.0).abs().amax(0)
    natural = given.double() * unit
    joint = natural.logsumexp(0)
    # the softmax over no part is 0 / 0
    shares = natural.softmax(0).masked_fill(natural == -INF, 0.0)
    stacked = torch.stack(outputs).cpu().double()
    stacked = stacked.masked_fill((natural == -INF)[..., None], 0.0)
    exact = join(stacked, shares)
    same = join(stacked.float(), shares.float()).to(parts.dtype)
    expect_same("dtype of the output", output.dtype, parts.dtype)
    terms = budget_terms(stacked, shares, natural)
    expect_budget("joint output", output, exact, same, *terms)
    if lse is None:
        return
    expect_same("dtype of the joint log-sum-exp", lse.dtype, parts.lse_dtype)
    expect_same("shape of the joint log-sum-exp", lse.shape, joint.shape)
    found, right = lse.cpu().double(), joint / unit
    expect_same("empty rows of the log-sum-exp", found == -INF, right == -INF)
    off = torch.where(right == -INF, 0.0, found - right).abs().nan_to_num(INF)
    # a kernel may combine in float32 whatever the dtype of its inputs is
    budget = ROUNDINGS_INSIDE * torch.finfo(torch.float32).eps * (1 + largest.double())
    if bool((off > budget).any()):
        worst = int((off / budget).argmax())
        raise Disagreement(
            "joint log-sum-exp",
            f"at {list(divmod(worst, off.shape[1]))}",
            found.flatten()[worst].item(),
            right.flatten()[worst].item(),
        )


@law("merge_attn_states", cases=all_parts(2))
def two_partial_results_combine_by_their_weight(setting: Setting, parts: Parts) -> None:
    """Empty rows are not read. Tokens after those with a prefix take the suffix result."""
    (prefix, suffix), lses = parts.draw(setting.device)
    base = 2.0 if parts.base_2 else math.e
    shape = (parts.heads, parts.tokens)
    # the results have strides like those of the first partial result
    step = 2 if parts.views[0] == "every other element" else 1
    tall = torch.full((parts.heads, step * parts.tokens), NAN, dtype=parts.lse_dtype)
    lse = tall.to(setting.device)[:, ::step]
    wide = torch.full((parts.tokens, 2 * parts.heads, step * parts.size), 7.0)
    wide = wide.to(parts.dtype).to(setting.device)
    output = wide[:, ::2, ::step]
    with kept(prefix=prefix, suffix=suffix, first=lses[0], second=lses[1]):
        found = setting.candidate.merge_attn_states(
            prefix,
            lses[0],
            suffix,
            lses[1],
            prefill_tokens_with_context=parts.with_prefix,
            output=output,
            output_lse=lse if parts.wants_lse else None,
            prefix_lse_base=base,
            suffix_lse_base=base,
        )
    if found is not output:
        raise Disagreement("output", "as a whole", "another tensor", "output")
    others = wide.float().cpu().clone()
    others[:, ::2, ::step] = 7.0
    expect_same("what is next to the output", others, torch.full(others.shape, 7.0))
    first = lses[0].T.clone()
    if parts.with_prefix is not None:
        first[parts.with_prefix :] = -INF
    ours = [first, lses[1].T]
    joint = lse.T if parts.wants_lse else None
    expect_joined(parts, [prefix, suffix], ours, output, joint)
    if not parts.wants_lse:
        expect_same(
            "a log-sum-exp that was not given",
            lse.isnan().cpu(),
            torch.ones(shape).bool(),
        )


LEVELS = [
    Parts(
        2 + index % 2, 3, 2, 5, DTYPES[index % 3 - 1], ("packed",) * 3, spread, level,
        0.0, -INF, index % 4 == 3,
    )
    for index, (level, spread) in enumerate(
        (sign * 10.0**exponent, spread * 10.0**exponent)
        for exponent in range(2, 9)
        for sign, spread in ((1, 0.0), (-1, 0.0), (1, 0.3))
    )
]  # fmt: skip
"""Partial results of equal weights, and of very different ones, far from 0."""


@law("merge_attn_states", cases=[replace(level, parts=2) for level in LEVELS])
def shares_of_two_results_sum_to_one_at_every_log_sum_exp(
    setting: Setting, parts: Parts
) -> None:
    """Beside a rounded joint log-sum-exp of 1e8 both have the share 1."""
    two_results_are_right(setting, parts)


@law("lse_weighted_combine", cases=LEVELS)
def shares_of_many_results_sum_to_one_at_every_log_sum_exp(
    setting: Setting, parts: Parts
) -> None:
    outputs, lses = parts.draw(setting.device)
    ours = [lse.T for lse in lses]
    output, lse = setting.candidate.lse_weighted_combine(
        torch.stack(outputs), torch.stack(ours), is_lse_base_on_e=not parts.base_2
    )
    expect_joined(parts, outputs, ours, output, lse)


def two_results_are_right(setting: Setting, parts: Parts) -> None:
    """Merge both results of `parts` into new tensors, and check them."""
    (prefix, suffix), lses = parts.draw(setting.device)
    base = 2.0 if parts.base_2 else math.e
    output, lse = torch.empty_like(prefix), torch.empty_like(lses[0])
    setting.candidate.merge_attn_states(
        prefix, lses[0], suffix, lses[1], output=output, output_lse=lse,
        prefix_lse_base=base, suffix_lse_base=base,
    )  # fmt: skip
    ours = [lse.T for lse in lses]
    expect_joined(parts, [prefix, suffix], ours, output, lse.T)


@law("merge_attn_states", cases=[0, 1])
def a_log_sum_exp_that_is_nan_makes_its_row_nan(setting: Setting, part: int) -> None:
    """It is an error of the kernel that wrote it, which an empty set would hide."""
    parts = Parts(
        2, 3, 2, 5, torch.float32, ("packed",) * 2, 1.0, 0.0, 0.0, -INF, False
    )
    (prefix, suffix), lses = parts.draw(setting.device)
    lses[part][1, 2] = NAN
    output, lse = torch.empty_like(prefix), torch.empty_like(lses[0])
    setting.candidate.merge_attn_states(
        prefix, lses[0], suffix, lses[1], output=output, output_lse=lse
    )
    right = torch.zeros(2, 3, dtype=torch.bool)
    right[1, 2] = True
    expect_same("which log-sum-exps are NaN", lse.isnan().cpu(), right)
    expect_same("which rows are NaN", output.isnan().all(2).T.cpu(), right)
    expect_same("which rows have a NaN", output.isnan().any(2).T.cpu(), right)


@law("merge_attn_states", cases=all_parts(2))
def a_combined_output_is_made_where_none_is_given(
    setting: Setting, parts: Parts
) -> None:
    """The output has its own memory. The default base is e."""
    (prefix, suffix), lses = parts.draw(setting.device)
    output = setting.candidate.merge_attn_states(prefix, lses[0], suffix, lses[1])
    expect_own_memory("output", output, prefix=prefix, suffix=suffix)
    natural = Parts(**(vars(parts) | {"base_2": False}))
    ours = [lse.T for lse in lses]
    expect_joined(natural, [prefix, suffix], ours, output, None)


@law("merge_attn_states", cases=all_parts(2))
def a_partial_result_may_be_overwritten_by_the_combined_one(
    setting: Setting, parts: Parts
) -> None:
    """Each chunk is combined in place into the result so far, and so is its log-sum-exp."""
    (prefix, suffix), lses = parts.draw(setting.device)
    into, into_lse = suffix.clone(), lses[1].clone()
    setting.candidate.merge_attn_states(
        prefix, lses[0], into, into_lse, output=into, output_lse=into_lse
    )
    natural = Parts(**(vars(parts) | {"base_2": False}))
    ours = [lse.T for lse in lses]
    expect_joined(natural, [prefix, suffix], ours, into, into_lse.T)


@law(
    "merge_attn_states",
    cases=[(part, axis) for part in ("prefix", "suffix", "output") for axis in (0, 1)],
)
def offsets_of_partial_results_have_64_bits(
    setting: Setting, case: tuple[str, int]
) -> None:
    """The third token or head of one tensor is past 2**31 elements."""
    what, axis = case
    parts = Parts(
        2, 3, 3, 4, torch.float16, ("packed",) * 2, 0.5, 0.0, 0.0, -INF, False
    )
    outputs, lses = parts.draw(setting.device)
    given = dict(zip(("prefix", "suffix"), outputs, strict=True))
    given["output"] = torch.full_like(outputs[0], NAN)
    given[what] = far_apart(given[what], axis)
    setting.candidate.merge_attn_states(
        given["prefix"], lses[0], given["suffix"], lses[1], output=given["output"]
    )
    expect_joined(parts, outputs, [lse.T for lse in lses], given["output"], None)


@law("lse_weighted_combine", cases=all_parts())
def any_number_of_partial_results_combine_by_their_weight(
    setting: Setting, parts: Parts
) -> None:
    """In any order. A row whose log-sum-exp is not finite is empty."""
    outputs, lses = parts.draw(setting.device)
    if parts.mark == INF and parts.parts > 1:
        empty = ~lses[0].isfinite()
        lses[0] = lses[0].masked_fill(empty, NAN)
    stacked = viewed(torch.stack(outputs), parts.views[0])
    weights = viewed(torch.stack([lse.T for lse in lses]), parts.views[-1])
    ours = [lse.T for lse in lses]
    for order in (list(range(parts.parts)), list(range(parts.parts))[::-1]):
        given, its = stacked[order], weights[order]
        if order[0] == 0:
            given, its = stacked, weights
        with kept(outputs=given, lses=its):
            output, lse = setting.candidate.lse_weighted_combine(
                given, its, is_lse_base_on_e=not parts.base_2
            )
        expect_own_memory("joint output", output, outputs=given)
        expect_own_memory("joint log-sum-exp", lse, lses=its)
        expect_joined(parts, outputs, ours, output, lse)


@law("lse_weighted_combine", cases=all_parts(2))
def the_natural_logarithm_is_the_default(setting: Setting, parts: Parts) -> None:
    outputs, lses = parts.draw(setting.device)
    ours = [lse.T for lse in lses]
    output, lse = setting.candidate.lse_weighted_combine(
        torch.stack(outputs), torch.stack(ours)
    )
    natural = Parts(**(vars(parts) | {"base_2": False}))
    expect_joined(natural, outputs, ours, output, lse)


@law("log2_lse_to_ln", cases=all_parts(1))
def a_change_of_base_rounds_a_logarithm_once(setting: Setting, parts: Parts) -> None:
    """Infinite values stay infinite. The shape and the dtype do not change."""
    _, (lse,) = parts.draw(setting.device)
    with kept(lse=lse):
        natural = setting.candidate.log2_lse_to_ln(lse)
    expect_own_memory("natural log-sum-exp", natural, lse=lse)
    expect_same("shape", natural.shape, lse.shape)
    expect_same("dtype", natural.dtype, lse.dtype)
    found, right = natural.cpu().double(), lse.cpu().double() * math.log(2)
    is_infinite = right.isinf()
    expect_same("infinite ones", found[is_infinite], right[is_infinite])
    off = (found - right)[~is_infinite].abs()
    budget = torch.finfo(lse.dtype).eps * right[~is_infinite].abs()
    if bool((off > budget).any()) or bool(off.isnan().any()):
        worst = int((off - budget).nan_to_num(INF).argmax())
        raise Disagreement(
            "natural log-sum-exp",
            f"number {worst}",
            found[~is_infinite][worst].item(),
            right[~is_infinite][worst].item(),
        )


def good_states() -> dict[str, Any]:
    """Return two partial results whose shapes and dtypes match."""
    return {
        "prefix_output": torch.zeros(2, 3, 4),
        "prefix_lse": torch.zeros(3, 2),
        "suffix_output": torch.zeros(2, 3, 4),
        "suffix_lse": torch.zeros(3, 2),
        "output": torch.full((2, 3, 4), 7.0),
        "output_lse": torch.full((3, 2), 7.0),
    }


def output_in_prefix() -> dict[str, Any]:
    """Return an output that begins in the second row of a partial result."""
    memory = torch.zeros(3, 3, 4)
    return {"prefix_output": memory[:2], "output": memory[1:]}


UNFIT: dict[str, Callable[[], dict[str, Any]]] = {
    "suffix of another size": lambda: {"suffix_output": torch.zeros(2, 3, 5)},
    "suffix of other tokens": lambda: {"suffix_output": torch.zeros(3, 3, 4)},
    "suffix of another dtype": lambda: {"suffix_output": torch.zeros(2, 3, 4).half()},
    "prefix of two axes": lambda: {"prefix_output": torch.zeros(2, 12)},
    "prefix of integers": lambda: {"prefix_output": torch.zeros(2, 3, 4).int()},
    "output of another shape": lambda: {"output": torch.zeros(2, 4, 3)},
    "log-sum-exp of tokens by heads": lambda: {"prefix_lse": torch.zeros(2, 3)},
    "second log-sum-exp of tokens by heads": lambda: {"suffix_lse": torch.zeros(2, 3)},
    "joint log-sum-exp of tokens by heads": lambda: {"output_lse": torch.zeros(2, 3)},
    "log-sum-exp of 16 bits": lambda: {"prefix_lse": torch.zeros(3, 2).half()},
    "output of integers": lambda: {"output": torch.full((2, 3, 4), 7)},
    "joint log-sum-exp of 16 bits": lambda: {"output_lse": torch.ones(3, 2).half()},
    "expanded output": lambda: {"output": torch.full((2, 1, 4), 7.0).expand(2, 3, 4)},
    "output from the second row of the prefix on": output_in_prefix,
    "log-sum-exps of two dtypes": lambda: {"suffix_lse": torch.zeros(3, 2).double()},
    "more tokens with a prefix than there are": lambda: {
        "prefill_tokens_with_context": 3
    },
    "fewer than no tokens with a prefix": lambda: {"prefill_tokens_with_context": -1},
    "two bases": lambda: {"suffix_lse_base": 2.0},
    "the other two bases": lambda: {"prefix_lse_base": 2.0},
    "base 10": lambda: {"prefix_lse_base": 10.0, "suffix_lse_base": 10.0},
    "another device": lambda: {"suffix_output": torch.zeros(2, 3, 4, device="meta")},
}


@law("merge_attn_states", cases=[*UNFIT], claim="rejects shapes")
def states_that_do_not_fit_are_rejected(setting: Setting, what: str) -> None:
    with setting.device:
        states = good_states() | UNFIT[what]()
    results = {name: states[name] for name in ("output", "output_lse")}
    with kept(**results):
        expect_rejection(what, lambda: setting.candidate.merge_attn_states(**states))


@law(
    "lse_weighted_combine",
    "log2_lse_to_ln",
    cases=["heads", "axes", "dtype", "bits"],
    claim="rejects shapes",
)
def partial_results_that_do_not_fit_are_rejected(setting: Setting, what: str) -> None:
    outputs = torch.zeros(2, 3, 4, 5, device=setting.device)
    lses = torch.zeros(2, 3, 4, device=setting.device)
    pairs = {
        "heads": (outputs, lses[:, :, :3]),
        "axes": (outputs[0], lses[0]),
        "dtype": (outputs.int(), lses),
        "bits": (outputs, lses.half()),
    }
    expect_rejection(what, lambda: setting.candidate.lse_weighted_combine(*pairs[what]))
    if what == "bits":
        expect_rejection(what, lambda: setting.candidate.log2_lse_to_ln(lses.half()))
