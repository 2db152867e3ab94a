"""Sequence groups and the builder of their metadata: vLLM's V0 bookkeeping."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

from golden.deviations import Condition, deviation

ADD = "common_metadata_builder_add_seq_group"
BUILD = "common_metadata_builder_build"
PREPARE = "common_metadata_builder_prepare"
Group = dict[str, Any]


# ---- what a group is


def has_no_cache(group: Group) -> bool:
    """Return whether no sequence of the group has a block table, as in a profiling run."""
    tables = group["block_tables"]
    return tables is None or all(row is None for row in tables.values())


def has_rows_of_none(group: Group) -> bool:
    return bool(group["block_tables"]) and has_no_cache(group)


def sequences(group: Group) -> Iterator[dict[str, Any]]:
    """Yield each sequence of a group as one dictionary."""
    names = {
        "seq_ids": "seq_id",
        "query_lens": "query_len",
        "context_lens": "context_len",
        "orig_seq_lens": "orig_seq_len",
        "seq_lens": "seq_len",
        "curr_sliding_window_blocks": "window_blocks",
    }
    for values in zip(*(group[name] for name in names), strict=True):
        yield dict(zip(names.values(), values, strict=True))


def row(group: Group, sequence: dict[str, Any]) -> list[int]:
    tables = group["block_tables"] or {}
    return tables.get(str(sequence["seq_id"])) or []


def recorded_rows(inputs: dict[str, Any]) -> list[list[int]]:
    """Return the rows that vLLM's builder collects for decodes."""
    found = []
    for group in inputs["inter_data_list"]:
        for each in sequences(group):
            whole, blocks = row(group, each), each["window_blocks"]
            is_cut = blocks and not group["prefix_cache_hit"]
            found.append(whole[-blocks:] if is_cut else whole)
    return found


def is_graph(inputs: dict[str, Any]) -> bool:
    return bool(inputs.get("cuda_graph_pad_size", -1) >= 0)


def groups_of(inputs: dict[str, Any]) -> list[Group]:
    """Return the groups that are added: none if the builder is only prepared."""
    is_used = inputs.get("build_first", True)
    found: list[Group] = inputs["inter_data_list"] if is_used else []
    return found


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
                each if each == "raises" else f"{prefix}.{each}"
                for each in fields
                for prefix in prefixes[file]
            ]
            deviation(file, fields=named, right=right)(holds)
        return holds

    return register


# ---- groups that are rejected


def shortens_no_row(group: Group, inputs: dict[str, Any]) -> bool:
    """Return whether vLLM takes the last blocks of a row that is None, which fails."""
    is_read = inputs["chunked_prefill_enabled"] or not group["is_prompt"]
    is_cut = any(group["curr_sliding_window_blocks"]) and not group["prefix_cache_hit"]
    return bool(is_read and is_cut) and has_rows_of_none(group)


def lacks_a_row(group: Group, inputs: dict[str, Any]) -> bool:
    """Return whether vLLM looks for the row of a sequence that the table does not name."""
    tables = group["block_tables"]
    is_read = inputs["chunked_prefill_enabled"] or not group["is_prompt"]
    is_read = is_read or group["prefix_cache_hit"] or not has_no_cache(group)
    names = [str(each) for each in group["seq_ids"]]
    return bool(is_read) and tables is not None and not {*names} <= tables.keys()


def vllm_adds(inputs: dict[str, Any]) -> bool:
    """Return whether vLLM adds every group."""
    return not any(
        shortens_no_row(group, inputs)
        or lacks_a_row(group, inputs)
        or (group["prefix_cache_hit"] and group["block_tables"] is None)
        for group in groups_of(inputs)
    )


def is_rejected_here(inputs: dict[str, Any]) -> bool:
    """Return whether a group is rejected here."""
    groups = groups_of(inputs)
    kinds = [group["is_prompt"] for group in groups]
    return kinds != sorted(kinds, reverse=True) or any(
        has_map_of_another_length(group)
        or (group["prefix_cache_hit"] and has_no_cache(group))
        for group in groups
    )


def has_map_of_another_length(group: Group) -> bool:
    maps = (group["multi_modal_placeholder_maps"] or {}).values()
    return bool(group["is_prompt"]) and any(
        each["dest_len"] != query_len
        for each in maps
        for query_len in group["query_lens"]
    )


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
        each["context_len"] > 0 and each["query_len"] > window
        for each in sequences(group)
    )


