"""Checks of the contract's own classes: ranges of numbers, and fields that belong together."""

from typing import Any


def check_positive(**numbers: int) -> None:
    """Refuse a number below 1."""
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name} = {number}: expected at least 1")


def check_not_negative(**numbers: int) -> None:
    """Refuse a number below 0."""
    for name, number in numbers.items():
        if number < 0:
            raise ValueError(f"{name} = {number}: expected at least 0")


def check_cross_fields(metadata: Any) -> None:
    """Refuse cross-attention in a step that does not say where the encoders' keys lie."""
    for name in (
        "encoder_seq_lens",
        "encoder_seq_lens_cpu",
        "max_encoder_seq_len",
        "cross_block_table",
    ):
        if getattr(metadata, name) is None:
            raise ValueError(
                f"{name} = None: expected it in a step with cross-attention (of"
                " CommonAttentionMetadata: encoder_seq_lens, encoder_seq_lens_cpu and"
                " cross_block_table_tensor)"
            )
    check_not_negative(max_encoder_seq_len=metadata.max_encoder_seq_len)


def check_encoder_starts(metadata: Any) -> None:
    """Refuse an encoder's slots and starts of which a half is missing."""
    starts = metadata.encoder_query_start_loc, metadata.encoder_query_start_loc_cpu
    slots = metadata.cross_slot_mapping
    if all(each is None for each in starts) and (slots is None or not slots.numel()):
        return
    for each, name in zip(starts, ("", "_cpu"), strict=True):
        if each is None:
            raise ValueError(
                f"encoder_query_start_loc{name} = None: expected where the tokens of each"
                " request's encoder start, as the step has some"
            )


def check_tree_is_whole(is_begun: bool, is_open: bool) -> None:
    """Refuse to cut a request while a step has trees."""
    if is_begun or is_open:
        raise NotImplementedError(
            f"tree_mask is set and the {'first' if is_begun else 'last'} request is cut:"
            " expected micro-batches of whole requests, since a tree cannot be cut"
        )
