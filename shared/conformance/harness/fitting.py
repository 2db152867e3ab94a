"""Fitting of cases to the declared support of a kernel.

Cases are drawn from all calls that attention allows. A kernel that supports only head size 128 and
block size 16 would raise for nearly all of them. Therefore a case for which it raises is tried
again as the nearest case inside of the declared support. That case has the same lengths, tables
and poison, with sizes and options that the kernel supports.
"""

from collections.abc import Collection
from dataclasses import fields, is_dataclass, replace
from typing import Any, Protocol, TypeVar, runtime_checkable

from ...validation.options import OPTIONS as OPTION_FILES
from ..generators.batches import BatchPlan
from ..generators.option_pairs import OPTIONS, Choice
from ..generators.options import DTYPES
from ..generators.signatures import Signature, SignedBatch
from .candidate import Support

Value = TypeVar("Value")


@runtime_checkable
class Fitted(Protocol):
    """A case with its own method of fitting to the declared support."""

    def within(self, support: Support) -> Any:
        """Return the nearest case inside of the support."""


NEEDED = (
    *(name for name in OPTION_FILES if name not in ("causal", "batch_invariant")),
    "value_head_size",
    "scale",
)
"""Options of a choice whose values but the first one need an entry of that name in SUPPORT."""


def fit_case(case: Any, support: Support) -> Any:
    """Return the nearest case inside of the declared support, the same object if it is inside.

    Args:
        case: A plan, a choice of options, a `Fitted` case, or a tuple or dataclass that contains
            some of these.
        support: The declared support.
    """
    if isinstance(case, BatchPlan):
        return _fit_plan(case, support)
    if isinstance(case, dict) and case.keys() == OPTIONS.keys():
        return _fit_choice(case, support)
    if isinstance(case, SignedBatch):
        return _fit_batch(case, support)
    if isinstance(case, Fitted):
        found = case.within(support)
        return case if found == case else found
    if type(case) is tuple:
        parts = tuple(fit_case(each, support) for each in case)
        is_same = all(one is other for one, other in zip(parts, case, strict=True))
        return case if is_same else parts
    if is_dataclass(case) and not isinstance(case, type):
        given = {each.name: getattr(case, each.name) for each in fields(case)}
        fitted = {name: fit_case(each, support) for name, each in given.items()}
        changed = {
            name: each for name, each in fitted.items() if each is not given[name]
        }
        return replace(case, **changed) if changed else case
    return case


def _nearest(value: Value, taken: Collection[Value] | None, turn: int) -> Value:
    """Return a value if it is supported, else one that is, selected by `turn`."""
    if taken is None or value in taken:
        return value
    return list(taken)[turn % len(taken)]


def _fit_plan(plan: BatchPlan, support: Support) -> BatchPlan:
    """Return a plan with supported sizes, dtype and lengths."""
    longest = support.max_query_len
    lens = plan.query_lens
    if longest is not None:
        lens = tuple(min(length, longest) for length in lens)
    head_size = _nearest(plan.head_size, support.head_sizes, plan.seed)
    given = support.options is None or "scale" in support.options
    # a scale drawn for a small head size makes the scores of a large one huge
    keeps_scale = given and head_size == plan.head_size
    dtype = str(plan.dtype).removeprefix("torch.")
    fitted = replace(
        plan,
        query_lens=lens,
        block_size=_nearest(plan.block_size, support.block_sizes, plan.seed),
        head_size=head_size,
        dtype=DTYPES[_nearest(dtype, support.dtypes, plan.seed)],
        scale=plan.scale if keeps_scale else None,
    )
    return plan if fitted == plan else fitted


def _fit_choice(choice: Choice, support: Support) -> Choice:
    """Return a choice without the options that are not supported."""
    fitted = dict(choice)
    options = support.options
    turn = sum(map(len, choice.values()))
    for name, taken in (
        ("block_size", support.block_sizes),
        ("head_size", support.head_sizes),
    ):
        sizes = None if taken is None else [str(each) for each in taken]
        fitted[name] = _nearest(choice[name], sizes, turn)
    if fitted["head_size"] != choice["head_size"]:
        fitted["scale"] = "none"
    fitted["dtype"] = _nearest(choice["dtype"], support.dtypes, turn)
    longest = support.max_query_len
    if longest is not None and longest < 128 and choice["batch"] != "decode":
        fitted["batch"] = "decode"
    if options is not None:
        for name in NEEDED:
            if name not in options:
                fitted[name] = OPTIONS[name].values[0]
        if "causal" not in options:
            encodes = choice["operation"] == "encoder_attention"
            fitted["causal"] = "no" if encodes else "yes"
        if "k_scale" not in options:
            fitted["cache"], fitted["scales"] = "as the query", "none"
        if "lse" not in options:
            fitted["lse"] = "none"
        if "out_scale" not in options and choice["out"] not in ("given", "made"):
            fitted["out"] = "given"
        if "out" not in options:
            fitted["out"] = "made"
    return choice if fitted == choice else fitted


def fit_signature(signature: Signature, support: Support) -> Signature:
    """Return the nearest signature inside of the declared support."""
    choice = _fit_choice(signature.choice, support)
    longest = 1 if choice["batch"] == "decode" else signature.max_query_len
    fitted = replace(signature, choice=choice, max_query_len=longest)
    return signature if fitted == signature else fitted


def _fit_batch(batch: SignedBatch, support: Support) -> SignedBatch:
    """Return a batch with a supported signature and supported lengths."""
    signature = fit_signature(batch.signature, support)
    lens = _fit_plan(BatchPlan(batch.query_lens, batch.key_lens), support)
    longest = signature.max_query_len
    query_lens = tuple(min(length, longest) for length in lens.query_lens)
    crosses = signature.choice["causal"] == "cross"
    key_lens = tuple(
        keys if crosses else max(keys, new)
        for new, keys in zip(query_lens, lens.kv_lens, strict=True)
    )
    needles = tuple(
        min(needle, keys - 1)
        for needle, keys in zip(batch.needles, key_lens, strict=True)
    )
    fitted = replace(
        batch,
        signature=signature,
        query_lens=query_lens,
        key_lens=key_lens,
        needles=needles,
    )
    return batch if fitted == batch else fitted
