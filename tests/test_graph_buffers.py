"""Does a refill leave the live batch in a captured step's buffers, and nothing else?"""

from dataclasses import fields
from random import Random
from typing import Any

import pytest
import torch
from captured_steps import (
    GARBAGE,
    LONGEST,
    decodes,
    int32,
    make_state,
    poison,
    tensors,
)
from conftest import Twin
from hypothesis import given
from hypothesis import strategies as st
from pagetwin.conformance.oracles.dense import same_bits
from pagetwin.contract.graph_classes import (
    CAPTURE_VALUES,
    GraphInputBuffers,
    buffer_names,
)


@st.composite
def refills(draw: st.DrawFn) -> dict[str, Any]:
    """Return sizes and a batch: buffers, a captured step, a batch in it, each no larger."""
    pick = Random(draw(st.integers(0, 2**20)))
    max_batch_size = pick.randint(1, 6)
    batch_size = pick.randint(1, max_batch_size)
    live = pick.randint(1, batch_size)
    max_blocks = pick.randint(1, 4)

    def lens() -> list[int]:
        return [pick.randint(1, LONGEST) for _ in range(live)]

    def table() -> list[list[int]]:
        width = pick.randint(1, max_blocks)
        return [[pick.randint(0, 99) for _ in range(width)] for _ in range(live)]

    encoder = pick.random() < 0.5
    return {
        "max_batch_size": max_batch_size,
        "batch_size": batch_size,
        "max_blocks": max_blocks,
        "encoder": encoder,
        "seq_lens": lens(),
        "tables": table(),
        "slots": [pick.randint(0, 999) for _ in range(live)],
        "encoder_numbers": (lens(), table()) if encoder else None,
    }


def filled(rows: list[Any], size: int, value: int, width: int | None) -> list[Any]:
    """Return rows lengthened to `size` and, if they are lists, widened to `width`."""
    if width is None:
        return rows + [value] * (size - len(rows))
    wide = [row + [value] * (width - len(row)) for row in rows]
    return wide + [[value] * width for _ in range(size - len(rows))]


@given(case=refills())
def test_a_refill_leaves_the_batch_in_front_and_nothing_else(
    twin: Twin, case: dict[str, Any]
) -> None:
    state = make_state(twin, case["encoder"], case["max_blocks"])
    batch = decodes(
        case["seq_lens"], case["tables"], case["slots"], case["encoder_numbers"]
    )
    before = {name: each.clone() for name, each in tensors(batch).items()}
    size = case["batch_size"]
    with state.graph_capture(case["max_batch_size"]):
        whole = state.get_graph_input_buffers(
            state.graph_capture_get_metadata_for_batch(case["max_batch_size"])
        )
        captured = state.graph_capture_get_metadata_for_batch(size)
    buffers = state.get_graph_input_buffers(captured)
    poison(whole)
    assert state.prepare_graph_input_buffers(buffers, batch) is None
    encoder_lens, encoder_tables = case["encoder_numbers"] or ([], [])
    expected = {
        "slot_mapping": filled(case["slots"], size, -1, None),
        "seq_lens_tensor": filled(case["seq_lens"], size, 1, None),
        "block_tables": filled(case["tables"], size, 0, case["max_blocks"]),
    }
    if case["encoder"]:
        expected |= {
            "encoder_seq_lens_tensor": filled(encoder_lens, size, 1, None),
            "cross_slot_mapping": [],
            "cross_block_tables": filled(encoder_tables, size, 1, case["max_blocks"]),
        }
    found = {name: buffer.tolist() for name, buffer in buffers.present().items()}
    assert found == expected
    # the step reads them where it was captured, and other steps' rows are left alone
    for name, buffer in whole.present().items():
        assert getattr(captured, name).data_ptr() == buffer.data_ptr()
        assert bool((buffer[size:] == GARBAGE).all())
    assert all(same_bits(each, before[name]) for name, each in tensors(batch).items())


def test_a_refill_may_come_from_the_buffers_themselves(twin: Twin) -> None:
    """vLLM's builder writes block tables into the very memory that the graph reads."""
    state = make_state(twin)
    with state.graph_capture(3):
        captured = state.graph_capture_get_metadata_for_batch(3)
    buffers = state.get_graph_input_buffers(captured)
    buffers.block_tables.copy_(int32([[5] * 6, [7] * 6, [9] * 6]))
    batch = decodes([4, 8], [[0], [0]], [3, 7], block_tables=buffers.block_tables[:2])
    state.prepare_graph_input_buffers(buffers, batch)
    assert buffers.block_tables.tolist() == [[5] * 6, [7] * 6, [0] * 6]


