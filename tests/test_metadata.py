"""Does a step's metadata say what its requests say?"""

from dataclasses import fields
from typing import Any

import torch
from conftest import Twin
from hypothesis import given
from hypothesis import strategies as st
from pagetwin.shared.metadata_classes import CommonAttentionMetadata
from pagetwin.shared.selector import TWIN_OF_BACKEND, load_backend
from pagetwin.shared.specs import KVCacheSpec
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
        if own.start >= own.stop:
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
        decodes = own.start == 0 and num_decodes > 0
        count, tokens = own.stop - own.start, alone.num_actual_tokens
        assert (part.num_decodes, part.num_prefills) == (
            (count, 0) if decodes else (0, count)
        )
        assert (part.num_decode_tokens, part.num_prefill_tokens) == (
            (tokens, 0) if decodes else (0, tokens)
        )
