"""What vLLM and pagetwin do with sequence groups: conditions that several rules share."""

from collections.abc import Iterator
from typing import Any

Group = dict[str, Any]


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
        for sequence in sequences(group):
            whole, blocks = row(group, sequence), sequence["window_blocks"]
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
    names = [str(seq_id) for seq_id in group["seq_ids"]]
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
        placeholders["dest_len"] != query_len
        for placeholders in maps
        for query_len in group["query_lens"]
    )


def collects_none(group: Group, inputs: dict[str, Any]) -> bool:
    """Return whether vLLM's builder collects None as the row of a sequence."""
    is_read = inputs["chunked_prefill_enabled"] or not group["is_prompt"]
    return has_rows_of_none(group) and bool(is_read or group["prefix_cache_hit"])


def kept_len(group: Group, sequence: dict[str, Any], block_size: int) -> int:
    """Return the tokens of a decode that are in the blocks which its window keeps."""
    length, kept = sequence["orig_seq_len"], sequence["window_blocks"]
    if has_no_cache(group):
        return int(length)
    dropped = max(0, -(-length // block_size) - kept) if kept else 0
    return int(length - dropped * block_size)


def given_lens(inputs: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Return the query lengths and sequence lengths that follow from the groups."""
    size, groups = inputs["block_size"], inputs["inter_data_list"]
    query_lens = [length for group in groups for length in group["query_lens"]]
    seq_lens = [
        sequence["orig_seq_len"]
        if group["is_prompt"]
        else kept_len(group, sequence, size)
        for group in groups
        for sequence in sequences(group)
    ]
    return query_lens, seq_lens


def has_the_lengths(inputs: dict[str, Any]) -> bool:
    """Return whether the lengths of a build are those of its groups; True without a build."""
    if "calls" not in inputs and not inputs.get("build_first"):
        return True
    query_lens, seq_lens = given_lens(inputs)
    if "calls" not in inputs:
        return seq_lens == [
            length
            for group in inputs["inter_data_list"]
            for length in group["seq_lens"]
        ]
    padded = seq_lens + [1] * max(inputs["cuda_graph_pad_size"], 0)
    return bool(inputs["query_lens"] == query_lens and inputs["seq_lens"] == padded)


def is_built_here(inputs: dict[str, Any]) -> bool:
    """Return whether nothing is rejected here; of a script without a build, no group."""
    if is_rejected_here(inputs) or not has_the_lengths(inputs):
        return False
    if "calls" not in inputs:
        return True
    if not is_prepared(inputs):
        return False
    kinds = [group["is_prompt"] for group in inputs["inter_data_list"]]
    padded = len(recorded_rows(inputs)) + inputs["cuda_graph_pad_size"]
    is_fit = not any(kinds) and inputs["batch_size"] == padded
    return builds_in_a_row(inputs) == 1 and (is_fit or not is_graph(inputs))


def builds_in_a_row(inputs: dict[str, Any]) -> int:
    """Return how often the groups are added after the last prepare()."""
    calls = inputs["calls"]
    return len(calls) - 1 - max(i for i, call in enumerate(calls) if call == "prepare")


def is_prepared(inputs: dict[str, Any]) -> bool:
    """Return whether the builder is prepared before it builds, which both sides need."""
    return bool(inputs["calls"]) and inputs["calls"][0] == "prepare"


def vllm_builds(inputs: dict[str, Any]) -> bool:
    """Return whether vLLM builds: there is a new token, and the rows can be padded."""
    if not vllm_adds(inputs) or max(inputs["query_lens"], default=0) <= 0:
        return False
    if not is_prepared(inputs):
        return False
    if has_unequal_maps(inputs):
        return False
    if not is_graph(inputs):
        return not any(collects_none(group, inputs) for group in groups_of(inputs))
    rows = recorded_rows(inputs) * builds_in_a_row(inputs)
    width = inputs["runner_graph_block_tables"].shape[1]
    used = [index for index, own_row in enumerate(rows) if own_row]
    is_inside = not used or used[-1] < inputs["batch_size"]
    return is_inside and all(len(own_row) <= width for own_row in rows)


def has_unequal_maps(inputs: dict[str, Any]) -> bool:
    """Return whether a modality has more or fewer embeddings than placeholders, in vLLM."""
    counts: dict[str, int] = {}
    for group in inputs["inter_data_list"]:
        maps = group["multi_modal_placeholder_maps"] or {}
        for modality, placeholders in maps.items() if group["is_prompt"] else ():
            rows, places = (
                sum(stop - start for start, stop in placeholders[f"{side}_ranges"])
                for side in ("src", "dest")
            )
            counts[modality] = counts.get(modality, 0) + rows - places
    return any(counts.values())
