"""Modules with flash-attn's names as operations: laws hold through them, and find a wrong one."""

from types import SimpleNamespace

import pytest
from pagetwin.conformance import FlashAttnFunctions
from pagetwin.conformance.base.results import Status
from pagetwin.conformance.candidates.candidate import Candidate
from pagetwin.conformance.candidates.setting import Setting
from pagetwin.conformance.running.trial import find_law, make_setting, try_law
from pagetwin.integrations.flash_attn import FlashAttention
from pagetwin.integrations.flash_attn.install import third_version

NAMES = ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache")
LAWS = (
    "a query attends to no key outside of its window or chunk",
    "paged attention is right under any options",
    "encoder attention is right under any options",
)


def setting_of(module) -> Setting:
    functions = FlashAttnFunctions(module, reads_past=False)
    support = functions.support(
        devices=None,
        dtypes=["float32"],
        cache_dtypes=["float32"],
        head_sizes=[16, 32],
        strides={},
        alignment=None,
    )
    operations = {
        name: getattr(functions, name)
        for name in ("paged_attention", "encoder_attention")
    }
    return make_setting(Candidate("functions", operations, support), "cpu")


@pytest.mark.parametrize(
    ("twin", "is_third"),
    [("reference", False), ("reference", True), ("optimized", False)],
)
def test_laws_hold_through_the_names(twin, is_third):
    functions = FlashAttention(twin)
    if is_third:
        found = {name: third_version(getattr(functions, name)) for name in NAMES}
        functions = SimpleNamespace(**found)
    setting = setting_of(functions)
    for name in LAWS:
        result = try_law(find_law(name), setting, 0, 1)
        assert result.status is Status.HELD, result


def test_a_window_that_is_one_too_wide_is_found():
    right = FlashAttention("reference")

    def wide(q, k, v, *, window_size=(-1, -1), **given):
        left, after = window_size
        return right.flash_attn_varlen_func(
            q, k, v, window_size=(left + (left >= 0), after), **given
        )

    wide.__wrapped__ = right.flash_attn_varlen_func
    setting = setting_of(SimpleNamespace(flash_attn_varlen_func=wide))
    result = try_law(find_law(LAWS[0]), setting, 0, 30)
    assert result.status is Status.BROKEN


def test_a_module_without_the_packed_function_is_named():
    with pytest.raises(AttributeError, match="flash_attn_varlen_func"):
        FlashAttnFunctions(SimpleNamespace())
