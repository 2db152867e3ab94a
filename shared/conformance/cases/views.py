"""Views: which tensors of an attention call are views of larger ones, and how they are stored."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

from ..base.support import Support
from .forms import (
    FORMS,
    TABLE_FORMS,
    laid_out,
    nearest_form,
    table_laid_out,
    words_of_strides,
)
from .options import Call


@dataclass(frozen=True)
class Views:
    """The forms in which the tensors of a call are stored. None: as the call has it.

    Args:
        query, key, value, out: One of FORMS. Keys and values are those of ragged calls.
        block_table: One of TABLE_FORMS.
    """

    query: str | None = None
    key: str | None = None
    value: str | None = None
    out: str | None = None
    block_table: str | None = None

    def __repr__(self) -> str:
        given = [f"{name}={form!r}" for name, form in self.given.items()]
        return f"Views({', '.join(given)})"

    @property
    def given(self) -> dict[str, str]:
        """The forms by argument, without those that are None."""
        return {name: form for name, form in vars(self).items() if form is not None}

    def within(self, support: Support) -> "Views":
        """Return the views with forms that are supported."""
        fitted = {
            name: nearest_form(name, form, support) for name, form in self.given.items()
        }
        return replace(self, **fitted)

    def with_fixed_strides(self) -> "Views":
        """Return the views without forms whose strides depend on the number of tokens."""
        changed = {
            name: "fused per head"
            for name, form in self.given.items()
            if form == "heads first"
        }
        return replace(self, **changed)

    def simpler(self) -> Iterator["Views"]:
        """Yield the views with one tensor as the call has it."""
        return (replace(self, **{name: None}) for name in self.given)

    def of(self, call: Call) -> Call:
        """Return a call whose tensors are stored in these forms."""
        arguments, query = call.arguments, call.query
        keys = arguments.get("key_cache", arguments.get("key"))
        assert keys is not None
        own = query.shape[1] * query.shape[2]
        other = keys.shape[-2] * keys.shape[-1]
        others = {
            "query": (0, 2 * other),
            "key": (own, other),
            "value": (own + other, 0),
        }
        changes = {
            name: laid_out(arguments[name], form, others[name])
            for name, form in self.given.items()
            if name in others and name in arguments
        }
        table = arguments.get("block_table")
        if self.block_table is not None and table is not None:
            changes["block_table"] = table_laid_out(table, self.block_table)
        return replace(call.changed(**changes), out_form=self.out)

    def describe(self, call: Call) -> str:
        """Return in words how the tensors of a call are stored, for which `of` made the call."""
        given = call.arguments | {"out": call.new_out()}
        return " and ".join(
            words_of_strides(name, given[name])
            for name, form in self.given.items()
            if form != "packed" and given.get(name) is not None
        )


def draw_views(pick: Random, operation: str, plain: float) -> Views:
    """Return random views of the tensors of an attention operation.

    Args:
        pick: The random numbers.
        operation: "paged_attention" or "encoder_attention".
        plain: Probability that a tensor is stored as the call has it.
    """
    is_paged = operation == "paged_attention"
    names = ("query", "out") if is_paged else ("query", "key", "value", "out")
    forms = dict.fromkeys(names, FORMS) | (
        {"block_table": TABLE_FORMS} if is_paged else {}
    )
    drawn = {name: pick.choice(some[1:]) for name, some in forms.items()}
    return Views(
        **{name: form for name, form in drawn.items() if pick.random() >= plain}
    )
