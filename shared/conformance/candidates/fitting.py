"""Fitting of cases to the declared support of a kernel.

Cases are drawn from all calls that attention allows. For a kernel that supports only head size 128
and block size 16 nearly all of them are outside. Therefore such a case is tried as the nearest
case inside of the declared support. That case has the same lengths, tables and poison, with sizes,
strides and options that the kernel supports.
"""

from collections.abc import Collection, Sequence
from dataclasses import fields, is_dataclass, replace
from random import Random
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch

from ...validation.option import Drawing
from ...validation.options import OPTIONS as OPTION_FILES
from ..base.support import Support, has_same_caches, nearest_length
from ..cases.batches import BatchPlan
from ..cases.forms import nearest_layout
from ..cases.option_pairs import OPTIONS, Choice, allowed
from ..cases.options import DTYPES
from ..cases.signatures import Signature, SignedBatch

Value = TypeVar("Value")


@runtime_checkable
class Fitted(Protocol):
    """A case with its own method of fitting to the declared support."""

    def within(self, support: Support) -> Any:
        """Return the nearest case inside of the support."""


DECLARED = (*OPTION_FILES, "value_head_size", "scale")
"""Options of a choice that need an entry in SUPPORT."""
DRAWING = Drawing(Random(0), (2, 2), (3, 3), 2, 0, torch.device("cpu"))
"""A batch for which a value of each kind is drawn."""
SCALES = {
    "numbers": 0.1,
    "one element": torch.ones(1),
    "each head": torch.ones(2),
}
"""A value of each kind of scale of a cache."""


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
        parts = tuple(fit_case(part, support) for part in case)
        is_same = all(one is other for one, other in zip(parts, case, strict=True))
        return case if is_same else parts
    if is_dataclass(case) and not isinstance(case, type):
        given = {field.name: getattr(case, field.name) for field in fields(case)}
        fitted = {name: fit_case(value, support) for name, value in given.items()}
        changed = {
            name: value for name, value in fitted.items() if value is not given[name]
        }
        return replace(case, **changed) if changed else case
    return case


def _nearest(value: Value, taken: Collection[Value] | None, turn: int) -> Value:
    """Return a value if it is supported, else one that is, selected by `turn`."""
    if taken is None or value in taken:
        return value
    ordered = taken if isinstance(taken, Sequence) else list(taken)
    return ordered[turn % len(ordered)]


def _fit_plan(plan: BatchPlan, support: Support) -> BatchPlan:
    """Return a plan with supported sizes, dtype, layouts and lengths."""
    query_lens = tuple(
        nearest_length(query_len, support.query_lens) for query_len in plan.query_lens
    )
    kv_lens = tuple(
        nearest_length(max(keys, new), support.seq_lens)
        for keys, new in zip(plan.kv_lens, query_lens, strict=True)
    )
    head_size = _nearest(plan.head_size, support.head_sizes, plan.seed)
    given = support.why_not_options({"scale": 1.0}) is None
    # a scale drawn for a small head size makes the scores of a large one huge
    keeps_scale = given and head_size == plan.head_size
    dtype = str(plan.dtype).removeprefix("torch.")
    dtype = _nearest(dtype, _drawn_dtypes(support), plan.seed)

    def layout_of(layout: str) -> str:
        return nearest_layout(layout, support, head_size, DTYPES[dtype], plan.seed)

    layout = layout_of(plan.layout)
    value_layout = plan.value_layout and layout_of(plan.value_layout)
    fitted = replace(
        plan,
        query_lens=query_lens,
        kv_lens=kv_lens,
        block_size=_nearest(plan.block_size, support.block_sizes, plan.seed),
        group=_nearest(plan.group, support.group_sizes, plan.seed),
        head_size=head_size,
        dtype=DTYPES[dtype],
        layout=layout,
        value_layout=None if has_same_caches(support) else value_layout,
        scale=plan.scale if keeps_scale else None,
        fused=plan.fused and support.strides.get("query") != "packed",
    )
    return plan if fitted == plan else fitted


def _drawn_dtypes(support: Support) -> Collection[str] | None:
    """Return the supported dtypes of queries that cases are drawn in."""
    if support.dtypes is None:
        return None
    return [dtype for dtype in support.dtypes if dtype in DTYPES] or None


LENGTHS = {
    "mixed": (0, 1, 5, 7, 20, 33),
    "prefill": (1, 3, 5, 12, 20, 33),
    "verification": (1, 2, 3, 4, 5),
    "decode": (1,),
}
"""New tokens of the requests of each kind of batch (`cases.choice_calls.draw_lens`)."""
STORED = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}


