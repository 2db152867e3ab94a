"""Sequence groups that are added to the builder of their metadata: vLLM's V0 bookkeeping."""

from collections.abc import Callable
from typing import Any

from golden.deviations import Condition, deviation
from golden.rules.v0_sequence_groups import (
    Group,
    collects_none,
    groups_of,
    has_map_of_another_length,
    has_no_cache,
    has_rows_of_none,
    is_built_here,
    kept_len,
    lacks_a_row,
    row,
    sequences,
    shortens_no_row,
    vllm_adds,
    vllm_builds,
)

ADD = "common_metadata_builder_add_seq_group"
BUILD = "common_metadata_builder_build"
PREPARE = "common_metadata_builder_prepare"


def in_a_group(
    *fields: str, right: str, only_add: bool = False
) -> Callable[[Callable[[Group, dict[str, Any]], bool]], Condition]:
    """Register a condition that holds if it holds for one of the groups."""

    def register(condition: Callable[[Group, dict[str, Any]], bool]) -> Condition:
        def holds(inputs: dict[str, Any]) -> bool:
            if not (vllm_builds(inputs) if "calls" in inputs else vllm_adds(inputs)):
                return False
            return any(condition(group, inputs) for group in groups_of(inputs))

        holds.__name__, holds.__doc__ = condition.__name__, condition.__doc__
        prefixes = {
            ADD: ["states[]"],
            BUILD: ["builder_state", "metadata"],
            PREPARE: ["state_before_second_prepare"],
        }
        for file in [ADD] if only_add else list(prefixes):
            named = [
                field if field == "raises" else f"{prefix}.{field}"
                for field in fields
                for prefix in prefixes[file]
            ]
            deviation(file, fields=named, right=right)(holds)
        return holds

    return register


@deviation(ADD, BUILD, PREPARE, fields=["raises"], right="an empty row")
def a_window_shortens_a_row_of_none(inputs: dict[str, Any]) -> bool:
    """vLLM takes the last blocks of a row that is None."""
    groups = groups_of(inputs)
    is_cut = any(shortens_no_row(group, inputs) for group in groups)
    return is_cut and is_built_here(inputs)


@deviation(ADD, BUILD, PREPARE, fields=["raises"], right="no row, as with None")
def a_table_is_empty(inputs: dict[str, Any]) -> bool:
    """vLLM looks for a row in a table of no sequences."""
    groups = groups_of(inputs)
    is_empty = any(
        lacks_a_row(group, inputs) and not group["block_tables"] for group in groups
    )
    return is_empty and is_built_here(inputs)


@in_a_group("raises", right="rejected where the group is added", only_add=True)
def a_context_is_cached_nowhere(group: Group, inputs: dict[str, Any]) -> bool:
    """vLLM appends None for a context that a prefix-cache hit found; the padding fails later."""
    return bool(group["prefix_cache_hit"]) and has_rows_of_none(group)


@in_a_group("raises", right="a map of another length than its sequence is rejected")
def a_placeholder_map_has_another_length(group: Group, inputs: dict[str, Any]) -> bool:
    """vLLM accepts a map of another length, which shifts all later placeholders."""
    return has_map_of_another_length(group)


@deviation(ADD, BUILD, PREPARE, fields=["raises"], right="prompts come first")
def a_prompt_follows_a_decode(inputs: dict[str, Any]) -> bool:
    """vLLM divides the metadata after the prompts although decodes are between them."""
    kinds = [group["is_prompt"] for group in groups_of(inputs)]
    is_run = vllm_builds(inputs) if "calls" in inputs else vllm_adds(inputs)
    return is_run and kinds != sorted(kinds, reverse=True)


# ---- slots


@in_a_group(
    "slot_mapping",
    right="of a prompt's chunk, the new tokens among the last sliding_window tokens",
)
def a_chunk_is_longer_than_the_window(group: Group, inputs: dict[str, Any]) -> bool:
    """vLLM compares a start that is relative to the chunk with positions of the sequence."""
    window = inputs["sliding_window"]
    if window is None or not group["is_prompt"] or has_no_cache(group):
        return False
    return any(
        sequence["context_len"] > 0 and sequence["query_len"] > window
        for sequence in sequences(group)
    )


@in_a_group("slot_mapping", right="one -1 per new token")
def a_context_is_profiled(group: Group, inputs: dict[str, Any]) -> bool:
    """Without a cache vLLM gives every token of the sequence a -1, the context included."""
    return has_no_cache(group) and any(group["context_lens"])


# ---- counts and rows


@in_a_group("num_prefill_tokens", right="the new tokens of the prompts")
def more_ids_than_new_tokens(group: Group, inputs: dict[str, Any]) -> bool:
    """vLLM counts the ids that it was given, not the new tokens that have slots."""
    ids = sum(len(ids_of_sequence) for ids_of_sequence in group["input_tokens"])
    return group["is_prompt"] and ids != sum(group["query_lens"])