@pytest.mark.parametrize("encoder", [False, True])
def test_every_tensor_of_a_captured_step_is_refilled_or_never_changes(
    twin: Twin, encoder: bool
) -> None:
    """A tensor added to the metadata later cannot be forgotten in the refill."""
    state = make_state(twin, encoder)
    with state.graph_capture(2):
        captured = state.graph_capture_get_metadata_for_batch(2)
    assert set(tensors(captured)) == {*buffer_names(encoder), "query_start_loc"}
    assert [each.name for each in fields(GraphInputBuffers)] == list(CAPTURE_VALUES)


@given(max_batch_size=st.integers(1, 5), encoder=st.booleans())
def test_a_captured_step_stores_nothing_and_sees_one_key(
    twin: Twin, max_batch_size: int, encoder: bool
) -> None:
    state = make_state(twin, encoder)
    with state.graph_capture(max_batch_size):
        for batch_size in range(1, max_batch_size + 1):
            metadata = state.graph_capture_get_metadata_for_batch(batch_size)
            assert metadata.num_decode_tokens == batch_size
            assert metadata.num_prefills == metadata.num_prefill_tokens == 0
            assert metadata.use_cuda_graph
            assert metadata.max_query_len == metadata.max_decode_query_len == 1
            assert metadata.max_decode_seq_len == LONGEST
            assert metadata.query_start_loc.tolist() == list(range(batch_size + 1))
            assert metadata.slot_mapping.tolist() == [-1] * batch_size
            assert metadata.seq_lens_tensor.tolist() == [1] * batch_size
            assert metadata.block_tables.tolist() == [[0] * 6] * batch_size
            if encoder:
                assert metadata.encoder_seq_lens == [1] * batch_size
                assert metadata.encoder_seq_lens_tensor.tolist() == [1] * batch_size
                assert metadata.cross_block_tables.tolist() == [[1] * 6] * batch_size
                assert metadata.cross_slot_mapping.dtype == torch.int64
                assert metadata.cross_slot_mapping.tolist() == []
                assert metadata.max_encoder_seq_len == LONGEST
                assert metadata.num_encoder_tokens == 0
            else:
                assert metadata.encoder_seq_lens_tensor is None


def test_the_buffers_live_as_long_as_the_block(twin: Twin) -> None:
    state = make_state(twin)
    assert not state.is_graph_capturing
    with state.graph_capture(2):
        assert state.is_graph_capturing
    assert not state.is_graph_capturing
    with pytest.raises(RuntimeError, match="outside of graph_capture"):
        state.graph_capture_get_metadata_for_batch(1)


def test_an_exception_ends_the_capture_too(twin: Twin) -> None:
    """vLLM's state went on capturing after an exception, with its buffers alive."""
    state = make_state(twin)
    with pytest.raises(KeyError, match="model"), state.graph_capture(2):
        raise KeyError("model")
    assert not state.is_graph_capturing
    with state.graph_capture(3):
        assert state.graph_capture_get_metadata_for_batch(3).num_decode_tokens == 3


def test_blocks_do_not_nest(twin: Twin) -> None:
    state = make_state(twin)
    with state.graph_capture(2):
        with pytest.raises(RuntimeError, match="inside of graph_capture"):
            state.graph_capture(2)
        assert state.is_graph_capturing


def test_a_clone_has_the_settings_and_none_of_the_steps(twin: Twin) -> None:
    state = make_state(twin, encoder=True)
    with pytest.raises(RuntimeError, match="graph_clone was called outside"):
        state.graph_clone(1)
    with state.graph_capture(3):
        clone = state.graph_clone(3)
        with pytest.raises(ValueError, match="batch_size = 4: expected at most 3"):
            state.graph_clone(4)
    assert type(clone) is type(state) and clone is not state
    assert not clone.is_graph_capturing and clone.captured_batch_sizes == []
    for name in ("max_blocks", "max_seq_len_to_capture", "device"):
        assert getattr(clone, name) == getattr(state, name)
    assert clone.is_encoder_decoder_model


# ---- refusals

