"""Calls of a candidate's attention operations, and the check of their results.

Outputs are allocated full of NaN, so that elements that are not written are found. An optional
output that is not declared, such as the log-sum-exp, is not requested. The other outputs are
checked.
"""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ....contract.budgets import judge_rows
from ....contract.cache_formats import head_size_of
from ...base.support import bounds_of
from ...cases.batches import NAN
from ...cases.options import Call
from ...checks.canaries import expect_own_memory, unchanged
from ...checks.expect import Disagreement, budgets, expect_same
from ...checks.pictures import Failure
from ...oracles.brute_force import Answer, judge_log_sum_exp
from ..setting import Setting

Result: TypeAlias = tuple[Tensor, Tensor | None]
"""The output, and the log-sum-exp if the call requests it."""


def declared(setting: Setting, call: Call) -> Call:
    """Return the call without the outputs that the candidate does not declare.

    A bound on the lengths that exceeds the declared lengths becomes the longest length.
    """
    support = setting.candidate.support
    for bound, lens, lengths in (
        ("max_query_len", call.query_lens, support.query_lens),
        ("max_seq_len", call.key_lens, support.seq_lens),
    ):
        longest = max(lens, default=0)
        most = call.arguments.get(bound, 0)
        if lengths is not None and most > bounds_of(lengths)[1] >= longest:
            call = call.changed(**{bound: longest})
    taken = support.options
    if taken is None:
        return call
    if "lse" not in taken:
        call = replace(call, wants_lse=False)
    if "out" not in taken and call.out_dtype == call.dtype:
        call = replace(call, out_dtype=None)
    return call


def run_call(
    setting: Setting,
    call: Call,
    out: Tensor | None = None,
    is_guarded: bool = False,
) -> Result:
    """Return the candidate's result of a call.

    Args:
        setting: The candidate and its device.
        call: The call. It determines whether an output and a log-sum-exp are passed.
        out: Optional. The output tensor. If None and the call passes an output, one in the call's
            form is allocated, full of NaN.
        is_guarded: Whether the memory around the arguments cannot be read.

    Raises:
        OutsideSupport: The call is outside of the candidate's declared support.
    """
    if out is None:
        call = declared(setting, call)
    tokens, heads, _ = call.query.shape
    given: dict[str, Any] = {}
    size = value_size_of(call)
    if out is not None:
        given["out"] = out
    elif call.out_dtype is not None:
        given["out"] = call.new_out()
    if call.wants_lse:
        given["lse"] = torch.full((heads, tokens), NAN, device=call.query.device)
    operation = getattr(setting.candidate, call.operation)
    with nullcontext() if is_guarded else unchanged(call.arguments):
        found = operation(**call.keywords, **given)
    if type(found) is not Tensor:
        raise Disagreement("output", "as a whole", type(found).__name__, "a Tensor")
    if "out" in given and found is not given["out"]:
        if not isinstance(found, Tensor) or found.data_ptr() != given["out"].data_ptr():
            raise Disagreement("output", "as a whole", "another tensor", "out")
        found = given["out"]
    if "out" not in given:
        inputs = call.arguments.items()
        tensors = {name: value for name, value in inputs if isinstance(value, Tensor)}
        expect_own_memory("output", found, **tensors)
    expect_same("shape of the output", list(found.shape), [tokens, heads, size])
    expect_same("dtype of the output", found.dtype, call.out_dtype or call.dtype)
    expect_same("device of the output", found.device.type, call.query.device.type)
    return found, given.get("lse")


def value_size_of(call: Call) -> int:
    """Return the head size of the values of a call."""
    values = call.arguments.get("value_cache", call.arguments.get("value"))
    assert values is not None
    return head_size_of(values)


def expect_right(
    setting: Setting,
    call: Call,
    found: Result,
    answer: Answer | None = None,
    is_joined: bool = False,
) -> None:
    """Raise a Disagreement if a row of the result exceeds its error budget.

    Args:
        setting: Its reference computes the result in the call's own dtype, from which the budgets
            are derived.
        call: The call.
        found: The candidate's result.
        answer: Optional. The exact result. If None, the brute-force oracle computes it.
        is_joined: Whether the result was combined from partial results by rounded log-sum-exps.
    """
    out, lse = found
    answer = call.answer() if answer is None else answer
    if is_joined:
        same, _ = call.run_into(setting.truth, None, False, compute_dtype=call.dtype)
        terms = answer.terms(is_joined)
        verdict = judge_rows(out.cpu(), answer.out, same.cpu(), call.dtype, *terms)
    else:
        verdict = call.judge(out, answer, setting.truth)
    if not verdict.ok:
        stored = out.cpu()[verdict.row].double()
        scale = call.arguments.get("out_scale", 1.0)
        right = answer.out[verdict.row] / float(scale)
        off = (stored - right).abs().nan_to_num(torch.inf).flatten()
        element = int(off.argmax())
        raise Disagreement(
            "output",
            f"at token {verdict.row}, element {element} of its heads{budgets(verdict.worst)}",
            stored.flatten()[element].item(),
            right.flatten()[element].item(),
            Failure(call, out, answer, verdict.row),
        )
    if lse is None:
        return
    expect_same("dtype of the log-sum-exp", lse.dtype, torch.float32)
    share = judge_log_sum_exp(lse, answer)
    if share > 1:
        stored = lse.cpu().double()
        same = stored == answer.lse  # -inf among them
        off = (stored - answer.lse).abs().nan_to_num(torch.inf).masked_fill(same, 0.0)
        head, token = divmod(int(off.argmax()), off.shape[1])
        raise Disagreement(
            "log-sum-exp",
            f"at [{head}, {token}]{budgets(share, 'its')}",
            stored[head, token].item(),
            answer.lse[head, token].item(),
            Failure(call, out, answer, token),
        )


def expect_same_results(what: str, found: Result, before: Result) -> None:
    """Raise a Disagreement if two results are not bitwise equal."""
    expect_same(f"output {what}", found[0], before[0].cpu())
    if found[1] is not None and before[1] is not None:
        expect_same(f"log-sum-exp {what}", found[1], before[1].cpu())