@in_a_group("block_tables", right="the row, wherever there is a context")
def a_prompt_with_a_context_is_not_chunked(
    group: Group, inputs: dict[str, Any]
) -> bool:
    """vLLM gives such a prompt no row, so that attention does not find its context."""
    if inputs["chunked_prefill_enabled"] or not group["is_prompt"]:
        return False
    is_cached = not group["prefix_cache_hit"] and not has_no_cache(group)
    return is_cached and any(group["context_lens"])


@in_a_group("block_tables", right="the window shortens only rows of decodes")
def a_window_shortens_the_row_of_a_prompt(group: Group, inputs: dict[str, Any]) -> bool:
    """vLLM shortens it, and then reads the context by its position in the whole sequence."""
    if not inputs["chunked_prefill_enabled"] or not group["is_prompt"]:
        return False
    return not group["prefix_cache_hit"] and any(
        0 < sequence["window_blocks"] < len(row(group, sequence))
        for sequence in sequences(group)
    )


@in_a_group("block_tables", right="the last blocks that hold tokens")
def a_window_counts_spare_blocks(group: Group, inputs: dict[str, Any]) -> bool:
    """vLLM counts the window's blocks from the end of the row, spare blocks included."""
    if group["is_prompt"] or group["prefix_cache_hit"]:
        return False
    size = inputs["block_size"]
    return any(
        0 < sequence["window_blocks"] < len(row(group, sequence))
        and len(row(group, sequence)) > -(-sequence["orig_seq_len"] // size)
        for sequence in sequences(group)
    )


@in_a_group("block_tables", right="the last blocks that hold tokens")
def a_hit_decode_has_a_window(group: Group, inputs: dict[str, Any]) -> bool:
    """After a prefix-cache hit vLLM gives a decode its whole row, but the window's length."""
    if group["is_prompt"] or not group["prefix_cache_hit"]:
        return False
    size = inputs["block_size"]
    return any(
        0 < sequence["window_blocks"] < -(-sequence["orig_seq_len"] // size)
        for sequence in sequences(group)
    )


@deviation(ADD, fields=["states[].block_tables"], right="an empty row")
def a_row_is_none(inputs: dict[str, Any]) -> bool:
    """vLLM collects None as a row, and the padding fails on it later."""
    groups = groups_of(inputs)
    return vllm_adds(inputs) and any(collects_none(group, inputs) for group in groups)


@deviation(
    ADD,
    fields=["states[].curr_seq_lens"],
    right="the tokens in the blocks that are kept",
)
def a_length_that_the_kept_blocks_do_not_hold(inputs: dict[str, Any]) -> bool:
    """vLLM does not compute the length of a decode under a window, but takes the given one."""
    size = inputs["block_size"]
    return vllm_adds(inputs) and any(
        sequence["seq_len"] != kept_len(group, sequence, size)
        for group in groups_of(inputs)
        if not group["is_prompt"]
        for sequence in sequences(group)
    )


# ---- placeholders


def placeholder_fields(file: str) -> list[str]:
    return {
        ADD: ["states[].multimodal_placeholder_maps"],
        BUILD: [
            "builder_state.multimodal_placeholder_maps",
            "metadata.multi_modal_placeholder_index_maps",
        ],
        PREPARE: ["state_before_second_prepare.multimodal_placeholder_maps"],
    }[file]


def placeholders_are_counted_otherwise(inputs: dict[str, Any]) -> bool:
    """vLLM does not count tokens of groups without placeholders, so that embeddings go to tokens
    of an earlier group, and counts a group's embeddings once per sequence."""
    is_run = vllm_builds(inputs) if "calls" in inputs else vllm_adds(inputs)
    groups = groups_of(inputs) if is_run else []
    for index, group in enumerate(groups):
        maps = group["multi_modal_placeholder_maps"] or {}
        if group["is_prompt"] and maps and len(group["seq_ids"]) > 1:
            return True
        for modality in maps if group["is_prompt"] else ():
            before = groups[:index]
            tokens = sum(sum(earlier["query_lens"]) for earlier in before)
            counted = sum(
                len(earlier["seq_ids"])
                * earlier["multi_modal_placeholder_maps"][modality]["dest_len"]
                for earlier in before
                if modality in (earlier["multi_modal_placeholder_maps"] or {})
            )
            if tokens != counted:
                return True
    return False


for _file in (ADD, BUILD, PREPARE):
    deviation(
        _file,
        fields=placeholder_fields(_file),
        right="a placeholder's index in the batch; sequences share their group's embeddings",
    )(placeholders_are_counted_otherwise)
