"""The state of captured graphs: vLLM's V0 buffers."""

from typing import Any

import torch

from golden.deviations import deviation

CAPTURE = "common_attention_state_graph_capture"
GET = "common_attention_state_get_metadata_for_batch"
BUFFERS = "common_attention_state_get_graph_input_buffers"
PREPARE = "common_attention_state_prepare_graph_input_buffers"


def is_captured_by_vllm(inputs: dict[str, Any]) -> bool:
    """Return whether vLLM captures the backend with an encoder."""
    names = ("XFORMERS", "FLASH_ATTN", "ROCM_FLASH")
    is_plain = not inputs["is_encoder_decoder_model"]
    return is_plain or inputs["attn_backend_name"] in names


def fits_the_buffers(inputs: dict[str, Any]) -> bool:
    return bool(1 <= inputs["batch_size"] <= inputs["max_batch_size"])


# ---- capture


@deviation(CAPTURE, fields=["inside._graph_block_tables"], right="zeros")
def the_runners_table_has_ids(inputs: dict[str, Any]) -> bool:
    """vLLM captures with the ids that an older batch left in the runner's block table, which may
    have another length than the other buffers."""
    table = inputs["runner"]["graph_block_tables"]
    is_other = len(table) != inputs["max_batch_size"] or bool(table.any())
    return is_other and fits_the_buffers(inputs)


@deviation(CAPTURE, fields=["raises"], right="a ValueError")
def a_clone_is_not_in_the_buffers(inputs: dict[str, Any]) -> bool:
    """vLLM does not read the batch size of a clone."""
    return not fits_the_buffers(inputs)


@deviation(
    CAPTURE,
    fields=["inside.block_tables_alias_runner"],
    right="the state owns its buffers",
)
def a_state_has_a_runner(inputs: dict[str, Any]) -> bool:
    """vLLM's state uses the block table of a model runner."""
    return fits_the_buffers(inputs)


@deviation(
    CAPTURE,
    fields=["exception_inside_leaves_state"],
    right="as after a capture that ended well",
    value=lambda _: {"_is_graph_capturing": False, "left_attributes": []},
)
def an_exception_ends_the_capture(inputs: dict[str, Any]) -> bool:
    """vLLM has no `finally`: after an exception the state is still capturing."""
    return fits_the_buffers(inputs)


# ---- captured metadata


def an_encoder_needs_a_known_backend(inputs: dict[str, Any]) -> bool:
    """vLLM rejects all backends but three by name."""
    return fits_the_buffers(inputs) and not is_captured_by_vllm(inputs)


for _file, _field in ((GET, "result.raises"), (BUFFERS, "raises")):
    deviation(_file, fields=[_field], right="no backend is rejected by its name")(
        an_encoder_needs_a_known_backend
    )


@deviation(BUFFERS, fields=["raises"], right="rejected")
def a_batch_is_larger_than_the_buffers(inputs: dict[str, Any]) -> bool:
    """vLLM returns tensors that are shorter than the batch."""
    return inputs["batch_size"] > 0 and a_batch_is_not_in_the_buffers(inputs)


@deviation(GET, fields=["result.raises"], right="rejected")
def a_batch_is_not_in_the_buffers(inputs: dict[str, Any]) -> bool:
    """vLLM returns tensors that are shorter than the batch, and captures no request."""
    return is_captured_by_vllm(inputs) and not fits_the_buffers(inputs)


@deviation(GET, fields=["result.query_start_loc"], right="0, 1, 2, ...: one token each")
def a_batch_is_captured(inputs: dict[str, Any]) -> bool:
    """vLLM's captured metadata has no start locations."""
    return fits_the_buffers(inputs) and is_captured_by_vllm(inputs)


@deviation(GET, fields=["result.encoder_seq_lens"], right="a list, as declared")
def encoder_lengths_are_captured(inputs: dict[str, Any]) -> bool:
    """vLLM's captured metadata has a tensor where a list is declared."""
    return bool(inputs["is_encoder_decoder_model"]) and a_batch_is_captured(inputs)


def has_encoder_slots(inputs: dict[str, Any]) -> bool:
    """vLLM captures slots of 32 bits, while every batch has slots of 64 bits."""
    return bool(inputs["is_encoder_decoder_model"]) and a_batch_is_captured(inputs)


for _file, _field in (
    (GET, "result.cross_slot_mapping"),
    (BUFFERS, "buffers.cross_slot_mapping"),
):
    deviation(_file, fields=[_field], right="an empty int64 tensor")(has_encoder_slots)


def the_runners_table_is_short(inputs: dict[str, Any]) -> bool:
    """vLLM returns as many rows as the runner's block table has."""
    rows = len(inputs["runner"]["graph_block_tables"])
    return a_batch_is_captured(inputs) and rows < inputs["batch_size"]


for _file, _field in ((GET, "result.block_tables"), (BUFFERS, "buffers.block_tables")):
    deviation(_file, fields=[_field], right="a row per request")(
        the_runners_table_is_short
    )


