"""Metadata that are built from sequence groups, eager and for CUDA graphs."""

from itertools import pairwise
from typing import Any

from golden.deviations import deviation
from golden.rules.v0_sequence_groups import (
    collects_none,
    groups_of,
    has_no_cache,
    has_the_lengths,
    has_unequal_maps,
    is_built_here,
    is_graph,
    recorded_rows,
    row,
    sequences,
    vllm_adds,
    vllm_builds,
)
from golden.rules.v0_sequences import a_row_is_none

BUILD = "common_metadata_builder_build"
PREPARE = "common_metadata_builder_prepare"


@deviation(BUILD, fields=["raises"], right="rejected where the group is added")
def a_graph_has_a_context_that_is_cached_nowhere(inputs: dict[str, Any]) -> bool:
    """vLLM builds a graph's step although a prefix-cache hit has no blocks."""
    return vllm_builds(inputs) and any(
        group["prefix_cache_hit"] and has_no_cache(group) for group in groups_of(inputs)
    )


@deviation(BUILD, fields=["raises"], right="an empty row")
def a_row_of_none_is_padded(inputs: dict[str, Any]) -> bool:
    """vLLM collects None as a row, and the padding fails on it."""
    is_run = not is_graph(inputs) and is_built_here(inputs)
    return is_run and a_row_is_none(inputs)


@deviation(BUILD, fields=["builder_state.block_tables"], right="an empty row")
def a_row_of_none_is_in_a_graph(inputs: dict[str, Any]) -> bool:
    """vLLM collects None as a row; it is not padded in a graph."""
    return is_graph(inputs) and a_row_is_none(inputs) and vllm_builds(inputs)


@deviation(PREPARE, fields=["raises"], right="rejected")
def the_first_build_has_other_lengths(inputs: dict[str, Any]) -> bool:
    """vLLM does not compare the lengths with those of the groups."""
    groups = inputs["inter_data_list"]
    if not inputs["build_first"] or has_the_lengths(inputs) or not vllm_adds(inputs):
        return False
    is_empty = any(collects_none(group, inputs) for group in groups)
    has_tokens = any(length > 0 for group in groups for length in group["query_lens"])
    return has_tokens and not is_empty and not has_unequal_maps(inputs)


@deviation(BUILD, fields=["raises"], right="the blocks of the window, which fit")
def a_whole_row_does_not_fit_the_graph(inputs: dict[str, Any]) -> bool:
    """vLLM does not shorten the row of a decode after a prefix-cache hit."""
    if not is_graph(inputs) or not vllm_adds(inputs) or not is_built_here(inputs):
        return False
    width = inputs["runner_graph_block_tables"].shape[1]
    cut = [
        min(
            len(row(group, sequence)),
            sequence["window_blocks"] or len(row(group, sequence)),
        )
        for group in inputs["inter_data_list"]
        for sequence in sequences(group)
    ]
    is_wide = any(len(whole_row) > width for whole_row in recorded_rows(inputs))
    return is_wide and all(count <= width for count in cut)


@deviation(BUILD, fields=["raises"], right="rejected")
def lengths_are_not_those_of_the_groups(inputs: dict[str, Any]) -> bool:
    """vLLM does not compare the lengths with those of the groups."""
    return vllm_builds(inputs) and not has_the_lengths(inputs)


@deviation(BUILD, fields=["raises"], right="rejected: a step that is built is complete")
def it_is_built_twice(inputs: dict[str, Any]) -> bool:
    """vLLM adds all groups once more in a second build() without prepare()."""
    calls = inputs["calls"]
    pairs = pairwise(calls)
    is_twice = any(one == other == "build" for one, other in pairs)
    return vllm_builds(inputs) and is_twice


@deviation(BUILD, fields=["raises"], right="rejected: a graph is captured for decodes")
def a_graph_has_prompts(inputs: dict[str, Any]) -> bool:
    """vLLM counts all tokens as decodes although prompts are among them."""
    kinds = [group["is_prompt"] for group in inputs["inter_data_list"]]
    return is_graph(inputs) and any(kinds) and vllm_builds(inputs)


@deviation(BUILD, fields=["raises"], right="rejected")
def a_graph_has_another_batch_size(inputs: dict[str, Any]) -> bool:
    """vLLM returns a table of another length than the batch."""
    padded = len(recorded_rows(inputs)) + inputs["cuda_graph_pad_size"]
    is_run = is_graph(inputs) and vllm_builds(inputs)
    return is_run and inputs["batch_size"] != padded


@deviation(
    BUILD,
    fields=[
        "metadata.context_lens_tensor",
        "metadata.query_start_loc",
        "builder_state.slot_mapping",
    ],
    right="an entry per sequence of the graph; build() leaves the builder unchanged",
)
def a_graph_is_padded(inputs: dict[str, Any]) -> bool:
    """vLLM pads lengths and slots to the graph's size, but neither contexts nor starts."""
    return bool(inputs["cuda_graph_pad_size"] > 0) and vllm_builds(inputs)


@deviation(BUILD, fields=["metadata.block_tables"], right="a row per request")
def a_graph_is_larger_than_the_runners_table(inputs: dict[str, Any]) -> bool:
    """vLLM returns as many rows as the runner's table has."""
    if not is_graph(inputs) or not vllm_builds(inputs):
        return False
    return len(inputs["runner_graph_block_tables"]) < inputs["batch_size"]


@deviation(BUILD, fields=["metadata.block_tables"], right="zeros")
def a_graph_table_has_old_ids(inputs: dict[str, Any]) -> bool:
    """vLLM keeps ids of an earlier step past shorter rows and in the padding rows."""
    buffer = inputs["runner_graph_block_tables"]
    if not is_graph(inputs) or not vllm_builds(inputs):
        return False
    if a_graph_is_larger_than_the_runners_table(inputs):
        return False
    rows = recorded_rows(inputs)
    used = buffer[: inputs["batch_size"]].tolist()
    lens = [len(own_row) for own_row in rows] + [0] * len(used)
    return any(any(old[count:]) for old, count in zip(used, lens, strict=False))


@deviation(
    BUILD,
    fields=["runner_graph_block_tables_after"],
    right="a buffer of the caller is not modified",
)
def rows_are_written_into_the_runners_table(inputs: dict[str, Any]) -> bool:
    """vLLM writes the rows into the runner's table."""
    buffer = inputs["runner_graph_block_tables"]
    if not is_graph(inputs) or not vllm_builds(inputs):
        return False
    pairs = zip(buffer.tolist(), recorded_rows(inputs), strict=False)
    return any(old[: len(new)] != new for old, new in pairs)


@deviation(BUILD, fields=["aliases_graph_buffer"], right="a table of its own")
def the_table_is_a_view_of_the_runners(inputs: dict[str, Any]) -> bool:
    """vLLM returns a view, so that building the next step changes the table of this one."""
    return is_graph(inputs) and vllm_builds(inputs)
