"""Is every bad input refused, by both twins, in words that help, before anything is changed?

The twin reads contents only with PAGETWIN_CHECK_VALUES=1; wrong shapes, dtypes and host numbers it
refuses always. A "meta" tensor stands for one on another device.
"""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Twin
from pagetwin.conformance.generators.batches import Plan, build
from pagetwin.conformance.oracles.dense import bits
from pagetwin.contract.attention_options import pack_options
from pagetwin.contract.specs import KVCacheSpec
from pagetwin.engine.selector import get_attn_backend, load_backend
from pagetwin.validation import values_checked

Arguments = dict[str, Any]


def attention(device: torch.device) -> Arguments:
    """Return good arguments: 16-slot blocks, two requests of 3 + 1 new tokens and 20 + 9 keys."""
    batch = build(Plan((3, 1), (20, 9)), device)
    return batch.arguments() | {
        "out": torch.zeros_like(batch.query, memory_format=torch.contiguous_format)
    }


def write(device: torch.device) -> Arguments:
    """Return good arguments: four tokens for a cache of 3 blocks of 16 slots."""
    cache = torch.zeros(2, 3, 16, 2, 8, device=device)
    key = torch.ones(4, 2, 8, device=device)
    slots = torch.tensor([5, -1, 40, 7], device=device)
    return {
        "key": key,
        "value": key * 2,
        "key_cache": cache[0],
        "value_cache": cache[1],
        "slot_mapping": slots,
    }


def gather(device: torch.device) -> Arguments:
    batch = build(Plan((1, 1), (20, 9)), device)
    return {
        "key_cache": batch.key_cache,
        "value_cache": batch.value_cache,
        "block_table": batch.block_table,
        "seq_start_loc": torch.tensor([0, 20, 29], dtype=torch.int32, device=device),
        "num_tokens": 29,
    }