# ---- the buffers of a replay

COPIED = ("seq_lens_tensor", "block_tables")
COPIED_WITH_ENCODER = (*COPIED, "encoder_seq_lens_tensor", "cross_block_tables")


def copied(inputs: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Return what is copied from the batch, and the buffer that it is copied to.

    vLLM leaves the rows of prefills out of a tensor, but not out of those of the encoder.
    """
    has_encoder = inputs["is_encoder_decoder_model"]
    names = COPIED_WITH_ENCODER if has_encoder else COPIED
    batch, buffers = inputs["attn_metadata"], inputs["input_buffers"]
    given = {name: batch.get(name) for name in names}
    for name in COPIED:
        if given[name] is not None:
            given[name] = given[name][batch.get("num_prefills", 0) :]
    return [(given[name], buffers[name]) for name in names]


def sizes(inputs: dict[str, Any]) -> list[tuple[int, int]]:
    """Return the sizes of every copied tensor: of the batch, and of the buffer."""
    return [
        pair
        for batch, buffer in copied(inputs)
        for pair in zip(batch.shape, buffer.shape, strict=True)
    ]


def has_decodes(inputs: dict[str, Any]) -> bool:
    """Return whether there is something to copy, which both sides need."""
    has_tokens = bool(inputs["attn_metadata"]["num_decode_tokens"])
    return has_tokens and all(batch is not None for batch, _ in copied(inputs))


def is_taken_here(inputs: dict[str, Any]) -> bool:
    """Return whether there are only decodes, every tensor fits its buffer and the graph, and no
    token is the encoder's."""
    batch = inputs["attn_metadata"]
    if not has_decodes(inputs) or batch.get("num_prefills", 0):
        return False
    longest = inputs["runner"]["max_seq_len_to_capture"]
    if (batch["seq_lens_tensor"] > longest).any():
        return False
    slots = batch.get("cross_slot_mapping")
    has_tokens = slots is None or slots.numel() > 0
    fits = all(there <= room for there, room in sizes(inputs))
    return fits and not (inputs["is_encoder_decoder_model"] and has_tokens)


def is_copied_by_vllm(inputs: dict[str, Any]) -> bool:
    """Return whether vLLM copies every tensor: equal sizes, or one that is broadcast."""
    is_known = inputs["attn_backend_name"] in ("XFORMERS", "FLASH_ATTN")
    if inputs["is_encoder_decoder_model"]:
        slots = inputs["attn_metadata"].get("cross_slot_mapping")
        if not is_known or slots is None or slots.numel() > 1:
            return False
    if not has_decodes(inputs):
        return False
    return all(n in (1, room) for n, room in sizes(inputs))


@deviation(PREPARE, fields=["raises"], right="padding is filled; any backend")
def a_replay_is_rejected_by_vllm(inputs: dict[str, Any]) -> bool:
    """vLLM fails for smaller batches than the buffers, and rejects all backends but two."""
    return is_taken_here(inputs) and not is_copied_by_vllm(inputs)


@deviation(PREPARE, fields=["raises"], right="a decode has no tokens for the encoder")
def a_replay_is_rejected_here(inputs: dict[str, Any]) -> bool:
    """vLLM broadcasts one slot of the encoder into the empty buffer, so that it is lost, replays
    sequences that are longer than the graph's, and leaves out prefills."""
    return is_copied_by_vllm(inputs) and not is_taken_here(inputs)


@deviation(PREPARE, fields=["input_buffers.slot_mapping"], right="the batch's slots")
def the_slots_are_other_slots(inputs: dict[str, Any]) -> bool:
    """vLLM leaves the slots to another class."""
    if not (is_taken_here(inputs) and is_copied_by_vllm(inputs)):
        return False
    buffer = inputs["input_buffers"]["slot_mapping"]
    slots = inputs["attn_metadata"]["slot_mapping"]
    padded = torch.full_like(buffer, -1)
    padded[: len(slots)] = slots
    return not torch.equal(buffer, padded)


@deviation(PREPARE, fields=["input_buffers.cross_slot_mapping"], right="64 bits")
def a_replay_has_encoder_slots(inputs: dict[str, Any]) -> bool:
    """vLLM captures slots of 32 bits, while every batch has slots of 64 bits."""
    is_run = is_taken_here(inputs) and is_copied_by_vllm(inputs)
    return is_run and bool(inputs["is_encoder_decoder_model"])


@deviation(
    PREPARE,
    fields=[f"input_buffers.{name}" for name in COPIED_WITH_ENCODER],
    right="the batch is at the start; padding rows have no keys",
)
def one_row_is_broadcast(inputs: dict[str, Any]) -> bool:
    """vLLM copies one row, or one column, into all rows or columns of a larger buffer."""
    is_run = is_taken_here(inputs) and is_copied_by_vllm(inputs)
    return is_run and any(there < room for there, room in sizes(inputs))
