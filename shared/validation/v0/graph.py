"""Validation of captures, refills and replays of CUDA graphs."""

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ...contract.v0.graph_classes import GraphInputBuffers
from ...contract.v0.sequence_classes import SequenceAttentionMetadata
from ..primitives import check_dtype, check_positive


def check_capturing(what: str, is_graph_capturing: bool, expected: bool = True) -> None:
    """Raise an error for a call outside, or inside, of `graph_capture`."""
    if is_graph_capturing != expected:
        where, way = (
            ("outside of", "call it in its with block")
            if expected
            else ("inside of", "leave its with block first")
        )
        raise RuntimeError(f"{what} was called {where} graph_capture: {way}")


def check_capture_size(batch_size: int, max_batch_size: int) -> None:
    """Raise an error for a batch that the buffers cannot hold."""
    check_positive(batch_size=batch_size)
    if batch_size > max_batch_size:
        raise ValueError(
            f"batch_size = {batch_size}: expected at most {max_batch_size}, what"
            " graph_capture made buffers for"
        )


def check_decodes(attn_metadata: SequenceAttentionMetadata) -> None:
    """Raise an error for a batch that is not made of decodes."""
    if attn_metadata.num_prefills:
        raise ValueError(
            f"num_prefills = {attn_metadata.num_prefills}: expected 0; a captured step"
            " holds decodes only, run a batch with prefills without a graph"
        )
    if attn_metadata.num_decode_tokens < 1:
        raise ValueError(
            f"num_decode_tokens = {attn_metadata.num_decode_tokens}: expected at least 1"
        )


def check_has_buffers(
    attn_metadata: SequenceAttentionMetadata, names: Sequence[str]
) -> None:
    """Raise an error for metadata that lacks a tensor which a refill writes to."""
    for name in names:
        tensor = getattr(attn_metadata, name)
        if not isinstance(tensor, Tensor):
            raise TypeError(f"attn_metadata.{name} = {tensor!r}: expected a tensor")


class CaptureSizes(Protocol):
    """What `CommonAttentionState` says about the steps that it captures."""

    max_seq_len_to_capture: int
    is_encoder_decoder_model: bool


def check_refill(
    state: CaptureSizes,
    input_buffers: GraphInputBuffers,
    attn_metadata: SequenceAttentionMetadata,
    contents: bool,
) -> None:
    """Raise an error for a batch that does not fit a captured step, before anything is copied.

    Args:
        state: the longest sequence that its kernels were launched for, and whether the cross
            buffers are filled too.
        input_buffers, attn_metadata: buffers to fill, and the batch that is copied into them.
        contents: whether lengths are read one by one.
    """
    check_decodes(attn_metadata)
    live = attn_metadata.num_decode_tokens
    if live > input_buffers.batch_size:
        raise ValueError(
            f"num_decode_tokens = {live}: expected at most {input_buffers.batch_size}, the"
            " batch size of the captured step; take one that was captured larger"
        )
    names = ["slot_mapping", "seq_lens_tensor"]
    tables = ["block_tables"]
    if state.is_encoder_decoder_model:
        names.append("encoder_seq_lens_tensor")
        tables.append("cross_block_tables")
        _check_vector(input_buffers, attn_metadata, "cross_slot_mapping", 0)
    for name in names:
        _check_vector(input_buffers, attn_metadata, name, live)
    for name in tables:
        _check_table(input_buffers, attn_metadata, name, live)
    longest = state.max_seq_len_to_capture
    for name in ("max_decode_seq_len", "max_encoder_seq_len"):
        length = getattr(attn_metadata, name)
        if length is not None and length > longest:
            raise ValueError(
                f"{name} = {length}: expected at most max_seq_len_to_capture ="
                f" {longest}; run the step without a graph"
            )
    if contents:
        for name in names[1:]:
            _check_lengths(name, getattr(attn_metadata, name), longest)