GOOD: dict[str, Any] = {
    "seq_lens": [5, 9],
    "tables": [[3, 4], [7, 8]],
    "slots": [16, 33],
}
WITH_ENCODER = GOOD | {"encoder": ([3, 4], [[5], [6]])}
BAD_REFILLS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "prefills": (
        GOOD | {"num_prefills": 1},
        ValueError,
        "num_prefills = 1: expected 0",
    ),
    "no decodes": (
        {
            "seq_lens": [],
            "tables": [],
            "slots": [],
            "block_tables": int32([]).view(0, 2),
        },
        ValueError,
        "num_decode_tokens = 0: expected at least 1",
    ),
    "a larger batch": (
        {"seq_lens": [1] * 4, "tables": [[1]] * 4, "slots": [1] * 4},
        ValueError,
        "num_decode_tokens = 4: expected at most 3",
    ),
    "one length for two requests": (
        GOOD | {"seq_lens_tensor": int32([5])},
        ValueError,
        r"seq_lens_tensor has shape \[1\]: expected \[2\]",
    ),
    "one slot for two requests": (
        GOOD | {"slot_mapping": torch.tensor([5])},
        ValueError,
        r"slot_mapping has shape \[1\]: expected \[2\]",
    ),
    "one row for two requests": (
        GOOD | {"block_tables": int32([[3, 4]])},
        ValueError,
        r"block_tables has shape \[1, 2\]: expected \[2, at most 6\]",
    ),
    "a wide table": (
        GOOD | {"block_tables": int32([[0] * 7] * 2)},
        ValueError,
        r"expected \[2, at most 6\]",
    ),
    "slots of 32 bits": (
        GOOD | {"slot_mapping": int32([16, 33])},
        TypeError,
        "slot_mapping is torch.int32: expected torch.int64",
    ),
    "no table": (
        GOOD | {"block_tables": None},
        TypeError,
        "attn_metadata.block_tables = None: expected a tensor",
    ),
    "a long sequence": (
        GOOD | {"max_decode_seq_len": 25},
        ValueError,
        "max_decode_seq_len = 25: expected at most max_seq_len_to_capture = 24",
    ),
    "encoder tokens": (
        WITH_ENCODER | {"cross_slot_mapping": torch.tensor([5])},
        ValueError,
        r"cross_slot_mapping has shape \[1\]: expected \[0\] \(a decode writes no enc",
    ),
    "no encoder lengths": (
        WITH_ENCODER | {"encoder_seq_lens_tensor": None},
        TypeError,
        "attn_metadata.encoder_seq_lens_tensor = None",
    ),
    "a long encoder": (
        WITH_ENCODER | {"max_encoder_seq_len": 25},
        ValueError,
        "max_encoder_seq_len = 25: expected at most",
    ),
    "an empty sequence": (
        GOOD | {"seq_lens_tensor": int32([5, 0])},
        ValueError,
        r"seq_lens_tensor\[1\] = 0: expected 1 to 24",
    ),
    "a long sequence that its maximum denies": (
        GOOD | {"seq_lens_tensor": int32([5, 25])},
        ValueError,
        r"seq_lens_tensor\[1\] = 25: expected 1 to 24",
    ),
}


@pytest.mark.usefixtures("checked_values")
@pytest.mark.parametrize("bad", BAD_REFILLS)
def test_a_batch_that_does_not_fit_is_refused_before_anything_is_written(
    twin: Twin, bad: str
) -> None:
    arguments, error, words = BAD_REFILLS[bad]
    state = make_state(twin.raw, encoder="encoder" in arguments)
    with state.graph_capture(3):
        captured = state.graph_capture_get_metadata_for_batch(3)
    buffers = state.get_graph_input_buffers(captured)
    poison(buffers)
    with pytest.raises(error, match=words):
        state.prepare_graph_input_buffers(buffers, decodes(**arguments))
    for buffer in buffers.present().values():
        assert bool((buffer == GARBAGE).all())


def test_bad_sizes_are_refused(twin: Twin) -> None:
    state = twin.raw.CommonAttentionState
    for numbers in ((0, 5), (5, 0)):
        with pytest.raises(ValueError, match="= 0: expected at least 1"):
            state(*numbers)
    state = make_state(twin.raw)
    with pytest.raises(ValueError, match="max_batch_size = 0"):
        state.graph_capture(0)
    with state.graph_capture(2):
        for size, words in ((0, "= 0: expected at least 1"), (3, "= 3: expected at m")):
            with pytest.raises(ValueError, match=f"batch_size {words}"):
                state.graph_capture_get_metadata_for_batch(size)
