"""Checks of the contract's own classes: ranges of numbers, and fields that belong together."""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from .integers import as_int
from .multimodal_features import MultiModalFeature


def check_positive(**numbers: int) -> None:
    """Raise an error for a number below 1."""
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name} = {number}: expected at least 1")


def check_not_negative(**numbers: int) -> None:
    """Raise an error for a number below 0."""
    for name, number in numbers.items():
        if number < 0:
            raise ValueError(f"{name} = {number}: expected at least 0")


def check_has_states(block_size: int, tokens_per_state: int | Fraction) -> None:
    """Raise an error if a block has fewer tokens than one cell."""
    if not 0 < tokens_per_state <= block_size:
        raise ValueError(
            f"tokens_per_state = {tokens_per_state}: expected more than 0 and at most"
            f" block_size = {block_size}, so that a block has a cell"
        )


def check_padded_page(page_size_padded: int, content: int) -> None:
    """Raise an error if a padded page is smaller than its content."""
    if page_size_padded < content:
        raise ValueError(
            f"page_size_padded = {page_size_padded}: expected at least {content}, the bytes"
            " of the block's content"
        )


def check_latent_fields(
    head_size_v: int | None, alignment: int | None, page_size_padded: int | None
) -> None:
    """Raise an error for fields that a page of latents cannot have, or not together."""
    if head_size_v is not None:
        raise ValueError(
            f"head_size_v = {head_size_v}: expected None; a latent has no value of its own"
        )
    if alignment is not None and page_size_padded is not None:
        raise ValueError(
            f"alignment = {alignment} and page_size_padded = {page_size_padded}: expected"
            " one of them, as each determines the bytes of a page"
        )


def check_cross_fields(metadata: Any) -> None:
    """Raise an error for cross-attention without the location of the encoders' keys."""
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
    """Raise an error if only some of an encoder's slots and starts are given."""
    starts = metadata.encoder_query_start_loc, metadata.encoder_query_start_loc_cpu
    slots = metadata.cross_slot_mapping
    if all(start is None for start in starts) and (slots is None or not slots.numel()):
        return
    for start, name in zip(starts, ("", "_cpu"), strict=True):
        if start is None:
            raise ValueError(
                f"encoder_query_start_loc{name} = None: expected where the tokens of each"
                " request's encoder start, as the step has some"
            )


def check_tree_is_whole(is_begun: bool, is_open: bool) -> None:
    """Raise an error if a request with a tree mask is cut."""
    if is_begun or is_open:
        raise NotImplementedError(
            f"tree_mask is set and the {'first' if is_begun else 'last'} request is cut:"
            " expected micro-batches of whole requests, since a tree cannot be cut"
        )


def check_names(**names: object) -> None:
    """Raise an error for a name that is neither None nor a string with characters."""
    for name, value in names.items():
        if value is not None and not isinstance(value, str):
            raise TypeError(f"{name} = {value!r:.60}: expected a str or None")
        if value == "":
            raise ValueError(f"{name} = '': expected a character at least, or None")


def check_hashable(name: str, value: object) -> None:
    """Raise an error for a value that cannot be the key of a dictionary."""
    try:
        hash(value)
    except TypeError:
        raise TypeError(
            f"{name} = {value!r:.60}: expected a hashable value, such as a str or an int"
        ) from None


def check_prompt(request_id: object, token_ids: Sequence[int]) -> None:
    """Raise an error for a prompt without tokens."""
    if not token_ids:
        raise ValueError(
            f"request {request_id!r} has an empty prompt: expected at least one token"
        )


def check_unfinished(request_id: object, is_finished: bool) -> None:
    """Raise an error for a token after the last one."""
    if is_finished:
        raise ValueError(
            f"request {request_id!r} is finished: expected no further token; make a new Request"
        )


def check_features_named(features: object) -> None:
    """Raise an error for features that the prefix cache cannot tell from others."""
    if not isinstance(features, Sequence):
        raise TypeError(
            f"mm_features = {features!r:.60}: expected a sequence of MultiModalFeature"
        )
    for index, feature in enumerate(features):
        where = f"mm_features[{index}]"
        if not isinstance(feature, MultiModalFeature):
            raise TypeError(f"{where} = {feature!r:.60}: expected a MultiModalFeature")
        if feature.identifier is None:
            raise ValueError(
                f"{where}.identifier = None: expected a str, such as a hash of the content; other"
                " contents have the same placeholder tokens"
            )
        check_names(**{f"{where}.identifier": feature.identifier})
        as_int(f"{where}.offset", feature.offset)
        as_int(f"{where}.length", feature.length)