def _pair(
    input_buffers: GraphInputBuffers,
    attn_metadata: SequenceAttentionMetadata,
    name: str,
) -> tuple[Tensor, Tensor]:
    buffer, source = getattr(input_buffers, name), getattr(attn_metadata, name)
    for owner, tensor in (("input_buffers", buffer), ("attn_metadata", source)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{owner}.{name} = {tensor!r}: expected a tensor")
    check_dtype(name, source, buffer.dtype)
    return buffer, source


def _check_vector(
    input_buffers: GraphInputBuffers,
    attn_metadata: SequenceAttentionMetadata,
    name: str,
    length: int,
) -> None:
    _, source = _pair(input_buffers, attn_metadata, name)
    if tuple(source.shape) != (length,):
        what = (
            "a decode writes no encoder token"
            if name == "cross_slot_mapping"
            else "one entry per request"
        )
        raise ValueError(
            f"{name} has shape {list(source.shape)}: expected [{length}] ({what})"
        )


def _check_table(
    input_buffers: GraphInputBuffers,
    attn_metadata: SequenceAttentionMetadata,
    name: str,
    live: int,
) -> None:
    buffer, source = _pair(input_buffers, attn_metadata, name)
    width = buffer.shape[1]
    if source.dim() != 2 or source.shape[0] != live or source.shape[1] > width:
        raise ValueError(
            f"{name} has shape {list(source.shape)}: expected [{live}, at most {width}],"
            " one row per request, no wider than the buffer"
        )


def _check_lengths(name: str, lengths: Tensor, longest: int) -> None:
    for req, length in enumerate(lengths.tolist()):
        if not 1 <= length <= longest:
            raise ValueError(
                f"{name}[{req}] = {length}: expected 1 to {longest}, what the step was"
                " captured for"
            )


def check_step_inputs(
    inputs: Sequence[Tensor], batch_size: int, buffers: Sequence[Tensor] | None = None
) -> None:
    """Raise an error for inputs without one row per request, or other than those of the capture."""
    if buffers is not None and len(inputs) != len(buffers):
        raise ValueError(
            f"{len(inputs)} inputs were given: expected {len(buffers)}, as at the capture"
        )
    for place, tensor in enumerate(inputs):
        expected = tensor if buffers is None else buffers[place]
        rest = list(expected.shape[1:])
        if tensor.dim() == 0 or list(tensor.shape) != [batch_size, *rest]:
            raise ValueError(
                f"inputs[{place}] has shape {list(tensor.shape)}: expected"
                f" {[batch_size, *rest]}, one row per request"
            )
        check_dtype(f"inputs[{place}]", tensor, expected.dtype)


def check_step_output(output: object, batch_size: int) -> None:
    """Raise an error for a step whose result cannot be cut down to the live requests."""
    if not isinstance(output, Tensor):
        raise TypeError(
            f"function returned {type(output).__name__}: expected a tensor [batch_size, ...]"
        )
    if output.dim() == 0 or output.shape[0] != batch_size:
        raise ValueError(
            f"function returned shape {list(output.shape)}: expected [{batch_size}, ...],"
            " one row per request"
        )


def check_captured(live: int, captured: Iterable[int]) -> None:
    """Raise an error for a batch that no captured step is large enough for."""
    sizes = sorted(captured)
    if not sizes or sizes[-1] < live:
        raise ValueError(
            f"num_decode_tokens = {live}: expected at most one of the captured batch sizes"
            f" {sizes}; capture a larger one, or run the step without a graph"
        )


def check_can_record(device: torch.device, contents: bool) -> None:
    """Raise an error if the device has no graphs, or if validation reads tensors during capture."""
    if device.type != "cuda":
        raise NotImplementedError(
            f"device = {device}: expected cuda, where graphs are recorded; the reference"
            " runs the function itself, anywhere"
        )
    if contents:
        raise ValueError(
            "PAGETWIN_CHECK_VALUES = 1 lets the kernels' checks read tensors, which cannot"
            " be recorded: expected it unset while a graph is captured"
        )
