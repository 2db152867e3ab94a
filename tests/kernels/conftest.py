"""Width of the query tiles of Hopper's prefills, which otherwise follows from a batch's bounds."""

import pytest
from pagetwin.optimized.kernels.sm90.prefill import plan as prefill_plan
from pagetwin.optimized.kernels.sm90.prefill.plan import PrefillPlan


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let query tiles have all warpgroups: the batches of these tests are small."""
    monkeypatch.setattr(PrefillPlan, "prefers_narrow", lambda *_: False)


@pytest.fixture
def narrow(wide: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let query tiles have one warpgroup, also those that no batch has."""
    monkeypatch.setattr(
        prefill_plan, "has_narrow_tile", lambda config: config.CONSUMERS > 1
    )
    monkeypatch.setattr(PrefillPlan, "prefers_narrow", lambda *_: True)