def _fit_choice(choice: Choice, support: Support) -> Choice:
    """Return a choice without the options and values that are not supported."""
    fitted = dict(choice)
    turn = sum(map(len, choice.values()))
    for name, taken in (
        ("block_size", support.block_sizes),
        ("head_size", support.head_sizes),
        ("group", support.group_sizes),
    ):
        fitted[name] = str(_nearest(int(choice[name]), taken, turn))
    if fitted["head_size"] != choice["head_size"]:
        fitted["scale"] = "none"
    fitted["dtype"] = _nearest(choice["dtype"], _drawn_dtypes(support), turn)
    lens = support.query_lens
    if lens is not None:
        own = choice["batch"]
        kinds = [own, *(kind for kind in LENGTHS if kind != own)]
        inside = [kind for kind in kinds if all(n in lens for n in LENGTHS[kind])]
        fitted["batch"] = inside[0] if inside else "decode"
    size, dtype = int(fitted["head_size"]), DTYPES[fitted["dtype"]]
    fitted["layout"] = nearest_layout(choice["layout"], support, size, dtype, turn)
    if support.strides.get("query") == "packed":
        fitted["query"] = "apart"
    _fit_options(fitted, support)
    return choice if fitted == choice else fitted


def fit_signature(signature: Signature, support: Support) -> Signature:
    """Return the nearest signature inside of the declared support, which says nothing of ranks."""
    if signature.ranks is not None:
        return signature
    choice = _fit_choice(signature.choice, support)
    longest = 1 if choice["batch"] == "decode" else signature.max_query_len
    views = signature.views.within(support)
    fitted = replace(signature, choice=choice, max_query_len=longest, views=views)
    return signature if fitted == signature else fitted


def _fit_batch(batch: SignedBatch, support: Support) -> SignedBatch:
    """Return a batch with a supported signature and supported lengths."""
    signature = fit_signature(batch.signature, support)
    if signature.ranks is not None:
        return batch
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


def _fit_options(fitted: Choice, support: Support) -> None:
    """Replace the options of a choice that are not supported; `fitted` is modified."""
    for name in DECLARED:
        if _is_supported(fitted, support, name):
            continue
        rest = {other: value for other, value in fitted.items() if other != name}
        for value in allowed(rest, name):
            if _is_supported(rest | {name: value}, support, name):
                fitted[name] = value
                break
    stored = STORED.get(fitted["cache"])
    if stored is not None:
        scales = [kind for kind in SCALES if _takes(support, "k_scale", SCALES[kind])]
        dtypes = support.cache_dtypes
        if not scales or (dtypes is not None and stored not in dtypes):
            fitted["cache"], fitted["scales"] = "as the query", "none"
        elif fitted["scales"] not in scales:
            fitted["scales"] = scales[0]
    if not _takes(support, "lse", SCALES["each head"]):
        fitted["lse"] = "none"
    if fitted["out"] not in ("given", "made") and not _takes(support, "out_scale", 0.1):
        fitted["out"] = "given"
    if not _takes(support, "out", SCALES["each head"]):
        fitted["out"] = "made"
    for names in support.never_together:
        on = [name for name in names if name in DECLARED and _option(fitted, name)]
        if len(on) == len(names):
            plain = "no" if fitted["operation"] == "encoder_attention" else "yes"
            is_flag = on[-1] == "causal"
            fitted[on[-1]] = plain if is_flag else OPTIONS[on[-1]].values[0]


def _takes(support: Support, name: str, value: Any) -> bool:
    return support.why_not_options({name: value}) is None


def _is_supported(choice: Choice, support: Support, name: str) -> bool:
    return support.why_not_options(_option(choice, name)) is None


def _option(choice: Choice, name: str) -> dict[str, Any]:
    """Return an option of a choice with a value of its kind; nothing if it is off."""
    text = choice[name]
    if name == "causal":
        causal = OPTION_FILES[name].draw(text, DRAWING)
        is_plain = causal is (choice["operation"] != "encoder_attention")
        return {} if is_plain else {name: causal}
    if text == OPTIONS[name].values[0]:
        return {}
    if name == "scale":
        return {name: float(text)}
    if name == "value_head_size":
        return {name: int(choice["head_size"]) + 5}
    return {name: OPTION_FILES[name].draw(text, DRAWING)}
