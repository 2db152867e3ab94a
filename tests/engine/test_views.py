"""Views of larger tensors: their forms, calls that have them, and kernels that ignore strides."""

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from pagetwin.conformance import Status, Support
from pagetwin.conformance.candidates.candidate import Candidate, load_candidate
from pagetwin.conformance.candidates.fitting import fit_case
from pagetwin.conformance.cases.batches import GARBAGE, BatchPlan, to_strided
from pagetwin.conformance.cases.caches import CacheSizes
from pagetwin.conformance.cases.forms import (
    FORMS,
    TABLE_FORMS,
    laid_out,
    nearest_form,
    table_laid_out,
    words_of_strides,
)
from pagetwin.conformance.cases.options import paged_call
from pagetwin.conformance.cases.signatures import SMALL, draw_signature
from pagetwin.conformance.cases.views import Views, draw_views
from pagetwin.conformance.checks.canaries import memory_of
from pagetwin.conformance.laws.cache_write import CacheWrite
from pagetwin.conformance.running.trial import find_law, make_setting, try_law
from pagetwin.contract.attention_options import pack_options
from torch import Tensor

RIGHT = load_candidate("reference").operations
ONE = "attention of a view is that of the packed tensor"
RAGGED = "ragged attention of a view is that of the packed tensor"
CPU = torch.device("cpu")
NUMBERS = torch.arange(48.0).view(2, 3, 8)


