"""Does every query of a chunked layer see exactly the keys of its chunk?"""

import dataclasses
import math
from random import Random
from typing import Any

import pytest
import torch
from conftest import TWINS, Twin
from hypothesis import given
from hypothesis import strategies as st
from pagetwin.contract.budgets import judge_rows
from pagetwin.contract.metadata_classes import CommonAttentionMetadata

GARBAGE = 10**6


def step(seed: int, block_size: int, device: torch.device) -> CommonAttentionMetadata:
    """Return a batch of decodes, prompts, idle and padding requests with scattered blocks."""
    pick = Random(seed)
    seq_lens = [
        pick.choice([0, 1, 3, 4, 8, 9, 23, 31]) for _ in range(pick.randint(0, 5))
    ]
    query_lens = [pick.choice([0, min(1, n), n, n // 2]) for n in seq_lens]
    needed = [-(-n // block_size) for n in seq_lens]
    width = max(needed, default=0) + pick.choice([0, 0, 3])
    blocks = pick.sample(range(1, 400), 200)
    rows = [[blocks.pop() for _ in range(n)] for n in needed]
    common = TWINS["reference"].build_common_attn_metadata(
        query_lens=query_lens,
        num_computed_tokens=[n - q for n, q in zip(seq_lens, query_lens, strict=True)],
        block_rows=rows,
        block_size=block_size,
        device=device,
    )
    table = torch.full((len(rows), width), GARBAGE, dtype=torch.int32)
    for req, row in enumerate(rows):
        table[req, : len(row)] = torch.tensor(row, dtype=torch.int32)
    return common.replace(block_table_tensor=table.to(device))


def seen(
    common: CommonAttentionMetadata, block_size: int
) -> list[set[tuple[int, int]]]:
    """Return for each new token the keys it sees, as block and offset: the plain reading."""
    starts, lens = common.query_start_loc.tolist(), common.seq_lens.tolist()
    table = common.block_table_tensor.tolist()
    keys = []
    for req, seq_len in enumerate(lens):
        query_len = starts[req + 1] - starts[req]
        for query in range(query_len):
            visible = range(seq_len - query_len + query + 1)
            keys.append(
                {(table[req][p // block_size], p % block_size) for p in visible}
            )
    return keys


def chunk_mask(
    common: CommonAttentionMetadata, chunk: int, block_size: int
) -> list[set[tuple[int, int]]]:
    """Return the same for a dense mask: same chunk, and not behind the query."""
    starts, lens = common.query_start_loc.tolist(), common.seq_lens.tolist()
    table = common.block_table_tensor.tolist()
    keys = []
    for req, seq_len in enumerate(lens):
        query_len = starts[req + 1] - starts[req]
        for position in range(seq_len - query_len, seq_len):
            visible = [
                p
                for p in range(seq_len)
                if p // chunk == position // chunk and p <= position
            ]
            keys.append(
                {(table[req][p // block_size], p % block_size) for p in visible}
            )
    return keys


def fields_of(common: CommonAttentionMetadata) -> dict[str, Any]:
    return {
        each.name: getattr(common, each.name).clone()
        if isinstance(getattr(common, each.name), torch.Tensor)
        else getattr(common, each.name)
        for each in dataclasses.fields(common)
    }


def assert_same_fields(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, other[name]), name
            assert value.dtype == other[name].dtype, name
        else:
            assert value == other[name], name


@given(
    seed=st.integers(0, 2**16),
    block_size=st.sampled_from([1, 2, 4]),
    blocks=st.sampled_from([1, 2, 3]),
)
def test_virtual_requests_see_what_the_chunk_mask_shows(
    seed: int, block_size: int, blocks: int, twin: Twin, device: torch.device
) -> None:
    common = step(seed, block_size, device)
    before = fields_of(common)
    chunk = block_size * blocks
    chunked = twin.make_local_attention_virtual_batches(chunk, common, block_size)
    assert_same_fields(fields_of(common), before)
    assert seen(chunked, block_size) == chunk_mask(common, chunk, block_size)
    query_lens = chunked.query_start_loc_cpu.diff()
    assert chunked.max_query_len == max(query_lens.tolist(), default=0)
    assert chunked.max_seq_len == max(chunked.seq_lens_cpu.tolist(), default=0)
    assert chunked.num_reqs == len(chunked.seq_lens) == len(chunked.block_table_tensor)
    assert torch.equal(
        chunked.num_computed_tokens_cpu, chunked.seq_lens_cpu - query_lens
    )
    assert torch.equal(chunked.seq_lens.cpu(), chunked.seq_lens_cpu)
    assert torch.equal(chunked.query_start_loc.cpu(), chunked.query_start_loc_cpu)
    assert chunked.block_table_tensor.shape[1] == blocks


@given(seed=st.integers(0, 2**16), block_size=st.sampled_from([1, 2, 4]))
def test_both_twins_make_the_same_virtual_requests(
    seed: int, block_size: int, device: torch.device
) -> None:
    common = step(seed, block_size, device)
    one, other = (
        each.make_local_attention_virtual_batches(2 * block_size, common, block_size)
        for each in TWINS.values()
    )
    assert_same_fields(fields_of(one), fields_of(other))


def test_a_padding_request_has_no_keys(twin: Twin, device: torch.device) -> None:
    """vLLM gives it a whole chunk of keys, read from the wrong end of its row."""
    common = twin.build_common_attn_metadata(
        [2, 0, 0], [1, 0, 5], [[7, 2], [], [5, 9, 4]], block_size=2, device=device
    )
    chunked = twin.make_local_attention_virtual_batches(4, common, 2)
    assert chunked.seq_lens.tolist() == [3, 0, 1]
    assert chunked.query_start_loc.tolist() == [0, 2, 2, 2]
    assert chunked.block_table_tensor[2, 0] == 4


def test_attention_over_virtual_requests_is_chunked_attention(
    twin: Twin, device: torch.device
) -> None:
    """Against a softmax over a dense mask; the key before each chunk outweighs all others."""
    block_size, chunk, seq_len, query_len = 4, 8, 21, 15
    rows = [[3, 0, 5, 1, 2, 4]]
    common = twin.build_common_attn_metadata(
        [query_len], [seq_len - query_len], rows, block_size, device
    )
    torch.manual_seed(0)
    keys, values = torch.randn(2, seq_len, 1, 16).to(device)
    keys[[7, 15]] = 9.0
    query = torch.rand(query_len, 1, 16).to(device)
    cache = torch.full((2, 6, block_size, 1, 16), math.nan, device=device)
    slots = twin.compute_slot_mapping_batch([seq_len], [0], rows, block_size)
    slots = slots.to(device)
    twin.reshape_and_cache(keys, values, cache[0], cache[1], slots)
    chunked = twin.make_local_attention_virtual_batches(chunk, common, block_size)
    found = twin.paged_attention(
        query,
        cache[0],
        cache[1],
        chunked.block_table_tensor,
        chunked.query_start_loc,
        chunked.seq_lens,
        chunked.max_query_len,
        chunked.max_seq_len,
    )
    query_at = torch.arange(seq_len - query_len, seq_len)[:, None]
    key_at = torch.arange(seq_len)
    mask = (query_at // chunk == key_at // chunk) & (key_at <= query_at)
    exact, same, sizes = (
        (query[:, 0].to(dtype) @ keys[:, 0].to(dtype).T / 4)
        .masked_fill(~mask.to(device), -math.inf)
        .softmax(1)
        @ averaged[:, 0].to(dtype)
        for dtype, averaged in (
            (torch.float64, values),
            (torch.float32, values),
            (torch.float64, values.abs()),
        )
    )
    verdict = judge_rows(found[:, 0], exact, same, torch.float32, sizes)
    assert verdict.ok, verdict


REWRITTEN = {
    "query_start_loc",
    "query_start_loc_cpu",
    "seq_lens",
    "seq_lens_cpu",
    "num_computed_tokens_cpu",
    "num_reqs",
    "max_query_len",
    "max_seq_len",
    "block_table_tensor",
    "causal",
    "is_prefilling",
}
LEFT_OUT = {
    "encoder_seq_lens",
    "encoder_seq_lens_cpu",
    "max_encoder_seq_len",
    "encoder_query_start_loc",
    "encoder_query_start_loc_cpu",
    "cross_block_table_tensor",
    "cross_slot_mapping",
    "dcp_local_seq_lens",
    "dcp_local_seq_lens_cpu",
}
REFUSED = {"mm_req_doc_ranges", "tree_mask"}
KEPT = {
    "num_actual_tokens",
    "slot_mapping",
    "logits_indices_padded",
    "num_logits_indices",
    "max_logits_per_req",
    "positions",
}


def test_no_field_of_the_step_is_forgotten(twin: Twin) -> None:
    """Each one is counted anew, left out, refused or kept as it is."""
    names = {each.name for each in dataclasses.fields(CommonAttentionMetadata)}
    assert names == REWRITTEN | LEFT_OUT | REFUSED | KEPT
    two = torch.tensor([3, 3], dtype=torch.int32)
    common = twin.build_common_attn_metadata(
        [4, 1], [2, 0], [[7, 2, 5], [1]], 2
    ).replace(
        is_prefilling=torch.tensor([True, False]),
        causal=torch.tensor([False, True]),
        positions=torch.arange(5),
        logits_indices_padded=torch.tensor([3, 4]),
        num_logits_indices=2,
        max_logits_per_req=1,
        **dict.fromkeys(LEFT_OUT, two),
    )
    chunked = twin.make_local_attention_virtual_batches(4, common, 2)
    assert chunked.is_prefilling.tolist() == [True, True, False]
    assert chunked.causal.tolist() == [False, False, True]
    assert all(getattr(chunked, name) is None for name in LEFT_OUT)
    assert all(getattr(chunked, name) is getattr(common, name) for name in KEPT)


@pytest.mark.parametrize(
    ("chunk", "block_size", "change", "error", "words"),
    [
        (4, 0, {}, ValueError, "block_size = 0: expected at least 1"),
        (0, 2, {}, ValueError, "attn_chunk_size = 0"),
        (
            6,
            4,
            {},
            ValueError,
            "attn_chunk_size = 6 is not a multiple of block_size = 4",
        ),
        (2, 1, {}, IndexError, r"seq_lens\[0\] = 6: expected at most 3"),
        (4, 2, {"mm_req_doc_ranges": {0: [(1, 3)]}}, NotImplementedError, "mm_req_doc"),
        (4, 2, {"tree_mask": torch.ones(1, 4, 4)}, NotImplementedError, "tree_mask"),
        (
            4,
            2,
            {"seq_lens_cpu": torch.tensor([3], dtype=torch.int32)},
            ValueError,
            "request 0 has 4 new tokens",
        ),
    ],
)
def test_chunks_that_cannot_be_are_refused(
    chunk: int,
    block_size: int,
    change: dict[str, Any],
    error: type[Exception],
    words: str,
    twin: Twin,
) -> None:
    common = twin.build_common_attn_metadata([4], [2], [[7, 2, 5]], 2).replace(**change)
    with pytest.raises(error, match=words):
        twin.raw.make_local_attention_virtual_batches(chunk, common, block_size)