@in_a_group("slot_mapping", right="one -1 per new token")
def a_context_is_profiled(group: Group, inputs: dict[str, Any]) -> bool:
    """Without a cache vLLM gives every token of the sequence a -1, the context included."""
    return has_no_cache(group) and any(group["context_lens"])


# ---- counts and rows


@in_a_group("num_prefill_tokens", right="the new tokens of the prompts")
def more_ids_than_new_tokens(group: Group, inputs: dict[str, Any]) -> bool:
    """vLLM counts the ids that it was given, not the new tokens that have slots."""
    ids = sum(len(each) for each in group["input_tokens"])
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
        0 < each["window_blocks"] < len(row(group, each)) for each in sequences(group)
    )


@in_a_group("block_tables", right="the last blocks that hold tokens")
def a_window_counts_spare_blocks(group: Group, inputs: dict[str, Any]) -> bool:
    """vLLM counts the window's blocks from the end of the row, spare blocks included."""
    if group["is_prompt"] or group["prefix_cache_hit"]:
        return False
    size = inputs["block_size"]
    return any(
        0 < each["window_blocks"] < len(row(group, each))
        and len(row(group, each)) > -(-each["orig_seq_len"] // size)
        for each in sequences(group)
    )


@in_a_group("block_tables", right="the last blocks that hold tokens")
def a_hit_decode_has_a_window(group: Group, inputs: dict[str, Any]) -> bool:
    """After a prefix-cache hit vLLM gives a decode its whole row, but the window's length."""
    if group["is_prompt"] or not group["prefix_cache_hit"]:
        return False
    size = inputs["block_size"]
    return any(
        0 < each["window_blocks"] < -(-each["orig_seq_len"] // size)
        for each in sequences(group)
    )


def collects_none(group: Group, inputs: dict[str, Any]) -> bool:
    """Return whether vLLM's builder collects None as the row of a sequence."""
    is_read = inputs["chunked_prefill_enabled"] or not group["is_prompt"]
    return has_rows_of_none(group) and bool(is_read or group["prefix_cache_hit"])


@deviation(ADD, fields=["states[].block_tables"], right="an empty row")
def a_row_is_none(inputs: dict[str, Any]) -> bool:
    """vLLM collects None as a row, and the padding fails on it later."""
    groups = groups_of(inputs)
    return vllm_adds(inputs) and any(collects_none(group, inputs) for group in groups)


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


@deviation(
    ADD,
    fields=["states[].curr_seq_lens"],
    right="the tokens in the blocks that are kept",
)
def a_length_that_the_kept_blocks_do_not_hold(inputs: dict[str, Any]) -> bool:
    """vLLM does not compute the length of a decode under a window, but takes the given one."""
    size = inputs["block_size"]
    return vllm_adds(inputs) and any(
        each["seq_len"] != kept_len(group, each, size)
        for group in groups_of(inputs)
        if not group["is_prompt"]
        for each in sequences(group)
    )


def kept_len(group: Group, sequence: dict[str, Any], block_size: int) -> int:
    """Return the tokens of a decode that are in the blocks which its window keeps."""
    length, kept = sequence["orig_seq_len"], sequence["window_blocks"]
    if has_no_cache(group):
        return int(length)
    dropped = max(0, -(-length // block_size) - kept) if kept else 0
    return int(length - dropped * block_size)


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
            tokens = sum(sum(each["query_lens"]) for each in before)
            counted = sum(
                len(each["seq_ids"])
                * each["multi_modal_placeholder_maps"][modality]["dest_len"]
                for each in before
                if modality in (each["multi_modal_placeholder_maps"] or {})
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


# ---- build


def given_lens(inputs: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Return the query lengths and sequence lengths that follow from the groups."""
    size, groups = inputs["block_size"], inputs["inter_data_list"]
    query_lens = [each for group in groups for each in group["query_lens"]]
    seq_lens = [
        each["orig_seq_len"] if group["is_prompt"] else kept_len(group, each, size)
        for group in groups
        for each in sequences(group)
    ]
    return query_lens, seq_lens


def has_the_lengths(inputs: dict[str, Any]) -> bool:
    """Return whether the lengths of a build are those of its groups; True without a build."""
    if "calls" not in inputs and not inputs.get("build_first"):
        return True
    query_lens, seq_lens = given_lens(inputs)
    if "calls" not in inputs:
        return seq_lens == [
            each for group in inputs["inter_data_list"] for each in group["seq_lens"]
        ]
    padded = seq_lens + [1] * max(inputs["cuda_graph_pad_size"], 0)
    return bool(inputs["query_lens"] == query_lens and inputs["seq_lens"] == padded)


def is_built_here(inputs: dict[str, Any]) -> bool:
    """Return whether nothing is rejected here; of a script without a build, no group."""
    if is_rejected_here(inputs) or not has_the_lengths(inputs):
        return False
    if "calls" not in inputs:
        return True
    kinds = [group["is_prompt"] for group in inputs["inter_data_list"]]
    padded = len(recorded_rows(inputs)) + inputs["cuda_graph_pad_size"]
    is_fit = not any(kinds) and inputs["batch_size"] == padded
    return builds_in_a_row(inputs) == 1 and (is_fit or not is_graph(inputs))


def builds_in_a_row(inputs: dict[str, Any]) -> int:
    """Return how often the groups are added after the last prepare()."""
    calls = inputs["calls"]
    return len(calls) - 1 - max(i for i, each in enumerate(calls) if each == "prepare")


def vllm_builds(inputs: dict[str, Any]) -> bool:
    """Return whether vLLM builds: there is a new token, and the rows can be padded."""
    if not vllm_adds(inputs) or max(inputs["query_lens"], default=0) <= 0:
        return False
    if has_unequal_maps(inputs):
        return False
    if not is_graph(inputs):
        return not any(collects_none(group, inputs) for group in groups_of(inputs))
    rows = recorded_rows(inputs) * builds_in_a_row(inputs)
    width = inputs["runner_graph_block_tables"].shape[1]
    used = [index for index, each in enumerate(rows) if each]
    is_inside = not used or used[-1] < inputs["batch_size"]
    return is_inside and all(len(each) <= width for each in rows)


def has_unequal_maps(inputs: dict[str, Any]) -> bool:
    """Return whether a modality has more or fewer embeddings than placeholders, in vLLM."""
    counts: dict[str, int] = {}
    for group in inputs["inter_data_list"]:
        maps = group["multi_modal_placeholder_maps"] or {}
        for modality, each in maps.items() if group["is_prompt"] else ():
            rows, places = (
                sum(stop - start for start, stop in each[f"{side}_ranges"])
                for side in ("src", "dest")
            )
            counts[modality] = counts.get(modality, 0) + rows - places
    return any(counts.values())


@deviation(PREPARE, fields=["raises"], right="rejected")
def the_first_build_has_other_lengths(inputs: dict[str, Any]) -> bool:
    """vLLM does not compare the lengths with those of the groups."""
    groups = inputs["inter_data_list"]
    if not inputs["build_first"] or has_the_lengths(inputs) or not vllm_adds(inputs):
        return False
    is_empty = any(collects_none(group, inputs) for group in groups)
    has_tokens = any(each > 0 for group in groups for each in group["query_lens"])
    return has_tokens and not is_empty and not has_unequal_maps(inputs)


@deviation(BUILD, fields=["raises"], right="the blocks of the window, which fit")
def a_whole_row_does_not_fit_the_graph(inputs: dict[str, Any]) -> bool:
    """vLLM does not shorten the row of a decode after a prefix-cache hit."""
    if not is_graph(inputs) or not vllm_adds(inputs) or not is_built_here(inputs):
        return False
    width = inputs["runner_graph_block_tables"].shape[1]
    cut = [
        min(len(row(group, each)), each["window_blocks"] or len(row(group, each)))
        for group in inputs["inter_data_list"]
        for each in sequences(group)
    ]
    is_wide = any(len(each) > width for each in recorded_rows(inputs))
    return is_wide and all(each <= width for each in cut)


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


@deviation(BUILD, fields=["metadata.block_tables"], right="zeros")
def a_graph_table_has_old_ids(inputs: dict[str, Any]) -> bool:
    """vLLM keeps ids of an earlier step past shorter rows and in the padding rows."""
    buffer = inputs["runner_graph_block_tables"]
    if not is_graph(inputs) or not vllm_builds(inputs):
        return False
    rows = recorded_rows(inputs)
    used = buffer[: inputs["batch_size"]].tolist()
    lens = [len(each) for each in rows] + [0] * len(used)
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
