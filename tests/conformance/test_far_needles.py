"""The law about needles in long contexts: what formats declare, and a writer that loses one."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from pagetwin.conformance.base.support import OutsideSupport
from pagetwin.conformance.candidates.candidate import load_candidate
from pagetwin.conformance.candidates.setting import Setting
from pagetwin.conformance.checks.coded_caches import CODED, try_formats
from pagetwin.conformance.checks.expect import Disagreement
from pagetwin.conformance.laws.far_needles import CASES, LEVEL, FarNeedles
from pagetwin.conformance.laws.far_needles import (
    a_needle_among_131072_keys_is_found_in_every_format as is_found,
)
from pagetwin.conformance.oracles.cache_formats import decode_by_hand, encode_by_hand
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.contract.cache_formats import FORMATS, CacheFormat
from pagetwin.contract.operations import load_implementation
from torch import Tensor

REFERENCE = load_implementation("reference")


@pytest.mark.parametrize("form", CODED, ids=lambda form: form.name)
def test_a_format_loses_a_needle_only_if_it_says_so(form: CacheFormat) -> None:
    """All of the key is in its first channel, whose rotation has one sign."""
    key = torch.zeros(1, 64)
    key[0, 0] = LEVEL
    given = None if form.is_measured and not form.channels_per_scale else 1.0
    codes, scale = encode_by_hand(form, key, given)
    found = float(decode_by_hand(form, codes, given if scale is None else scale)[0, 0])
    assert (found < LEVEL / 2) == bool(form.loses)


def test_cases_have_every_format_and_few_of_them_take_long() -> None:
    assert {case.form for case in CASES} == {*FORMATS}
    assert len(CASES) <= 24


CHANNELS = FarNeedles("int4_per_token_head", "channels", "tiles")


def setting_of(**operations: Any) -> Setting:
    candidate = load_candidate("reference").with_operations(**operations)
    return Setting(candidate, REFERENCE, torch.device("cpu"))


def write_as_vllm(*args: Any, **given: Any) -> None:
    """Write four bits by vLLM's rule, whatever name is given."""
    name = "int4_per_token_head_vllm"
    REFERENCE.reshape_and_cache(*args, **given | {"kv_cache_dtype": name})


def test_levels_that_need_not_include_zero_lose_a_needle() -> None:
    """A row of [25, 0, 0, ...] is constant when it is rotated: its codes are those of zeros."""
    is_found(setting_of(), CHANNELS)
    with pytest.raises(Disagreement, match=r"at \[0, 0, .*int4_per_token_head"):
        is_found(setting_of(reshape_and_cache=write_as_vllm), CHANNELS)


def test_another_channel_is_kept_by_these_levels_too() -> None:
    is_found(setting_of(), replace(CHANNELS, form="int4_per_token_head_vllm"))


def test_a_reader_that_stops_early_loses_a_needle() -> None:
    def attend(seq_lens: Tensor, options: AttentionOptions, **given: Any) -> Any:
        return REFERENCE.paged_attention(
            seq_lens=seq_lens - 1, options=options, **given
        )

    case = FarNeedles("int8_per_token_head", "directions", "splits")
    with pytest.raises(Disagreement, match="key 1023 of 1024"):
        is_found(setting_of(paged_attention=attend), case)


@pytest.mark.parametrize("supported", [(), ("nvfp4",)])
def test_a_law_without_a_supported_format_is_outside(
    supported: tuple[str, ...],
) -> None:
    def try_one(form: CacheFormat) -> None:
        if form.name not in supported:
            raise OutsideSupport(form.name)

    with nullcontext() if supported else pytest.raises(OutsideSupport):
        try_formats(CODED, try_one)
