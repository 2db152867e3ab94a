"""What each kernel family for Hopper chips rejects: one change of a supported call at a time.

The changes are generated from the tensors and the options of a call. ACCEPTED has those that are
not rejected. A family that accepts more computes wrong rows, and one that accepts less is slow.
"""

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

import pytest
import torch
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.optimized.dispatch.checks import check_encoder_call, check_paged_call
from pagetwin.optimized.kernels.sm90.append import family as append
from pagetwin.optimized.kernels.sm90.cascade import family as cascade
from pagetwin.optimized.kernels.sm90.code_decode import family as code_decode
from pagetwin.optimized.kernels.sm90.code_prefill import family as code_prefill
from pagetwin.optimized.kernels.sm90.invariant import family as invariant
from pagetwin.optimized.kernels.sm90.latent import family as latent
from pagetwin.optimized.kernels.sm90.prefill import family as prefill
from pagetwin.optimized.runtime.attention_call import AttentionCall
from pagetwin.tools.bench.models import CHECKPOINTS
from pagetwin.tools.bench.models import FAMILIES as MODELS
from support.supported_calls import BF16, make_call
from torch import Tensor

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="pretends that its tensors are on a GPU"
)

FP8 = torch.float8_e4m3fn
OPTIONS: dict[str, Any] = {
    "causal": [True, False, torch.ones(2, dtype=torch.bool)],
    "sliding_window": [5],
    "attention_chunk_size": [5],
    "tree_mask": [torch.ones(2, 3, 3, dtype=torch.bool)],
    "query_ranges": [torch.zeros(6, 2, dtype=torch.int32)],
    "logits_soft_cap": [3.0],
    "alibi_slopes": [torch.ones(8)],
    "position_bias": [torch.ones(8, 9)],
    "sinks": [torch.ones(8)],
    "k_scale": [0.5, torch.ones(2)],
    "v_scale": [0.5, torch.ones(2)],
    "k_global_scale": [0.5],
    "v_global_scale": [0.5],
    "out_scale": [0.5],
    "batch_invariant": [True, False],
}
"""Values of each option."""


SCALED = {"k_scale": 0.5, "v_scale": 2.0}
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "prefill": (prefill, {}),
    "prefill of ragged keys": (prefill, {"is_paged": False}),
    "FP8 prefill": (code_prefill, {"dtype": FP8, "options": SCALED}),
    "prefill of copied blocks": (code_prefill, {"slots": 12}),
    "FP8 decode": (code_decode, {"dtype": FP8, "options": SCALED}),
    "append": (append, {}),
    "invariant": (invariant, {"options": {"batch_invariant": True}}),
    "cascade": (cascade, {"options": {"causal": False}}),
    "latent": (latent, {"is_latent": True}),
    "latent in copied blocks": (latent, {"is_latent": True, "slots": 12}),
}


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    modules = (prefill, code_prefill, code_decode, append, invariant, cascade, latent)
    for module in modules:
        monkeypatch.setattr(module, "is_hopper", lambda device: True)
    # whatever the number of KV tiles
    monkeypatch.setattr(code_decode.CodeDecodePlan, "is_few", lambda *_: False)
    yield