@pytest.mark.parametrize("form", FORMS)
def test_a_form_has_the_same_numbers_and_poison_around_them(form: str) -> None:
    view = laid_out(NUMBERS, form)
    assert torch.equal(view, NUMBERS)
    assert view.is_contiguous() == (form == "packed")
    memory = memory_of(view).view(torch.float32)
    poison = int(memory.isnan().sum())
    assert poison == len(memory) - 48 and (poison > 0) == (
        form not in ("packed", "heads first")
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_moved_view_has_its_strides_and_poison_in_its_gaps(
    dtype: torch.dtype,
) -> None:
    """Gaps held zeros, so a kernel that read them was right."""
    view = torch.ones(5, 4, 6, dtype=dtype)[1:, ::2, 1:4]
    moved = to_strided(view, CPU)
    assert torch.equal(moved, view) and moved.stride() == view.stride()
    assert moved.data_ptr() != view.data_ptr()
    memory = memory_of(moved).view(dtype)
    assert int(memory.isnan().sum()) == len(memory) - view.numel() > 0
    assert not memory[memory == memory].ne(1).any()


@pytest.mark.parametrize("form", TABLE_FORMS[1:])
def test_a_table_has_ids_around_it_that_do_not_exist(form: str) -> None:
    table = torch.arange(6, dtype=torch.int32).view(2, 3)
    view = table_laid_out(table, form)
    assert torch.equal(view, table) and not view.is_contiguous()
    memory = memory_of(view).view(torch.int32).tolist()
    assert sum(block_id in GARBAGE for block_id in memory) == len(memory) - 6


def test_a_slice_of_a_projection_has_the_strides_of_all_its_heads() -> None:
    call = paged_call(BatchPlan((3,), (20,), kv_heads=2, group=4), CPU)
    viewed = Views(query="fused", out="fused", block_table="wider").of(call)
    assert viewed.query.stride() == ((8 + 2 + 2) * 16, 16, 1)
    assert torch.equal(viewed.query, call.query)
    out = viewed.new_out()
    assert out is not None and out.shape == call.query.shape
    assert out.stride(0) > 8 * 16 and out.storage_offset() > 0
    table = viewed.arguments["block_table"]
    assert table.stride(0) > table.shape[1]


WORDS = {
    "fused": "query is a view of a fused QKV tensor, row stride 48 elements instead of 24",
    "fused per head": "query is a view of a tensor fused per head, head stride 24 elements"
    " instead of 8",
    "heads first": "query is a view of [heads, tokens, 8], head stride 16 elements instead of 8",
    "padded": "query is a view of padded heads, head stride 11 elements instead of 8",
    "every other element": "query has elements with a stride of 2",
}


@pytest.mark.parametrize("form", FORMS[1:])
def test_a_report_says_how_a_tensor_is_stored(form: str) -> None:
    assert words_of_strides("query", laid_out(NUMBERS, form)) == WORDS[form]


# ---- what is supported

LEVELS = {
    "packed": {"packed"},
    "packed heads": {"packed", "fused"},
    "rows": {*FORMS} - {"every other element"},
    "": {*FORMS},
}


@pytest.mark.parametrize("level", LEVELS)
def test_each_form_is_fitted_to_the_declared_strides(level: str) -> None:
    support = Support(strides={"query": level} if level else {})
    for form in FORMS:
        nearest = nearest_form("query", form, support)
        assert nearest in LEVELS[level]
        assert nearest == form or form not in LEVELS[level]


def test_an_alignment_leaves_out_padded_heads() -> None:
    support = Support(strides={"out": "rows"}, alignment=16)
    assert nearest_form("out", "padded", support) == "heads first"
    assert nearest_form("out", "fused", support) == "fused"


@pytest.mark.parametrize("form", TABLE_FORMS)
def test_a_table_is_fitted_too(form: str) -> None:
    nearest = nearest_form(
        "block_table", form, Support(strides={"block_table": "rows"})
    )
    assert nearest == ("packed" if form == "packed" else "wider")


def test_caches_of_a_kernel_with_the_same_strides_have_the_same_layout() -> None:
    support = Support(same_strides=[("key_cache", "value_cache")])
    plan = BatchPlan((1,), (3,), layout="hnd", value_layout="padded")
    assert fit_case(plan, support).value_layout is None
    tensors = {"key_cache": torch.zeros(2, 4, 2, 8)}
    tensors["value_cache"] = tensors["key_cache"].transpose(1, 2).contiguous()
    tensors["value_cache"] = tensors["value_cache"].transpose(1, 2)
    assert support.why_not_strides(tensors) == (
        "other strides of key_cache than of value_cache"
    )


def test_a_write_of_a_narrow_kernel_is_fitted_with_its_slots() -> None:
    """Fifteen of sixteen drawn writes were not tried with a kernel that needs packed tokens."""
    support = Support(
        dtypes=["float16"],
        head_sizes=[64],
        kv_layouts=["NHD"],
        strides=dict.fromkeys(
            ("key", "value", "key_cache", "value_cache"), "packed heads"
        ),
        same_strides=[("key_cache", "value_cache")],
        options=[],
    )
    seen: set[str] = set()
    tried = 0

    def write(key: Tensor, value: Tensor, caches: Tensor, *rest: Any) -> None:
        nonlocal tried
        tried += 1
        seen.add("fused" if not key.is_contiguous() else "packed")
        RIGHT["reshape_and_cache"](key, value, caches, *rest)

    candidate = Candidate("mine", {"reshape_and_cache": write}, support)
    law = find_law("each token is written to its slot and nothing else changes")
    result = try_law(law, make_setting(candidate, "cpu"), 0, 40)
    assert result.status == Status.HELD and not result.skipped, result
    assert tried == 40 and seen == {"packed", "fused"}


def test_a_fitted_write_keeps_its_slots() -> None:
    sizes = CacheSizes(4, 3, 2, 80, 16, torch.float32, "hnd", "padded")
    write = CacheWrite((5, -1, 11), 1, sizes, ("heads first", "padded"), 2, 7)
    support = Support(strides={"key": "packed"}, head_sizes=[24], kv_layouts=["NHD"])
    fitted = fit_case(write, support)
    assert (fitted.slots, fitted.sizes.num_blocks) == (write.slots, 4)
    assert fitted.sizes.block_size == 3 and fitted.sizes.head_size == 24
    assert fitted.forms == ("packed", "padded")
    assert "hnd" not in (fitted.sizes.layout, fitted.sizes.value_layout)


# ---- drawing


def test_signatures_have_views_of_each_tensor_and_simpler_ones_without_them() -> None:
    drawn = [draw_signature(seed, SMALL).views for seed in range(200)]
    for name, forms in {
        "query": FORMS,
        "out": FORMS,
        "block_table": TABLE_FORMS,
    }.items():
        fixed = {*forms[1:]} - {"heads first"}
        assert {getattr(own_views, name) for own_views in drawn} == {None, *fixed}
    assert Views() in drawn
    views = draw_views(Random(0), "encoder_attention", 0)
    assert set(views.given) == {"query", "key", "value", "out"}
    assert [len(simpler.given) for simpler in views.simpler()] == [3, 3, 3, 3]
    assert repr(Views(out="fused")) == "Views(out='fused')"


# ---- kernels that ignore a stride

Change = Callable[[Tensor], Tensor]


def with_strides(tensor: Tensor, *strides: int) -> Tensor:
    """Return what a kernel with other strides reads; past the end of the memory it reads 0."""
    count = 1 + sum(
        (size - 1) * step for size, step in zip(tensor.shape, strides, strict=True)
    )
    memory = memory_of(tensor).view(tensor.dtype)[tensor.storage_offset() :]
    memory = torch.nn.functional.pad(memory, (0, max(0, count - len(memory))))
    return memory.as_strided(tensor.shape, strides)


IGNORED: dict[str, Change] = {
    "tokens": lambda t: with_strides(t, t[0].numel(), *t.stride()[1:]),
    "heads": lambda t: with_strides(t, t.stride(0), t.shape[2], t.stride(2)),
    "elements": lambda t: with_strides(t, *t.stride()[:2], 1),
}
"""What a kernel reads that does not use one stride of a [tokens, heads, elements] tensor."""
TABLES: dict[str, Change] = {
    "rows": lambda t: with_strides(t, t.shape[1], t.stride(1)).clamp(min=0),
    "entries": lambda t: with_strides(t, t.stride(0), 1).clamp(min=0),
}


def judged(law: str, operation: str, spoil: Callable[[dict[str, Any]], None]) -> Any:
    """Return the result of a law on an operation whose arguments are changed."""

    def attend(**given: Any) -> Tensor:
        spoil(given)
        found: Tensor = RIGHT[operation](**pack_options(**given))
        return found

    candidate = Candidate("mine", {operation: attend}, Support())
    return try_law(find_law(law), make_setting(candidate, "cpu"), 0, 10)


@pytest.mark.sample(2)
@pytest.mark.parametrize("ignored", IGNORED)
@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_a_kernel_that_ignores_a_stride_breaks_the_law(name: str, ignored: str) -> None:
    law, operation = (
        (ONE, "paged_attention") if name == "query" else (RAGGED, "encoder_attention")
    )

    def spoil(given: dict[str, Any]) -> None:
        given[name] = IGNORED[ignored](given[name])

    result = judged(law, operation, spoil)
    assert result.status == Status.BROKEN and f"output if {name} " in result.what
    assert f"argument={name!r}" in result.case


@pytest.mark.sample(1)
@pytest.mark.parametrize("ignored", TABLES)
def test_a_kernel_that_ignores_a_stride_of_the_table_breaks_the_law(
    ignored: str,
) -> None:
    def spoil(given: dict[str, Any]) -> None:
        table = TABLES[ignored](given["block_table"])
        given["block_table"] = table % given["key_cache"].shape[0]

    result = judged(ONE, "paged_attention", spoil)
    assert result.status == Status.BROKEN and "block_table" in result.case, result


@pytest.mark.sample(1)
@pytest.mark.parametrize("ignored", IGNORED)
def test_an_output_written_with_other_strides_breaks_the_law(ignored: str) -> None:
    def attend(out: Tensor, **given: Any) -> Tensor:
        found = RIGHT["paged_attention"](**pack_options(**given))
        target = out
        strides = {
            "tokens": (out[0].numel(), *out.stride()[1:]),
            "heads": (out.stride(0), out.shape[2], out.stride(2)),
            "elements": (*out.stride()[:2], 1),
        }[ignored]
        target.as_strided(out.shape, strides, out.storage_offset()).copy_(found)
        return out

    candidate = Candidate("mine", {"paged_attention": attend}, Support())
    result = try_law(find_law(ONE), make_setting(candidate, "cpu"), 0, 10)
    assert result.status == Status.BROKEN and "argument='out'" in result.case, result
    assert result.what.startswith("output if out ")


def test_what_is_written_between_the_elements_of_an_output_breaks_the_law() -> None:
    def attend(out: Tensor, **given: Any) -> Tensor:
        found = RIGHT["paged_attention"](**pack_options(**given))
        memory_of(out).fill_(0)
        return out.copy_(found)

    candidate = Candidate("mine", {"paged_attention": attend}, Support())
    result = try_law(find_law(ONE), make_setting(candidate, "cpu"), 0, 10)
    assert result.status == Status.BROKEN and result.what == "memory around output"
