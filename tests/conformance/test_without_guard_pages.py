"""Laws about guard pages on a system that protects no memory."""

import pytest
from pagetwin.conformance.base.results import Status
from pagetwin.conformance.candidates.candidate import load_candidate
from pagetwin.conformance.candidates.guard import guard_pages
from pagetwin.conformance.running.trial import find_law, make_setting, try_law


@pytest.mark.extended
def test_a_law_about_guard_pages_is_not_tried_where_there_are_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(guard_pages, "CAN_PROTECT", False)
    setting = make_setting(load_candidate("reference"), "cpu")
    law = find_law("nothing past the end of a block table is read for slots")
    result = try_law(law, setting, 0, 1)
    assert result.status == Status.OUTSIDE
    assert "memory that ends at a guard page, on Windows" in result.reason
