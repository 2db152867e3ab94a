"""Does a step's metadata say what its requests say?"""

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import Twin
from hypothesis import given
from hypothesis import strategies as st
from pagetwin.contract.metadata_classes import CommonAttentionMetadata
from pagetwin.contract.specs import KVCacheSpec
from pagetwin.engine.selector import TWIN_OF_BACKEND, load_backend
from test_slot_mapping import by_hand, steps
from torch import Tensor

Step = tuple[int, list[int], list[int], list[list[int]]]


def assert_says(metadata: object, expected: dict[str, Any]) -> None:
    """Assert that every field of a dataclass equals what is expected, dtype included."""
    assert {field.name for field in fields(metadata)} == set(expected)
    for name, value in expected.items():
        found = getattr(metadata, name)
        if isinstance(value, Tensor):
            assert found.dtype == value.dtype, name
            assert found.shape == value.shape, name
            assert torch.equal(found.cpu(), value), name
        else:
            assert found == value and type(found) is type(value), name


@given(step=steps())
def test_every_field_is_what_the_requests_say(
    step: Step, twin: Twin, device: torch.device
) -> None:
    block_size, query_lens, computed, rows = step

    def counts(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    starts = counts([sum(query_lens[:req]) for req in range(len(rows) + 1)])
    seq_lens = [new + old for new, old in zip(query_lens, computed, strict=True)]
    width = max(map(len, rows), default=0)
    table = [[*row, *[0] * (width - len(row))] for row in rows]
    metadata = twin.build_common_attn_metadata(
        query_lens, computed, rows, block_size, device
    )
    expected = {
        "query_start_loc": starts,
        "query_start_loc_cpu": starts,
        "seq_lens": counts(seq_lens),
        "seq_lens_cpu": counts(seq_lens),
        "num_computed_tokens_cpu": counts(computed),
        "num_reqs": len(rows),
        "num_actual_tokens": sum(query_lens),
        "max_query_len": max(query_lens, default=0),
        "max_seq_len": max(seq_lens, default=0),
        "block_table_tensor": counts(table).view(len(rows), width),
        "slot_mapping": torch.tensor(
            by_hand(block_size, query_lens, computed, rows), dtype=torch.int64
        ),
        "causal": True,
    }
    # what a step has only if somebody sets it
    expected |= {
        field.name: None
        for field in fields(CommonAttentionMetadata)
        if field.default is None
    }
    assert_says(metadata, expected)
    for field in fields(CommonAttentionMetadata):
        value = getattr(metadata, field.name)
        if isinstance(value, Tensor):
            here = "cpu" if field.name.endswith("_cpu") else device.type
            assert value.device.type == here, field.name


def test_later_steps_do_not_change_an_earlier_one(
    twin: Twin, device: torch.device
) -> None:
    """A buffer reused while a step was still in flight once gave it the next step's slots."""
    steps = [
        twin.build_common_attn_metadata([req + 1], [0], [[req]], 16, device)
        for req in range(8)
    ]
    for req, step in enumerate(steps):
        assert step.seq_lens.tolist() == [req + 1]
        assert step.slot_mapping.tolist() == [16 * req + i for i in range(req + 1)]


@given(
    news=st.lists(st.sampled_from([0, 1, 1, 2, 5, 17]), max_size=5),
    backend=st.sampled_from(sorted(TWIN_OF_BACKEND)),
    data=st.data(),
)
def test_both_parts_of_a_step_are_the_step(
    news: list[int],
    backend: str,
    data: st.DataObject,
    reference: Twin,
    device: torch.device,
) -> None:
    """Each part equals the metadata of its own requests, built from nothing."""
    news.sort(key=lambda new: new > 1)
    computed = [data.draw(st.integers(0, 40)) for _ in news]
    rows = [
        [data.draw(st.integers(0, 99)) for _ in range(-(-(new + old) // 16))]
        for new, old in zip(news, computed, strict=True)
    ]
    common = reference.build_common_attn_metadata(news, computed, rows, 16, device)
    spec = KVCacheSpec(16, 2, 32, torch.float16)
    builder = load_backend(backend).get_builder_cls()(spec, ["layer"], device)
    metadata = builder.build(0, common)
    assert isinstance(metadata, load_backend(backend).get_metadata_cls())
    num_decodes = sum(new <= 1 for new in news)
    assert metadata.num_decodes == num_decodes
    parts = (
        (metadata.decode_metadata, slice(0, num_decodes)),
        (metadata.prefill_metadata, slice(num_decodes, len(news))),
    )
    for part, own in parts:
        if own.start >= own.stop or (own.start == 0 and not sum(news[own])):
            assert part is None
            continue
        assert part is not None
        alone = reference.build_common_attn_metadata(
            news[own], computed[own], rows[own], 16, device
        )
        assert part.num_actual_tokens == alone.num_actual_tokens
        assert part.max_query_len == alone.max_query_len
        assert part.max_seq_len == alone.max_seq_len
        assert torch.equal(part.query_start_loc, alone.query_start_loc)
        assert torch.equal(part.query_start_loc_cpu, alone.query_start_loc_cpu)
        assert torch.equal(part.seq_lens, alone.seq_lens)
        assert torch.equal(part.seq_lens_cpu, alone.seq_lens_cpu)
        assert torch.equal(part.slot_mapping, alone.slot_mapping)
        width = alone.block_table_tensor.shape[1]
        assert torch.equal(part.block_table[:, :width], alone.block_table_tensor)
        # a part has no parts of its own
        assert (part.num_decodes, part.num_prefills) == (0, 0)
        assert (part.num_decode_tokens, part.num_prefill_tokens) == (0, 0)


# ---- metadata of every layer


def layers_of(
    twin: Twin,
    lens: list[int],
    spare: int,
    groups: list[list[str]],
    device: torch.device,
) -> tuple[dict[str, Any], list[Any]]:
    """Return the metadata of each layer, and each group's builder's arguments."""
    calls: list[Any] = []

    class Builder:
        def build(self, common_prefix_len: int, common: CommonAttentionMetadata) -> Any:
            calls.append((common_prefix_len, common))
            return SimpleNamespace(group=len(calls) - 1)

    def counts(values: list[int], where: torch.device | str = "cpu") -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=where)

    starts = [sum(lens[:req]) for req in range(len(lens) + 1)] + [-7] * spare
    seq_lens = [new + 3 for new in lens] + [-7] * spare
    tables = [
        counts([[group, req] for req in range(len(lens) + spare)], device)
        for group in range(len(groups))
    ]
    slots = [
        torch.arange(sum(lens) + spare, device=device) + 1000 * group
        for group in range(len(groups))
    ]
    metadata = twin.raw.build_attn_metadata(
        [Builder() for _ in groups],
        len(lens),
        sum(lens),
        counts(starts, device),
        counts(starts),
        counts(seq_lens, device),
        counts(seq_lens),
        counts([3] * len(lens) + [-7] * spare),
        tables,
        slots,
        groups,
    )
    return metadata, calls


@given(
    lens=st.lists(st.sampled_from([0, 1, 1, 4, 9]), min_size=1, max_size=5),
    spare=st.integers(0, 2),
    sizes=st.lists(st.integers(0, 3), max_size=3),
)
def test_layers_of_one_group_share_metadata_cut_to_the_batch(
    lens: list[int], spare: int, sizes: list[int], twin: Twin, device: torch.device
) -> None:
    """The largest start once stood in for the longest query, so that decodes looked long."""
    groups = [[f"{group}.{i}" for i in range(n)] for group, n in enumerate(sizes)]
    metadata, calls = layers_of(twin, lens, spare, groups, device)
    assert list(metadata) == [name for names in groups for name in names]
    for group, names in enumerate(groups):
        assert {metadata[name].group for name in names} <= {group}
        prefix, common = calls[group]
        assert prefix == 0
        starts = [sum(lens[:req]) for req in range(len(lens) + 1)]
        assert common.query_start_loc.tolist() == starts
        assert common.query_start_loc_cpu.tolist() == starts
        assert common.seq_lens.tolist() == [new + 3 for new in lens]
        assert common.seq_lens_cpu.tolist() == [new + 3 for new in lens]
        assert common.num_computed_tokens_cpu.tolist() == [3] * len(lens)
        assert (common.num_reqs, common.num_actual_tokens) == (len(lens), sum(lens))
        assert (common.max_query_len, common.max_seq_len) == (max(lens), max(lens) + 3)
        assert common.block_table_tensor.tolist() == [
            [group, req] for req in range(len(lens))
        ]
        assert common.slot_mapping.tolist() == [
            1000 * group + token for token in range(sum(lens))
        ]


def test_groups_without_their_parts_are_refused(twin: Twin) -> None:
    empty = torch.zeros(0, dtype=torch.int32)
    two = torch.tensor([0, 1], dtype=torch.int32)
    build = twin.raw.build_attn_metadata
    with pytest.raises(ValueError, match="num_reqs = 0: expected at least 1"):
        build([], 0, 0, empty, empty, empty, empty, empty, [], [], [])
    with pytest.raises(
        ValueError, match=r"seq_lens has shape \[0\]: expected at least"
    ):
        build([], 1, 1, two, two, empty, empty, two, [], [], [])
    with pytest.raises(
        IndexError, match="attn_metadata_builders has 0 entries: expected 1"
    ):
        build([], 1, 1, two, two, two, two, two, [], [], [["a"]])
    with pytest.raises(ValueError, match="group 0 has 1 rows and 0 slots: expected at"):
        slots = torch.zeros(0, dtype=torch.int64)
        build(
            [None],
            1,
            1,
            two,
            two,
            two,
            two,
            two,
            [two.view(2, 1)[:1]],
            [slots],
            [["a"]],
        )


# ---- methods of a step


@given(step=steps())
def test_a_step_tells_its_own_counts_on_the_device(
    step: Step, twin: Twin, device: torch.device
) -> None:
    block_size, query_lens, computed, rows = step
    common = twin.build_common_attn_metadata(
        query_lens, computed, rows, block_size, device
    )
    assert common.batch_size() == len(rows)
    assert common.naive_query_lens().tolist() == query_lens
    assert common.compute_num_computed_tokens().tolist() == computed
    assert common.compute_num_computed_tokens() is common.compute_num_computed_tokens()
    owners = [req for req, new in enumerate(query_lens) for _ in range(new)]
    assert common.token_to_req_indices().tolist() == owners
    padded = common.replace(num_actual_tokens=len(owners) + 2)
    assert padded.token_to_req_indices().tolist() == [*owners, len(rows), len(rows)]
    # a copy computes its own
    longer = common.replace(seq_lens=common.seq_lens + 1)
    assert longer.compute_num_computed_tokens().tolist() == [
        old + 1 for old in computed
    ]


@given(step=steps(), padding=st.integers(0, 3))
def test_padding_comes_off_as_it_went_on(step: Step, padding: int, twin: Twin) -> None:
    block_size, query_lens, computed, rows = step
    width = max(map(len, rows), default=0)
    filled = [*rows, *[[0] * width] * padding]
    common = twin.build_common_attn_metadata(
        query_lens + [0] * padding, computed + [0] * padding, filled, block_size
    )
    alone = twin.build_common_attn_metadata(query_lens, computed, rows, block_size)
    tokens = sum(query_lens)
    common = common.replace(
        slot_mapping=torch.cat([common.slot_mapping, torch.full((padding,), -1)]),
        positions=torch.arange(tokens + padding),
        is_prefilling=torch.ones(len(filled), dtype=torch.bool),
        mm_req_doc_ranges={req: [(0, 1)] for req in range(len(filled))},
    )
    left = common.unpadded(tokens, len(rows))
    expected = alone.replace(
        positions=torch.arange(tokens),
        is_prefilling=torch.ones(len(rows), dtype=torch.bool),
        mm_req_doc_ranges={req: [(0, 1)] for req in range(len(rows))},
    )
    assert_says(
        left, {each.name: getattr(expected, each.name) for each in fields(left)}
    )
    with pytest.raises(IndexError, match=r"num_actual_reqs = .* what there is"):
        common.unpadded(0, len(filled) + 1)