def slots(device: torch.device) -> Arguments:
    def int32(values: list[Any]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return {
        "query_start_loc": int32([0, 1, 4]),
        "num_computed_tokens": int32([4, 0]),
        "block_table": int32([[7, 2], [5, 0]]),
        "block_size": 4,
        "num_tokens": 4,
    }


def copy(device: torch.device) -> Arguments:
    cache = torch.arange(24.0, device=device).view(2, 3, 2, 1, 2)
    return {"kv_caches": [cache], "block_mapping": torch.tensor([[2, 0]])}


def swap(device: torch.device) -> Arguments:
    return {
        "source": torch.arange(24.0, device=device).view(2, 3, 2, 1, 2),
        "destination": torch.zeros(2, 2, 2, 1, 2, device=device),
        "block_mapping": torch.tensor([[2, 0]]),
    }


def batch_slots(device: torch.device) -> Arguments:
    return {
        "query_lens": [1, 3],
        "num_computed_tokens": [4, 0],
        "block_rows": [[7, 2], [5]],
        "block_size": 4,
    }


def one_sequence(device: torch.device) -> Arguments:
    return {
        "is_profile_run": False,
        "seq_len": 10,
        "context_len": 3,
        "start_idx": 0,
        "block_size": 4,
        "block_table": [7, 2, 5],
    }


def rows(device: torch.device) -> Arguments:
    return {"rows": [[7, 2], [5]], "max_blocks": 2}


def append(device: torch.device) -> Arguments:
    return {
        "block_table": torch.tensor([[7, 2], [5, 0]], dtype=torch.int32).to(device),
        "num_blocks": torch.tensor([1, 1], dtype=torch.int32),
        "new_blocks": [[4], []],
    }


GOOD: dict[str, Callable[[torch.device], Arguments]] = {
    "paged_attention": attention,
    "reshape_and_cache": write,
    "gather_cache": gather,
    "compute_slot_mapping_device": slots,
    "compute_slot_mapping_batch": batch_slots,
    "build_common_attn_metadata": batch_slots,
    "compute_slot_mapping": one_sequence,
    "copy_blocks": copy,
    "swap_blocks": swap,
    "make_block_table": rows,
    "append_blocks": append,
}


def changed(name: str, change: Callable[[Any], Any]) -> Callable[[Arguments], None]:
    def apply(arguments: Arguments) -> None:
        arguments[name] = change(arguments[name])

    return apply


def put(name: str, place: Any, value: Any) -> Callable[[Arguments], None]:
    def apply(arguments: Arguments) -> None:
        arguments[name] = arguments[name].clone()
        arguments[name][place] = value

    return apply


def to(value: Any) -> Callable[[Any], Any]:
    return lambda _: value


def meta(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("meta")


Case = tuple[str, Callable[[Arguments], None], type[Exception], str]

# what the host can see without reading a tensor: both twins refuse it always
ALWAYS: dict[str, Case] = {
    "query heads that kv heads do not divide": (
        "paged_attention",
        lambda a: a.update(query=a["query"][:, :3], out=a["out"][:, :3]),
        ValueError,
        "num_query_heads = 3 is not a multiple of num_kv_heads = 2",
    ),
    "a query of another dtype": (
        "paged_attention",
        changed("query", torch.Tensor.half),
        TypeError,
        "query is torch.float16: expected torch.float32",
    ),
    "a query of another head size": (
        "paged_attention",
        changed("query", lambda t: t[..., :8]),
        ValueError,
        "query has shape [4, 4, 8]: expected [tokens, query_heads, 16]",
    ),
    "a query on another device": (
        "paged_attention",
        changed("query", meta),
        ValueError,
        "query lies on meta: expected",
    ),
    "a table on another device": (
        "paged_attention",
        changed("block_table", meta),
        ValueError,
        "block_table lies on meta: expected",
    ),
    "caches of two devices": (
        "paged_attention",
        changed("value_cache", meta),
        ValueError,
        "value_cache lies on meta: expected",
    ),
    "caches of two shapes": (
        "paged_attention",
        changed("value_cache", lambda t: t[:-1]),
        ValueError,
        "expected [num_blocks, block_size, kv_heads, head_size], alike but for the head size",
    ),
    "a table of 64-bit ids": (
        "paged_attention",
        changed("block_table", torch.Tensor.long),
        TypeError,
        "block_table is torch.int64: expected torch.int32",
    ),
    "lengths of another batch": (
        "paged_attention",
        changed("seq_lens", lambda t: t[:1]),
        ValueError,
        "seq_lens has shape [1]: expected [2] (rows of the block table)",
    ),
    "starts of another batch": (
        "paged_attention",
        changed("query_start_loc", lambda t: t[:2]),
        ValueError,
        "query_start_loc has shape [2]: expected [3] (requests + 1)",
    ),
    "a bound on lengths that no row can hold": (
        "paged_attention",
        changed("max_seq_len", to(49)),
        IndexError,
        "max_seq_len = 49: expected at most 48, what a row of 3 blocks of 16 holds",
    ),
    "a negative bound": (
        "paged_attention",
        changed("max_query_len", to(-1)),
        ValueError,
        "max_query_len = -1: expected at least 0",
    ),
    "an output of another shape": (
        "paged_attention",
        changed("out", lambda t: t[:3]),
        ValueError,
        "out has shape [3, 4, 16]: expected [4, 4, 16], queries by the elements of a value",
    ),
    "a log-sum-exp of another shape": (
        "paged_attention",
        lambda a: a.update(lse=a["query"].new_zeros(4, 5)),
        ValueError,
        "lse has shape [4, 5]: expected [4, 4]",
    ),
    "keys of another dtype than the cache": (
        "reshape_and_cache",
        changed("key", torch.Tensor.half),
        TypeError,
        "key is torch.float16: expected torch.float32",
    ),
    "keys of other heads than the cache": (
        "reshape_and_cache",
        changed("key", lambda t: t[:, :1]),
        ValueError,
        "key has shape [4, 1, 8]: expected [tokens, 2, 8], as the cache has",
    ),
    "more slots than tokens": (
        "reshape_and_cache",
        changed("slot_mapping", lambda t: t.new_tensor([1, 2, 3, 4, 5])),
        ValueError,
        "slot_mapping has shape [5]: expected at most [4]",
    ),
    "32-bit slots": (
        "reshape_and_cache",
        changed("slot_mapping", torch.Tensor.int),
        TypeError,
        "slot_mapping is torch.int32: expected torch.int64",
    ),
    "slots on another device": (
        "reshape_and_cache",
        changed("slot_mapping", meta),
        ValueError,
        "slot_mapping lies on meta: expected",
    ),
    "an integer cache": (
        "reshape_and_cache",
        changed("key_cache", torch.Tensor.int),
        TypeError,
        "key_cache is torch.int32: expected torch.float16 or",
    ),
    "starts of another table": (
        "gather_cache",
        changed("seq_start_loc", lambda t: t[:2]),
        ValueError,
        "seq_start_loc has shape [2]: expected [3] (requests + 1)",
    ),
    "a negative number of rows": (
        "gather_cache",
        changed("num_tokens", to(-1)),
        ValueError,
        "num_tokens = -1: expected at least 0",
    ),
    "counts of another table": (
        "compute_slot_mapping_device",
        changed("num_computed_tokens", lambda t: t[:1]),
        ValueError,
        "num_computed_tokens has shape [1]: expected [2] (requests)",
    ),
    "64-bit counts": (
        "compute_slot_mapping_device",
        changed("num_computed_tokens", torch.Tensor.long),
        TypeError,
        "num_computed_tokens is torch.int64: expected torch.int32",
    ),
    "blocks of no slots": (
        "compute_slot_mapping_device",
        changed("block_size", to(0)),
        ValueError,
        "block_size = 0: expected at least 1",
    ),
    "a sequence longer than its row": (
        "compute_slot_mapping_batch",
        changed("query_lens", to([1, 5])),
        IndexError,
        "request 1 has 0 + 5 tokens but its row of the block table holds 1 blocks of 4:"
        " expected at most 4 tokens; append a block first",
    ),
    "lists of two batches": (
        "compute_slot_mapping_batch",
        changed("num_computed_tokens", to([4])),
        ValueError,
        "query_lens has 2 entries but num_computed_tokens has 1: expected one of each",
    ),
    "rows of another batch": (
        "compute_slot_mapping_batch",
        changed("block_rows", to([[7, 2]])),
        ValueError,
        "the block table has 1 rows: expected 2, one a request",
    ),
    "a negative count": (
        "build_common_attn_metadata",
        changed("query_lens", to([1, -1])),
        ValueError,
        "query_lens[1] = -1: expected at least 0",
    ),
    "a negative block id in a step": (
        "build_common_attn_metadata",
        changed("block_rows", to([[7, 2], [-5]])),
        IndexError,
        "rows[1][0] = -5: expected a block id from 0",
    ),
    "a position past its row": (
        "compute_slot_mapping",
        changed("block_table", to([7, 2])),
        IndexError,
        "position 9 needs entry 2 of the block table: expected an entry below 2",
    ),
    "no row": (
        "compute_slot_mapping",
        changed("block_table", to(None)),
        ValueError,
        "block_table = None: expected a row unless is_profile_run is set",
    ),
    "a context longer than its sequence": (
        "compute_slot_mapping",
        changed("context_len", to(11)),
        ValueError,
        "context_len = 11, seq_len = 10: expected 0 <= context_len <= seq_len",
    ),
    "a copy from outside the cache": (
        "copy_blocks",
        changed("block_mapping", to(torch.tensor([[3, 0]]))),
        IndexError,
        "block_mapping[0] copies from block 3: expected 0 <= block id < 3",
    ),
    "a copy to outside the cache": (
        "copy_blocks",
        changed("block_mapping", to(torch.tensor([[1, 0], [2, -1]]))),
        IndexError,
        "block_mapping[1] copies to block -1: expected 0 <= block id < 3",
    ),
    "a block written twice": (
        "copy_blocks",
        changed("block_mapping", to(torch.tensor([[1, 0], [2, 0]]))),
        ValueError,
        "block_mapping[1] copies to block 0, as an earlier pair does",
    ),
    "a block read and written": (
        "copy_blocks",
        changed("block_mapping", to(torch.tensor([[1, 0], [0, 2]]))),
        ValueError,
        "copies to block 0, which another pair copies from",
    ),
    "layers that differ": (
        "copy_blocks",
        changed("kv_caches", lambda layers: [layers[0], layers[0].half()]),
        ValueError,
        "expected blocks alike",
    ),
    "a swap to outside the other cache": (
        "swap_blocks",
        changed("block_mapping", to(torch.tensor([[0, 2]]))),
        IndexError,
        "block_mapping[0] copies to block 2: expected 0 <= block id < 2",
    ),
    "a row longer than the table": (
        "make_block_table",
        changed("max_blocks", to(1)),
        IndexError,
        "rows[0] has 2 blocks: expected at most max_blocks = 1; make the table wider",
    ),
    "a negative block id": (
        "make_block_table",
        changed("rows", to([[7, 2], [-5]])),
        IndexError,
        "rows[1][0] = -5: expected a block id from 0",
    ),
    "a row that outgrows its table": (
        "append_blocks",
        changed("new_blocks", to([[4], [1, 2]])),
        IndexError,
        "row 1 holds 1 blocks and gets 2 more: expected at most 2",
    ),
    "new blocks for another batch": (
        "append_blocks",
        changed("new_blocks", to([[4]])),
        ValueError,
        "new_blocks has 1 lists: expected 2, one for each row",
    ),
}

# what stands in a tensor: the reference always reads it, the twin if it is told to
CONTENTS: dict[str, Case] = {
    "a slot past the cache": (
        "reshape_and_cache",
        put("slot_mapping", 3, 48),
        IndexError,
        "slot_mapping[3] = 48 is outside the cache: expected -1 (do not store) or"
        " 0 <= slot < 48",
    ),
    "two tokens for one slot": (
        "reshape_and_cache",
        put("slot_mapping", 3, 40),
        ValueError,
        "slot_mapping[3] = 40 is also slot_mapping[2]: expected one token a slot",
    ),
    "a block id past the cache": (
        "paged_attention",
        put("block_table", (1, 0), 10**6),
        IndexError,
        "block_table[1, 0] = 1000000 is outside the cache: expected 0 <= block id < 10",
    ),
    "a negative block id": (
        "paged_attention",
        put("block_table", (0, 1), -1),
        IndexError,
        "block_table[0, 1] = -1 is outside the cache: expected 0 <= block id < 10",
    ),
    "a sequence longer than its row": (
        "paged_attention",
        put("seq_lens", 1, 49),
        IndexError,
        "seq_lens[1] = 49: expected 0 to 48, what 3 blocks of 16 hold",
    ),
    "a query longer than its sequence": (
        "paged_attention",
        put("seq_lens", 0, 2),
        ValueError,
        "request 0 has 3 queries on 2 keys and is causal: expected its queries to be the"
        " last tokens of its sequence",
    ),
    "a query longer than the bound": (
        "paged_attention",
        changed("max_query_len", to(2)),
        ValueError,
        "request 0 has 3 new tokens: expected at most max_query_len = 2",
    ),
    "a sequence longer than the bound": (
        "paged_attention",
        changed("max_seq_len", to(19)),
        ValueError,
        "seq_lens[0] = 20: expected at most max_seq_len = 19",
    ),
    "starts that fall": (
        "paged_attention",
        put("query_start_loc", 1, 5),
        ValueError,
        "query_start_loc[2] = 4 is less than query_start_loc[1] = 5",
    ),
    "starts past the tokens": (
        "paged_attention",
        put("query_start_loc", 2, 5),
        ValueError,
        "query_start_loc[2] = 5: expected at most 4, the tokens there are",
    ),
    "starts that do not begin at 0": (
        "paged_attention",
        put("query_start_loc", 0, 1),
        ValueError,
        "query_start_loc[0] = 1: expected 0",
    ),
    "a gather from outside the cache": (
        "gather_cache",
        put("block_table", (0, 0), 10),
        IndexError,
        "block_table[0, 0] = 10 is outside the cache: expected 0 <= block id < 10",
    ),
    "a gather past its rows": (
        "gather_cache",
        lambda a: a.update(
            seq_start_loc=a["seq_start_loc"].new_tensor([0, 0, 49]), num_tokens=49
        ),
        IndexError,
        "seq_lens[1] = 49: expected 0 to 48",
    ),
    "new tokens past their row": (
        "compute_slot_mapping_device",
        put("num_computed_tokens", 0, 8),
        IndexError,
        "request 0 has 8 + 1 tokens but its row of the block table holds 2 blocks of 4",
    ),
    "a negative count": (
        "compute_slot_mapping_device",
        put("num_computed_tokens", 1, -1),
        ValueError,
        "num_computed_tokens[1] = -1: expected at least 0",
    ),
}


def snapshot(arguments: Arguments) -> dict[str, torch.Tensor]:
    """Return the bytes of every tensor among the arguments."""
    found = {}
    for name, value in arguments.items():
        for place, each in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(each, torch.Tensor) and each.device.type != "meta":
                found[f"{name}[{place}]"] = bits(each).clone()
    return found


def refused(case: Case, twin: Twin, device: torch.device) -> None:
    """Assert that the case raises its error, and that no byte of its arguments changed."""
    operation, spoil, error, words = case
    arguments = GOOD[operation](device)
    spoil(arguments)
    before = snapshot(arguments)
    with pytest.raises(error, match=re.escape(words)) as caught:
        getattr(twin.raw, operation)(**arguments)
    assert type(caught.value) is error
    after = snapshot(arguments)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("operation", GOOD)
def test_the_good_arguments_are_taken(
    operation: str, twin: Twin, device: torch.device, checked_values: None
) -> None:
    """Else a refusal below would prove nothing."""
    getattr(twin, operation)(**GOOD[operation](device))


@pytest.mark.parametrize("what", ALWAYS)
def test_always_refused(what: str, twin: Twin, device: torch.device) -> None:
    refused(ALWAYS[what], twin, device)


@pytest.mark.parametrize("what", CONTENTS)
def test_refused_where_contents_are_read(
    what: str, twin: Twin, device: torch.device, checked_values: None
) -> None:
    refused(CONTENTS[what], twin, device)


def test_the_reference_reads_contents_without_being_told(
    reference: Twin, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PAGETWIN_CHECK_VALUES", raising=False)
    assert not values_checked()
    for case in CONTENTS.values():
        refused(case, reference, device)


@pytest.mark.parametrize(("setting", "read"), [("1", True), ("0", False), ("", False)])
def test_the_twin_reads_contents_only_when_told(
    setting: str, read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading stops the host and is illegal while a graph is captured."""
    monkeypatch.setenv("PAGETWIN_CHECK_VALUES", setting)
    assert values_checked() == read


@pytest.mark.parametrize("name", ["block_table", "slot_mapping", "query_start_loc"])
def test_a_tensor_of_another_rank_is_refused_by_name(
    name: str, twin: Twin, device: torch.device
) -> None:
    """A flat table once failed as "not enough values to unpack", which names nothing."""
    good = write if name == "slot_mapping" else attention
    operation = "reshape_and_cache" if name == "slot_mapping" else "paged_attention"
    arguments = good(device)
    tensor = arguments[name]
    arguments[name] = tensor[0] if name == "block_table" else tensor[None]
    with pytest.raises(ValueError, match=f"{name} has shape"):
        getattr(twin.raw, operation)(**arguments)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_the_twin_says_what_only_the_reference_takes(
    dtype: torch.dtype, device: torch.device
) -> None:
    from conftest import TWINS

    arguments = attention(device)
    with pytest.raises(NotImplementedError, match="the reference takes any"):
        TWINS["optimized"].raw.paged_attention(
            compute_dtype=dtype, **pack_options(**arguments)
        )
    for name in ("query", "key_cache", "value_cache", "out"):
        arguments[name] = arguments[name].double()
    with pytest.raises(NotImplementedError, match=r"float64: .*the reference takes"):
        TWINS["optimized"].raw.paged_attention(**pack_options(**arguments))
    TWINS["reference"].raw.paged_attention(**pack_options(**arguments))


def test_a_head_too_large_for_the_kernel_is_refused(device: torch.device) -> None:
    from conftest import TWINS

    plan = Plan((1,), (2,), kv_heads=1, group=1, head_size=1025, block_size=2)
    batch = build(plan, device)
    words = "head_size = 1025 is more than this kernel takes in torch.float32 on"
    with pytest.raises(NotImplementedError, match=re.escape(words)):
        TWINS["optimized"].raw.paged_attention(**batch.arguments())
    TWINS["reference"].raw.paged_attention(**batch.arguments())


SPEC = KVCacheSpec(16, 2, 64, torch.float16)


def test_a_backend_that_can_run_is_returned(device: torch.device) -> None:
    for name in ("REFERENCE", "TRITON", "XFORMERS"):
        assert get_attn_backend(name, SPEC, device) is load_backend(name)
        assert load_backend(name).get_name() == name


@pytest.mark.parametrize(
    ("name", "spec", "why", "able"),
    [
        ("XFORMERS", KVCacheSpec(24, 2, 64, torch.float16), "block_size = 24", True),
        ("XFORMERS", KVCacheSpec(16, 2, 20, torch.float16), "head_size = 20", True),
        ("XFORMERS", KVCacheSpec(16, 2, 64, torch.float32), "torch.float32", True),
        ("TRITON", KVCacheSpec(16, 2, 1025, torch.float16), "head_size = 1025", False),
        ("TRITON", KVCacheSpec(16, 2, 64, torch.float64), "torch.float64", False),
    ],
)
def test_a_backend_that_cannot_run_says_why_and_what_can(
    name: str, spec: KVCacheSpec, why: str, able: bool, device: torch.device
) -> None:
    with pytest.raises(ValueError, match=re.escape(why)) as caught:
        get_attn_backend(name, spec, device)
    message = str(caught.value)
    assert message.startswith(f"backend {name} cannot run here: ")
    assert message.endswith(f"What can: REFERENCE{', TRITON' if able else ''}")


def test_an_unknown_backend_is_refused(device: torch.device) -> None:
    words = "backend = 'FLASH': expected one of REFERENCE, TRITON, XFORMERS"
    with pytest.raises(ValueError, match=words):
        get_attn_backend("FLASH", SPEC, device)


def test_xformers_is_never_replaced_silently(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it cannot be imported, asking for it is an error that says what fits."""
    from pagetwin.optimized.launch import xformers_split_k as _xformers

    monkeypatch.setitem(__import__("sys").modules, "xformers", None)
    _xformers.why_no_xformers.cache_clear()
    try:
        with pytest.raises(ValueError, match="xFormers cannot be imported") as caught:
            get_attn_backend("XFORMERS", SPEC, device)
        assert "expected xformers 0.0.35" in str(caught.value)
        assert str(caught.value).endswith("What can: REFERENCE, TRITON")
    finally:
        monkeypatch.undo()
        _xformers.why_no_xformers.cache_clear()
    assert not _xformers.why_no_xformers()


@pytest.mark.parametrize("name", ["REFERENCE", "TRITON", "XFORMERS"])
def test_a_layer_whose_heads_do_not_divide_is_refused(name: str) -> None:
    words = "num_heads = 6 is not a multiple of num_kv_heads = 4"
    with pytest.raises(ValueError, match=words):
        load_backend(name).get_impl_cls()(6, 64, 1.0, 4)


def test_a_layer_of_an_unsupported_head_size_is_refused() -> None:
    words = "head_size = 20: expected a multiple of 8 from 32 to 256; the TRITON"
    with pytest.raises(ValueError, match=words):
        load_backend("XFORMERS").get_impl_cls()(4, 20, 1.0, 4)
