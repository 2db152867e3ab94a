"""Error budgets of the results of timed calls, from the definition's own reference.

As in `shared.contract.budgets`: the exact result is the reference in float64, and the rounding
error of a row is that of the same arithmetic in the dtype of the inputs. What scores may move is
bounded from the scores of absolute inputs, and what float32 may lose in sums from the number of
keys.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...contract.budgets import LARGEST_SCORE_ERROR, SCORE_EPS, SMALLEST_TILE
from ..checks.expect import Disagreement, budgets, expect_budget
from .definitions import Definition

Outputs = tuple[Tensor, ...]
Run = Callable[..., Outputs]
LSE_ROUNDINGS = 8
"""Roundings of a log-sum-exp, as in the laws."""
VALUES = ("v", "v_cache", "v_a", "v_b")
"""Inputs that are averaged, without those that scores are computed from."""


class InOwnDtype(TorchFunctionMode):
    """Let `double` return the tensor itself: the reference computes in the dtype of its inputs."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.double:
            return args[0]
        return func(*args, **(kwargs or {}))


def doubled(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return inputs whose floating-point numbers are float64."""
    return {
        name: value.double()
        if isinstance(value, Tensor) and value.dtype.is_floating_point
        else value
        for name, value in inputs.items()
    }


def expect_within_budgets(
    definition: Definition, run: Run, inputs: dict[str, Any], found: Outputs, call: int
) -> None:
    """Raise a Disagreement if a row of a timed call's result exceeds its error budget.

    Args:
        definition: The definition.
        run: The reference of the definition.
        inputs: The inputs of the call, in the definition's order.
        found: Its result.
        call: The number of the call, from 0.
    """
    exact = run(*doubled(inputs).values())
    names = list(definition.outputs)
    titles = [f"{name} of timed call {call}" for name in names]
    if definition.family.operation == "reshape_and_cache":
        for title, one, other in zip(titles, found, exact, strict=True):
            _expect_equal(title, one, other)
        return
    with InOwnDtype():
        same = run(*inputs.values())[0]
    sizes = score_sizes(definition, run, inputs)
    magnitude = magnitudes(definition, run, inputs)
    # [rows, heads, 1]: no weight is wrong by more than this factor
    moved = (SCORE_EPS * sizes).clamp(max=LARGEST_SCORE_ERROR)[..., None]
    tiles = 1 + _most_keys(inputs) // SMALLEST_TILE
    expect_budget(
        titles[0],
        found[0],
        exact[0],
        same.to(found[0].dtype),
        magnitude,
        torch.full_like(magnitude[..., 0], SCORE_EPS / 2 * tiles),
        2 * moved.expm1() * moved.exp() * magnitude,
    )
    _expect_lse(titles[1], found[1], exact[1], sizes)


def score_sizes(definition: Definition, run: Run, inputs: dict[str, Any]) -> Tensor:
    """Return [rows, heads] float64, at least the largest sum of absolute products of a score.

    A score of a merge is the log-sum-exp of a set. Sizes are in natural units.
    """
    if definition.family.operation == "merge_attn_states":
        sums = torch.stack([inputs["s_a"], inputs["s_b"]]).double()
        return sums.masked_fill(sums.isinf(), 0.0).abs().amax(0) * math.log(2)
    absolute = {
        name: value.abs()
        if isinstance(value, Tensor) and value.dtype.is_floating_point
        else value
        for name, value in doubled(inputs).items()
    }
    lse = run(*absolute.values())[1].double()
    # a log-sum-exp of scores is at least the largest one
    return lse.masked_fill(lse.isinf(), 0.0) * math.log(2)


def magnitudes(definition: Definition, run: Run, inputs: dict[str, Any]) -> Tensor:
    """Return [rows, heads, size] float64, the average of the absolute values."""
    given = doubled(inputs)
    if "ckv_cache" not in given:
        for name in VALUES:
            if name in given:
                given[name] = given[name].abs()
        return run(*given.values())[0]
    # the absolute latents are averaged beside the latents, and have no part in the scores
    latents, query = given["ckv_cache"], given["q_nope"]
    given["ckv_cache"] = torch.cat([latents, latents.abs()], -1)
    given["q_nope"] = torch.cat([query, torch.zeros_like(query)], -1)
    return run(*given.values())[0][..., query.shape[-1] :]


def _most_keys(inputs: dict[str, Any]) -> int:
    """Return a bound on the keys of a request."""
    if "sparse_indices" in inputs:
        return int(inputs["sparse_indices"].shape[1])
    if "kv_indptr" not in inputs:
        return 0
    counts = inputs["kv_indptr"].diff()
    cache = inputs.get("k_cache", inputs.get("ckv_cache"))
    size = 1 if cache is None else cache.shape[1]
    return int(counts.max()) * int(size) if len(counts) else 0


def _expect_equal(what: str, found: Tensor, right: Tensor) -> None:
    wrong = (found.double() != right).nonzero()
    if len(wrong):
        index = tuple(wrong[0].tolist())
        raise Disagreement(
            what, f"at {list(index)}", found[index].item(), right[index].item()
        )


def _expect_lse(what: str, found: Tensor, right: Tensor, sizes: Tensor) -> None:
    """Raise a Disagreement if a log-sum-exp in base 2 is further off than its roundings."""
    found, right = found.double(), right.double()
    empty = right == -math.inf
    size = 1 + sizes + right.masked_fill(empty, 0.0).abs()
    budget = LSE_ROUNDINGS * SCORE_EPS * size / math.log(2)
    off = torch.where(found == right, 0.0, found - right).abs().nan_to_num(math.inf)
    share = off / budget
    if not share.numel() or float(share.max()) <= 1:
        return
    index = divmod(int(share.argmax()), share.shape[1])
    raise Disagreement(
        what,
        f"at {list(index)}{budgets(float(share[index]), 'its')}",
        found[index].item(),
        right[index].item(),
    )
