"""Laws of views: queries, keys, values, outputs and block tables that are parts of larger tensors.

Engines compute queries, keys and values in one projection, and pass slices of its result. A call
with views must be as right as the call with packed tensors, which is made first. So a law here is
broken by strides alone. Caches with other strides are drawn by all laws of attention
(`batches.LAYOUTS`).
"""

from dataclasses import dataclass, replace
from random import Random

import torch
from hypothesis import strategies as st

from ..candidates.calls.calling import expect_right, run_call
from ..candidates.candidate import OutsideSupport
from ..candidates.setting import Setting
from ..cases.batches import BatchPlan
from ..cases.choice_calls import build_call
from ..cases.forms import FORMS, TABLE_FORMS
from ..cases.option_pairs import Choice, drawn_choice
from ..cases.options import Call, paged_call, ragged_call
from ..cases.reuse import compiled
from ..cases.views import Views, draw_views
from ..checks.canaries import copy_of, expect_memory
from ..checks.expect import Disagreement
from .law import law

BATCHES = {"decodes": ((1, 1, 1), (20, 33, 9)), "prompts": ((5, 20), (20, 33))}
"""New tokens and keys of requests."""


@dataclass(frozen=True)
class OneView:
    """A call with one argument that is a view.

    Args:
        argument: The argument.
        form: One of `forms.FORMS`, or of TABLE_FORMS for a block table.
        batch: One of BATCHES.
    """

    argument: str
    form: str
    batch: str

    @property
    def views(self) -> Views:
        """The forms of all arguments."""
        return Views(**{self.argument: self.form})

    def call(self, setting: Setting) -> Call:
        """Return the call with packed tensors. Each request has a needle."""
        lens = BATCHES[self.batch]
        plan = BatchPlan(*lens, fused=False, needle="block edge", padding=1)
        call = paged_call(setting.fit(plan), setting.device)
        return call.changed(block_table=call.arguments["block_table"].contiguous())


def one_view_each(**forms: tuple[str, ...]) -> list[OneView]:
    """Return each form of each argument, except packed ones, in each batch."""
    return [
        OneView(argument, form, batch)
        for batch in BATCHES
        for argument, its in forms.items()
        for form in its[1:]
    ]


def expect_right_views(setting: Setting, call: Call, views: Views) -> None:
    """Raise if a call is wrong with packed tensors, or with views."""
    why = setting.candidate.support.why_not_options({"out": torch.ones(1)})
    if views.out is not None and (why or call.out_dtype is None):
        raise OutsideSupport(why or "no output is passed")
    answer = call.answer()
    expect_right(setting, call, run_call(setting, call), answer)
    viewed = views.of(call)
    out = viewed.new_out()
    before = None if out is None or views.out is None else copy_of(out)
    try:
        found = run_call(setting, viewed, out if before is not None else None)
        expect_right(setting, viewed, found, answer)
    except Disagreement as error:
        what = f"{error.what} if {views.describe(viewed)}"
        raise Disagreement(
            what, error.where, error.found, error.right, error.failure
        ) from error
    if before is not None:
        expect_memory("output", found[0], before.copy_(found[0]))


@law(
    "paged_attention",
    cases=one_view_each(query=FORMS, out=FORMS, block_table=TABLE_FORMS),
)
def attention_of_a_view_is_that_of_the_packed_tensor(
    setting: Setting, case: OneView
) -> None:
    """Nothing is written between and around the elements of an output."""
    expect_right_views(setting, case.call(setting), case.views)


@law(
    "encoder_attention",
    cases=one_view_each(query=FORMS, key=FORMS, value=FORMS, out=FORMS),
)
def ragged_attention_of_a_view_is_that_of_the_packed_tensor(
    setting: Setting, case: OneView
) -> None:
    call = ragged_call(case.call(setting).changed(causal=False))
    expect_right_views(setting, call, case.views)


Viewed = tuple[Choice, int, Views]
"""The chosen options, the seed of the batch, and how its tensors are stored."""


@st.composite
def viewed_calls(draw: st.DrawFn, operation: str = "paged_attention") -> Viewed:
    """Return any valid choice of options, a seed for its batch, and views."""
    seed = draw(st.integers(0, 2**20))
    choice = drawn_choice(seed, {"operation": operation})
    views = draw_views(compiled(Random(seed)), operation, plain=0.3)
    return choice, seed, views if choice["out"] != "made" else replace(views, out=None)


@law("paged_attention", cases=viewed_calls())
def attention_is_right_for_views_under_any_options(
    setting: Setting, case: Viewed
) -> None:
    choice, seed, views = case
    expect_right_views(setting, build_call(choice, seed, setting.device), views)


@law("encoder_attention", cases=viewed_calls("encoder_attention"))
def ragged_attention_is_right_for_views_under_any_options(
    setting: Setting, case: Viewed
) -> None:
    choice, seed, views = case
    expect_right_views(setting, build_call(choice, seed, setting.device), views)
