"""Who can be captured, and what does every metadata builder do by itself?"""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pagetwin.contract.graph_support import (
    AttentionCGSupport,
    AttentionCGSupportInfo,
    CUDAGraphMode,
)
from pagetwin.contract.specs import KVCacheSpec
from pagetwin.engine.backend_interface import AttentionMetadataBuilder
from pagetwin.engine.selector import load_backend

LEVELS = list(AttentionCGSupport)


def test_another_level_only_narrows() -> None:
    info = AttentionCGSupportInfo(AttentionCGSupport.UNIFORM_BATCH, "A")
    for level in LEVELS:
        narrowed = info.narrow(level, "B")
        assert narrowed.min_cg_support.value == min(level.value, 2)
        assert narrowed.min_cg_attn_backend == ("B" if level.value < 2 else "A")
    assert [level.value for level in LEVELS] == [0, 1, 2, 3]


def test_a_mode_is_one_for_decodes_and_one_for_the_rest() -> None:
    modes = {
        mode.name: (mode.decode_mode().name, mode.mixed_mode().name)
        for mode in CUDAGraphMode
    }
    assert modes == {
        "NONE": ("NONE", "NONE"),
        "PIECEWISE": ("PIECEWISE", "PIECEWISE"),
        "FULL": ("FULL", "FULL"),
        "FULL_DECODE_ONLY": ("FULL", "NONE"),
        "FULL_AND_PIECEWISE": ("FULL", "PIECEWISE"),
    }


# ---- the base of all builders


class Recorder(AttentionMetadataBuilder):
    """A builder that returns the arguments it was called with."""

    def build(self, *arguments: Any, **named: Any) -> Any:
        return arguments, named


def recorder() -> Recorder:
    spec = KVCacheSpec(16, 1, 8, torch.float32)
    return Recorder(spec, ["layer 0"], "cpu")


def test_a_capture_is_built_like_any_step() -> None:
    common: Any = object()
    built = recorder().build_for_cudagraph_capture(common)
    assert built == ((), {"common_prefix_len": 0, "common_attn_metadata": common})


@pytest.mark.parametrize("draft_index", [0, 3])
def test_a_draft_is_built_quickly(draft_index: int) -> None:
    common: Any = object()
    _, named = recorder().build_for_drafting(common, draft_index) or ((), {})
    assert named == {
        "common_prefix_len": 0,
        "common_attn_metadata": common,
        "fast_build": True,
    }
    with pytest.raises(ValueError, match="draft_index = -1: expected at least 0"):
        recorder().build_for_drafting(common, -1)


@given(
    threshold=st.none() | st.integers(1, 9),
    spec=st.booleans(),
    varlen=st.booleans(),
    drafts=st.none() | st.integers(0, 9),
    ranks=st.integers(1, 3),
)
def test_a_decode_may_bring_its_drafts_where_every_rank_takes_them(
    threshold: int | None, spec: bool, varlen: bool, drafts: int | None, ranks: int
) -> None:
    builder = recorder()
    builder.init_reorder_batch_threshold(threshold, spec, varlen, drafts, ranks)
    takes_drafts = spec and drafts is not None and threshold is not None
    expected = max([threshold, 1 + drafts]) if takes_drafts else threshold
    if ranks > 1 and not varlen:
        expected = 1
    assert builder.reorder_batch_threshold == expected
    assert Recorder.reorder_batch_threshold is None
    assert recorder().reorder_batch_threshold is None


@pytest.mark.parametrize(
    "bad",
    [
        {"reorder_batch_threshold": 0},
        {"num_speculative_tokens": -1},
        {"decode_context_parallel_size": 0},
    ],
)
def test_a_threshold_of_nonsense_is_rejected(bad: dict[str, int]) -> None:
    (name,) = bad
    with pytest.raises(ValueError, match=f"{name} = {bad[name]}: expected at least"):
        recorder().init_reorder_batch_threshold(**bad)


@pytest.mark.parametrize(
    ("name", "level"),
    [("REFERENCE", "NEVER"), ("TRITON", "ALWAYS"), ("XFORMERS", "NEVER")],
)
def test_a_backend_says_what_it_can_capture(name: str, level: str) -> None:
    builder = load_backend(name).get_builder_cls()
    assert builder.cudagraph_support is AttentionCGSupport[level]
    assert builder.reorder_batch_threshold == 1
