"""Inputs that the laws move to a GPU keep the strides of views, which `Tensor.to` packs."""

import sys
from typing import Any

import pytest
import torch
from pagetwin.conformance.base.results import Status
from pagetwin.conformance.candidates.candidate import load_candidate
from pagetwin.conformance.cases.batches import put_on, to_strided
from pagetwin.conformance.laws.all_laws import ALL_LAWS
from pagetwin.conformance.running.trial import make_setting, try_law
from torch import Tensor

pytestmark = pytest.mark.long

OWN = "pagetwin.conformance"
FAR_OUTPUTS = "every axis of a tensor of attention may be outermost"
"""It moves what is on the device already."""


def is_packed_by_a_move(tensor: Tensor) -> bool:
    """Return whether a copy with the format of a tensor has other strides."""
    return bool(tensor.numel()) and torch.empty_like(tensor).stride() != tensor.stride()


def test_no_law_packs_a_view_when_it_moves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expanded outputs became ordinary ones on a GPU, and padded latents lost their gaps."""
    move = Tensor.to
    setting = make_setting(load_candidate("reference"), "cpu")
    about, packed = "", set()

    def note(self: Tensor, *given: Any, **named: Any) -> Tensor:
        caller = sys._getframe(1).f_globals["__name__"]
        moves = given and isinstance(given[0], torch.device) and caller.startswith(OWN)
        if moves and is_packed_by_a_move(self):
            packed.add((about, caller))
        return move(self, *given, **named)

    monkeypatch.setattr(Tensor, "to", note)
    for law in ALL_LAWS:
        about = law.name
        result = try_law(law, setting, 0, 2, listed=100, seconds=1.0)
        assert result.status in (Status.HELD, Status.UNFINISHED), result
    assert {found for found in packed if found[0] != FAR_OUTPUTS} == set()


def test_what_is_on_a_device_is_not_moved() -> None:
    view = torch.arange(12).view(3, 4)[:, ::2]
    assert put_on(view, view.device) is view


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.float16])
def test_a_moved_view_has_its_strides_and_numbers(dtype: torch.dtype) -> None:
    view = torch.arange(12).view(3, 4)[:, ::2].to(dtype)
    wide = torch.zeros(3, 4, dtype=dtype)[:, ::2].copy_(view)
    moved = to_strided(wide, wide.device)
    assert torch.equal(moved, view) and moved.stride() == (4, 2)