def changes_of(tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors that differ from one in one property each, in the same memory."""
    shape, strides = tensor.shape, tensor.stride()
    memory = tensor.untyped_storage()

    def view(
        size: Sequence[int] = shape,
        stride: Sequence[int] = strides,
        dtype: torch.dtype = tensor.dtype,
        begin: int = 0,
    ) -> Tensor:
        return torch.empty(0, dtype=dtype).set_(memory, begin, size, stride)

    for dtype in (BF16, torch.float16, torch.float32, FP8, torch.float8_e5m2):
        if dtype != tensor.dtype:
            yield f"is {str(dtype).removeprefix('torch.')}", view(dtype=dtype)
    for axis, (number, step) in enumerate(zip(shape, strides, strict=True)):
        for what, more in (("has no entry", -number), ("has 1 more", 1)):
            size = [*shape[:axis], number + more, *shape[axis + 1 :]]
            yield f"{what} in axis {axis}", view(size)
        for what, other in (
            ("0", 0),
            ("+ 1", step + 1),
            ("+ 8", step + 8),
            ("* 2", 2 * step),
            ("/ 2", step // 2),
        ):
            stride = [*strides[:axis], other, *strides[axis + 1 :]]
            yield f"has stride {axis} {what}", view(stride=stride)
    for elements in (1, 8):
        yield f"begins {elements} further", view(begin=elements)


SHAPES: dict[str, list[Any]] = {
    "query_dtype": [torch.float16, torch.float32],
    "size": [32, 64, 72, 80, 96, 112, 160, 192, 256, 512, 576],
    "value_size": [64, 128, 256, 512, 576],
    "heads": [2, 6, 10, 48, 128, 256],
    "kv_heads": [1, 2, 4],
    "slots": [8, 16, 24, 48, 64],
    "padding": [4, 8, 16],
}
"""Other arguments of `make_call`, which change several tensors."""


def find_accepted(family: Any, given: dict[str, Any]) -> set[str]:
    """Return which changes of a call a family accepts, of those that are valid."""
    call = make_call(**given)
    check = check_encoder_call if call.block_table is None else check_paged_call

    def is_accepted(call: AttentionCall = call, **changes: Any) -> bool:
        other = call._replace(**changes)
        try:
            check(other, 0, False)
        except (ValueError, TypeError, IndexError, NotImplementedError):
            return False
        return family.supports(other) and family.plan(other).takes(other)

    assert is_accepted()
    found = set()
    for name, tensor in call._asdict().items():
        if isinstance(tensor, Tensor):
            for what, other in changes_of(tensor):
                if is_accepted(**{name: other}):
                    found.add(f"{name} {what}")
    both = zip(changes_of(call.key), changes_of(call.value), strict=True)
    for (what, key), (_, value) in both:
        if is_accepted(key=key, value=value):
            found.add(f"cache {what}")
    for name, values in SHAPES.items():
        for other_value in values:
            if is_accepted(make_call(**(given | {name: other_value}))):
                found.add(f"{name} = {str(other_value).removeprefix('torch.')}")
    options = {name: getattr(call.options, name) for name in call.options.given}
    assert {*OPTIONS} == {field.name for field in fields(AttentionOptions)}
    for name, values in OPTIONS.items():
        for value in values:
            kind = "tensor" if isinstance(value, Tensor) else value
            if is_accepted(options=AttentionOptions(**(options | {name: value}))):
                found.add(f"{name} = {kind}")
    return found


def strides(names: str, axis: int, *steps: str) -> set[str]:
    """Return changes of a stride of some tensors; without `steps` all of them."""
    every = steps or ("0", "+ 1", "+ 8", "* 2", "/ 2")
    return {
        f"{name} has stride {axis} {step}" for name in names.split() for step in every
    }


def begins(names: str, *elements: int) -> set[str]:
    """Return changes of the address of some tensors."""
    return {
        f"{name} begins {element} further"
        for name in names.split()
        for element in elements
    }


OF_BATCH = (
    begins("query_start_loc lengths lse", 1, 8)
    | strides("query_start_loc lengths lse", 0)
    | strides("lse", 1)
)
"""Whatever these are, a kernel loads them one by one."""
OF_TABLE = (
    begins("block_table", 1, 8)
    | strides("block_table", 0)
    | {"block_table has 1 more in axis 1"}
)
# TMA reads rows of one stride, a multiple of 16 bytes, from addresses that are multiples of them
OF_ROWS = begins("query out", 8) | strides("query out", 0, "+ 8", "* 2", "/ 2")
OF_HEADS = strides("query out", 1, "0", "+ 8", "* 2", "/ 2")
PAGES = (
    begins("key value cache", 8)
    | strides("key value cache", 0, "0", "* 2", "/ 2")
    | strides("key value cache", 1, "* 2", "/ 2")
    | strides("key value cache", 2, "0", "+ 8", "* 2", "/ 2")
)
RAGGED = (
    begins("key value cache", 8)
    | strides("key value cache", 0, "+ 8", "* 2", "/ 2")
    | strides("key value cache", 1, "0", "+ 8", "* 2", "/ 2")
)


def shapes(name: str, *values: Any) -> set[str]:
    """Return changes of an argument of `make_call`."""
    return {f"{name} = {changed}" for changed in values}


EACH = {"cache has 1 more in axis 0"} | shapes("query_dtype", "float16")
EACH |= shapes("padding", 16)
GROUPS = shapes("heads", 2, 6, 10, 48, 128) | shapes("kv_heads", 1, 2, 4)
# a query tile has all heads of a group, 64 at most, or one
LARGE_GROUPS = shapes("heads", 256)
HEAD_SIZES = shapes("size", 32, 64, 72, 80, 96, 112, 160, 192, 256)
HEAD_SIZES |= shapes("value_size", 64, 128, 256)
# a box of 8 rows or more does not cross a block
SLOTS = shapes("slots", 8, 16, 24, 48, 64)
SLOTS_OF_16 = shapes("slots", 16, 48, 64)
PADDED = shapes("padding", 8)
IS_E5M2 = {"cache is float8_e5m2"}
MASKS = {"sliding_window = 5", "attention_chunk_size = 5"}
SCORES = {"logits_soft_cap = 3.0", "sinks = tensor"}
SCALES = {f"{name} = {scale}" for name in SCALED for scale in ("0.5", "tensor")}
IS_CAUSAL, MAY_BE_CAUSAL = {"causal = True"}, {"causal = True", "causal = False"}
VARIES, IS_INVARIANT = {"batch_invariant = False"}, {"batch_invariant = True"}
WIDE = {"out is float32"}
OF_CALL = OF_BATCH | OF_ROWS | OF_HEADS | EACH | PADDED | GROUPS | HEAD_SIZES
# values are the first columns of the keys, and the queries contiguous
LATENTS = (
    OF_BATCH
    | OF_TABLE
    | begins("query out", 8)
    | strides("out", 0, "0", "+ 8", "* 2", "/ 2")
    | strides("out", 1, "0", "+ 8", "* 2", "/ 2")
    | begins("cache", 8)
    | strides("cache", 0, "0", "+ 8", "* 2", "/ 2")
    | strides("cache", 1, "0", "+ 8", "* 2", "/ 2")
    | strides("cache", 2)
    | EACH
    | {"cache has 1 more in axis 1"}
    | PADDED
    | SLOTS
    | shapes("heads", 2, 6, 10, 48, 128, 256)
    | shapes("kv_heads", 1)
    | shapes("size", 576)
    | shapes("value_size", 512)
    | MAY_BE_CAUSAL
    | VARIES
)
ACCEPTED = {
    "prefill": (
        OF_CALL | OF_TABLE | PAGES | SLOTS | LARGE_GROUPS | MASKS | SCORES | MAY_BE_CAUSAL
        | VARIES | WIDE
    ),
    "prefill of ragged keys": (
        OF_CALL | RAGGED | SLOTS | LARGE_GROUPS | MASKS | SCORES
        | MAY_BE_CAUSAL | VARIES | WIDE
    ),
    # the cache is converted by a kernel that loads single elements of any strides and addresses
    "FP8 prefill": (
        begins("key value cache", 1, 8) | OF_CALL | OF_TABLE | strides("block_table", 1)
        | {stride for axis in range(4) for stride in strides("key value cache", axis)}
        | SLOTS | {"cache has 1 more in axis 1"} | IS_E5M2
        | shapes("padding", 4)
        | LARGE_GROUPS | MASKS | SCORES | SCALES | MAY_BE_CAUSAL | VARIES | WIDE
    ),
    "prefill of copied blocks": (
        begins("key value cache", 1, 8) | OF_CALL | OF_TABLE | strides("block_table", 1)
        | {stride for axis in range(4) for stride in strides("key value cache", axis)}
        | {"cache has 1 more in axis 1"} | shapes("padding", 4)
        | LARGE_GROUPS | MASKS | SCORES | MAY_BE_CAUSAL | VARIES | WIDE
    ),
    # only keys and values are loaded 16 bytes at a time
    "FP8 decode": (
        OF_BATCH | OF_TABLE | strides("block_table", 1)
        | begins("query out", 1, 8)
        | {stride for axis in range(3) for stride in strides("query out", axis)}
        | strides("key value cache", 0, "0", "* 2", "/ 2")
        | strides("key value cache", 1, "0", "* 2", "/ 2")
        | strides("key value cache", 2, "0", "* 2", "/ 2")
        | EACH | SLOTS_OF_16 | IS_E5M2 | shapes("heads", 2, 6, 10) | shapes("kv_heads", 1, 2, 4)
        | shapes("size", 64) | shapes("value_size", 64, 128)
        | {"query is float16", "out is float16"}
        | MASKS | SCORES | SCALES | MAY_BE_CAUSAL | VARIES | WIDE
    ),
    "append": OF_CALL | OF_TABLE | PAGES | SLOTS | MASKS | SCORES | IS_CAUSAL | VARIES,
    "invariant": (
        OF_CALL | OF_TABLE | PAGES | SLOTS | MASKS | SCORES | IS_CAUSAL | IS_INVARIANT
    ),
    # the call over the prefix, which has neither sinks nor, from its caller, a lower bound
    "cascade": (
        OF_CALL | OF_TABLE | PAGES | SLOTS | LARGE_GROUPS | SCORES | MAY_BE_CAUSAL
        | VARIES | IS_INVARIANT | WIDE
    ),
    "latent": LATENTS,
    "latent in copied blocks": LATENTS,
}  # fmt: skip
"""The changes of a call that each family accepts, if they are valid."""
OVERLAPPING = (
    strides("out", 0, "0", "/ 2") | strides("out", 1)
    | strides("out", 2, "0", "+ 1", "* 2", "/ 2")
    | strides("lse", 0, "0", "/ 2") | strides("lse", 1)
)  # fmt: skip
"""Results whose elements share memory: such calls are not valid."""


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_accepts_these_changes_of_a_call_and_rejects_all_others(
    name: str,
) -> None:
    family, given = FAMILIES[name]
    accepted = find_accepted(family, given)
    assert accepted - ACCEPTED[name] == set(), "wrong rows"
    assert ACCEPTED[name] - OVERLAPPING - accepted == set(), "not rejected before"
    assert not accepted & OVERLAPPING


@pytest.mark.sample(2)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("slots", [0, 1, 8, 16])
def test_models_have_a_prefill_kernel_for_hopper_unless_their_head_sizes_are_other_ones(
    slots: int, causal: bool
) -> None:
    """Of a group, a window and blocks of any size, or without a cache."""
    portable = set()
    for shape in (*CHECKPOINTS, *MODELS):
        call = make_call(
            is_paged=slots > 0,
            slots=slots or 16,
            size=shape.key_size,
            value_size=shape.value_size,
            heads=2 * shape.group,
            kv_heads=2,
            options={"causal": causal, "sliding_window": shape.window or None},
        )
        families = [code_prefill if slots == 1 else prefill]
        if causal and slots > 1 and shape.group <= 64:
            families.append(append)
        are_supported = {family.supports(call) for family in families}
        sizes = shape.key_size, shape.value_size
        fits = all(size % 8 == 0 and size <= 256 for size in sizes)
        assert are_supported == {fits}, shape
        if not fits:
            portable.add(sizes)
    assert portable == {
        (size, size) for size in (15, 21, 36, 42, 73, 82, 464, 512, 1024)
    }


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_supports_no_call_of_another_chip(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, given = FAMILIES[name]
    monkeypatch.setattr(family, "is_hopper", lambda device: False)
    assert not family.supports(make_call(**given))


@pytest.mark.parametrize(
    "name", [family for family in FAMILIES if "prefill" not in family]
)
def test_families_that_read_pages_support_no_ragged_keys(name: str) -> None:
    family, given = FAMILIES[name]
    assert not family.supports(make_call(**(given | {"is_paged": False})))
