"""Do the last layers compute what they would have, on the tokens that are wanted?"""

import dataclasses
from random import Random
from typing import Any

import pytest
import torch
from conftest import TWINS, Twin
from hypothesis import given, settings
from hypothesis import strategies as st
from pagetwin.contract.attention_options import pack_options
from pagetwin.contract.budgets import judge_rows
from pagetwin.contract.fast_prefill_metadata import (
    KV_SHARING_FAST_PREFILL_METADATA_FIELDS,
    KVSharingFastPrefillMetadata,
)
from pagetwin.contract.metadata_classes import CommonAttentionMetadata
from pagetwin.contract.operations import load_implementation
from pagetwin.contract.specs import KVCacheSpec
from pagetwin.engine.backend_interface import AttentionBackend
from torch import Tensor

BLOCK_SIZE = 4
EACH_BACKEND = [
    (name, backend)
    for name in TWINS
    for backend in load_implementation(name).backends
    if backend.name in ("REFERENCE", "TRITON")
]


def step(
    seed: int, device: torch.device
) -> tuple[CommonAttentionMetadata, list[int], list[int]]:
    """Return a batch, decodes first, with the logits of each request and the wanted tokens."""
    pick = Random(seed)
    decodes, prefills = pick.randint(0, 2), pick.randint(0, 3)
    query_lens = [1] * decodes + [pick.randint(2, 9) for _ in range(prefills)]
    computed = [pick.randint(0, 9) for _ in query_lens]
    counts = [pick.randint(0, min(3, n)) for n in query_lens]
    blocks = iter(pick.sample(range(64), 64))
    rows = [
        [next(blocks) for _ in range(-(-(a + b) // BLOCK_SIZE))]
        for a, b in zip(query_lens, computed, strict=True)
    ]
    common = TWINS["reference"].build_common_attn_metadata(
        query_lens, computed, rows, BLOCK_SIZE, device
    )
    ends = common.query_start_loc_cpu[1:].tolist()
    wanted = [
        token
        for end, count in zip(ends, counts, strict=True)
        for token in range(end - count, end)
    ]
    padding = [10**6] * pick.randint(0, 3)
    indices = torch.tensor(wanted + padding, dtype=torch.int64, device=device)
    changed = common.replace(
        logits_indices_padded=indices,
        num_logits_indices=len(wanted),
        positions=torch.arange(100, 100 + common.num_actual_tokens, device=device),
    )
    return changed, counts, wanted


@given(seed=st.integers(0, 2**16))
def test_each_request_brings_as_many_queries_as_it_has_logits(
    seed: int, twin: Twin, device: torch.device
) -> None:
    common, counts, wanted = step(seed, device)
    before = {
        each.name: getattr(common, each.name) for each in dataclasses.fields(common)
    }
    copies = {k: v.clone() for k, v in before.items() if isinstance(v, torch.Tensor)}
    fast = twin.make_kv_sharing_fast_prefill_common_attn_metadata(common)
    for name, copy in copies.items():
        assert torch.equal(before[name], copy), name
    if common.max_query_len <= 1:
        assert fast is common
        return
    assert fast.query_start_loc_cpu.diff().tolist() == counts
    assert fast.query_start_loc_cpu.dtype == torch.int32
    assert torch.equal(fast.query_start_loc.cpu(), fast.query_start_loc_cpu)
    assert fast.query_start_loc.device.type == device.type
    assert fast.num_actual_tokens == sum(counts)
    assert fast.max_query_len == max(counts, default=0)
    assert fast.positions.tolist() == [100 + token for token in wanted]


REWRITTEN = {
    "query_start_loc",
    "query_start_loc_cpu",
    "num_actual_tokens",
    "max_query_len",
    "positions",
}
REFUSED = {"tree_mask"}
LEFT_OUT = {"logits_indices_padded", "num_logits_indices", "max_logits_per_req"}
KEPT = {
    "seq_lens",
    "seq_lens_cpu",
    "num_computed_tokens_cpu",
    "num_reqs",
    "max_seq_len",
    "block_table_tensor",
    "slot_mapping",
    "causal",
    "encoder_seq_lens",
    "encoder_seq_lens_cpu",
    "max_encoder_seq_len",
    "encoder_query_start_loc",
    "encoder_query_start_loc_cpu",
    "cross_block_table_tensor",
    "cross_slot_mapping",
    "dcp_local_seq_lens",
    "dcp_local_seq_lens_cpu",
    "is_prefilling",
    "mm_req_doc_ranges",
}


def wanting(query_lens: list[int], logits: list[int], **more: Any) -> Any:
    common = TWINS["reference"].build_common_attn_metadata(
        query_lens, [0] * len(query_lens), [[n] for n in range(len(query_lens))], 16
    )
    return common.replace(
        logits_indices_padded=torch.tensor(logits, dtype=torch.int64),
        num_logits_indices=len(logits),
        **more,
    )


def test_no_field_of_the_step_is_forgotten(twin: Twin) -> None:
    """Each one is counted anew, left out, refused, or still true as it is."""
    names = {each.name for each in dataclasses.fields(CommonAttentionMetadata)}
    assert names == REWRITTEN | LEFT_OUT | REFUSED | KEPT
    more = dict.fromkeys(
        ("encoder_seq_lens", "dcp_local_seq_lens"), torch.ones(2, dtype=torch.int32)
    )
    common = wanting([4, 3], [3, 6], max_logits_per_req=1, **more)
    fast = twin.make_kv_sharing_fast_prefill_common_attn_metadata(common)
    assert all(getattr(fast, name) is None for name in LEFT_OUT)
    assert all(getattr(fast, name) is getattr(common, name) for name in KEPT)


@pytest.mark.parametrize(
    ("logits", "words"),
    [
        ([3, 5], r"logits_indices_padded\[1\] = 5: expected 6"),
        ([6, 3], r"logits_indices_padded\[0\] = 6: expected 3"),
        ([3, 3], r"logits_indices_padded\[0\] = 3: expected 2"),
    ],
)
def test_logits_of_other_tokens_than_the_last_are_refused(
    logits: list[int], words: str, twin: Twin
) -> None:
    """vLLM counts them, and causal attention then takes them for the last tokens."""
    with pytest.raises(ValueError, match=words):
        twin.make_kv_sharing_fast_prefill_common_attn_metadata(wanting([4, 3], logits))


@pytest.mark.parametrize("token", [-1, 7])
def test_a_token_outside_the_step_is_refused(token: int, twin: Twin) -> None:
    common = wanting([4, 3], [3, token])
    with pytest.raises(IndexError, match=rf"\[1\] = {token}: expected 0 <= index < 7"):
        twin.make_kv_sharing_fast_prefill_common_attn_metadata(common)


def test_a_step_that_names_no_logits_is_refused(twin: Twin) -> None:
    make = twin.make_kv_sharing_fast_prefill_common_attn_metadata
    common = wanting([4, 3], [3, 6])
    with pytest.raises(ValueError, match="logits_indices_padded = None"):
        make(common.replace(logits_indices_padded=None))
    with pytest.raises(ValueError, match="num_logits_indices = None"):
        make(common.replace(num_logits_indices=None))
    with pytest.raises(ValueError, match="num_logits_indices = 3: expected 0 to 2"):
        make(common.replace(num_logits_indices=3))
    with pytest.raises(NotImplementedError, match="tree_mask is given: expected None"):
        make(common.replace(tree_mask=torch.ones(2, 4, 4, dtype=torch.bool)))


@pytest.mark.parametrize(("name", "backend"), EACH_BACKEND, ids=str)
@settings(max_examples=15)
@given(seed=st.integers(0, 2**16))
def test_the_wanted_tokens_attend_as_in_the_whole_step(
    name: str, backend: type[AttentionBackend], seed: int, device: torch.device
) -> None:
    """The needle: a request's last key outweighs all others, and only its last query sees it."""
    common, _, wanted = step(seed, device)
    twin = TWINS[name]
    fast = twin.create_fast_prefill_custom_backend("FastPrefill", backend)
    spec = KVCacheSpec(block_size=16, num_kv_heads=1, head_size=16, dtype=torch.float32)
    whole, part = (
        each.get_builder_cls()(spec, ["layer"], device).build(0, common)
        for each in (backend, fast)
    )
    assert isinstance(part, fast.get_metadata_cls())
    assert isinstance(part, KVSharingFastPrefillMetadata)
    assert not isinstance(whole, KVSharingFastPrefillMetadata)
    assert part.logits_indices_padded is common.logits_indices_padded
    assert part.num_logits_indices == len(wanted)
    torch.manual_seed(seed)
    cache = torch.randn(2, 64, BLOCK_SIZE, 1, 16, device=device)
    for table, seq_len in zip(
        common.block_table_tensor.tolist(), common.seq_lens.tolist(), strict=True
    ):
        last = seq_len - 1
        cache[0, table[last // BLOCK_SIZE], last % BLOCK_SIZE] = 9
    query = torch.rand(common.num_actual_tokens, 1, 16, device=device)

    def attend(by: Twin, rows: Tensor, metadata: Any, **more: Any) -> Tensor:
        attended: Tensor = by.paged_attention(
            rows,
            cache[0],
            more.pop("values", cache[1]),
            metadata.block_table,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.max_query_len,
            metadata.max_seq_len,
            **pack_options(**more),
        )
        return attended

    kept = wanted if common.max_query_len > 1 else slice(None)
    some = attend(twin, query[kept], part)
    double = {"out": query.double(), "compute_dtype": torch.float64}
    exact, same, sizes = (
        attend(TWINS["reference"], query, whole, **more)[kept]
        for more in (
            double,
            {},
            {"values": cache[1].abs()},
        )
    )
    verdict = judge_rows(some, exact, same, torch.float32, sizes)
    assert verdict.ok, verdict


def test_a_derived_backend_differs_in_its_builder_alone(twin: Twin) -> None:
    backend = load_implementation(twin.name).backends[0]
    other = type("Other", (backend.get_builder_cls(),), {})
    made = twin.subclass_attention_backend("My", backend, other)
    assert made.__name__ == f"My{backend.__name__}" and made.__bases__ == (backend,)
    assert made.get_builder_cls() is made().get_builder_cls() is other
    assert backend.get_builder_cls() is not other
    assert made.get_impl_cls() is backend.get_impl_cls()
    assert made is not twin.subclass_attention_backend("My", backend, other)


def test_derived_metadata_is_a_dataclass_like_its_parent(twin: Twin) -> None:
    backend = load_implementation(twin.name).backends[0]
    parent = backend.get_metadata_cls()
    made = twin.subclass_attention_metadata(
        "Fast", parent, KV_SHARING_FAST_PREFILL_METADATA_FIELDS
    )
    names = [each.name for each in dataclasses.fields(parent)]
    added = [name for name, _, _ in KV_SHARING_FAST_PREFILL_METADATA_FIELDS]
    assert [each.name for each in dataclasses.fields(made)] == names + added
    built = made(**dict.fromkeys(names))
    assert isinstance(built, parent) and built.num_logits_indices is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        built.num_logits_indices = 3
    again = twin.subclass_attention_metadata("More", made, [("num_decodes", int, 7)])
    assert [each.name for each in dataclasses.fields(again)] == names + added
    assert again(**dict.fromkeys(set(names) - {"num_decodes"})).num_decodes == 7
    with pytest.raises(ValueError, match="mutable default"):
        twin.subclass_attention_metadata("Bad", parent, [("images", list, [])])


def test_a_part_of_fast_metadata_still_knows_its_logits() -> None:
    for name, backend in EACH_BACKEND:
        fast = TWINS[name].create_fast_prefill_custom_backend("Fast", backend)
        spec = KVCacheSpec(
            block_size=16, num_kv_heads=1, head_size=16, dtype=torch.float32
        )
        common = wanting([1, 3], [0, 2, 3])
        built = fast.get_builder_cls()(spec, ["layer"], "cpu").build(0, common)
        assert built.prefill_metadata.num_logits_indices == 3
        assert built.decode_metadata.num_actual_tokens == 1
