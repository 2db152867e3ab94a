"""One step: buffers longer than the batch, and methods of the metadata."""

from itertools import pairwise
from typing import Any

from golden.deviations import deviation

BUILD = "build_attn_metadata"
COMMON = "calls[].common_attn_metadata"


# ---- metadata of every layer


def cut_starts(inputs: dict[str, Any]) -> list[int]:
    starts: list[int] = inputs["query_start_loc"]["np"][: inputs["num_reqs"] + 1]
    return starts


def num_slots(inputs: dict[str, Any]) -> int:
    padded = inputs.get("num_tokens_padded")
    return int(inputs["num_tokens"] if padded is None else padded)


def has_too_few_tables(inputs: dict[str, Any]) -> bool:
    """Return whether a group has no table, slots or builder."""
    groups = len(inputs["kv_cache_groups"])
    builders = inputs.get("num_builders", len(inputs.get("builders", range(groups))))
    names = ("block_tables", "slot_mappings")
    return builders < groups or any(len(inputs[name]) < groups for name in names)


def per_group(inputs: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Return the table and slots of every group; none if both sides raise."""
    groups = range(len(inputs["kv_cache_groups"]))
    if has_too_few_tables(inputs) or not inputs["num_reqs"]:
        return []
    return [(inputs["block_tables"][i], inputs["slot_mappings"][i]) for i in groups]


@deviation(BUILD, fields=["raises"], right="a ValueError that names the buffer")
def a_buffer_is_shorter_than_the_batch(inputs: dict[str, Any]) -> bool:
    """vLLM slices a shorter buffer without an error."""
    reqs, groups = inputs["num_reqs"], inputs["kv_cache_groups"]
    if not reqs or has_too_few_tables(inputs) or not groups:
        return False  # both raise, or nothing is built
    starts, lens = inputs["query_start_loc"]["np"], inputs["seq_lens"]["np"]
    is_short = len(starts) <= reqs or len(lens) < reqs
    is_short |= len(inputs["num_computed_tokens_cpu"]) < reqs
    return is_short or any(
        len(table) < reqs or len(slots) < num_slots(inputs)
        for table, slots in per_group(inputs)
    )


@deviation(
    BUILD,
    fields=[f"{COMMON}.max_query_len"],
    right="the most new tokens of one request",
)
def several_requests_have_tokens(inputs: dict[str, Any]) -> bool:
    """vLLM takes the largest start, which is the number of tokens, as the longest query."""
    starts = cut_starts(inputs)
    if len(starts) < 2 or has_too_few_tables(inputs):
        return False
    lens = [end - begin for begin, end in pairwise(starts)]
    return bool(inputs["kv_cache_groups"]) and max(starts) != max(lens)


@deviation(BUILD, fields=[f"{COMMON}.block_table_tensor"], right="one row per request")
def a_table_is_longer_than_the_batch(inputs: dict[str, Any]) -> bool:
    """vLLM passes the whole buffer on, with rows of other requests."""
    return any(len(table) > inputs["num_reqs"] for table, _ in per_group(inputs))


@deviation(BUILD, fields=[f"{COMMON}.slot_mapping"], right="one slot per token")
def slots_are_longer_than_the_batch(inputs: dict[str, Any]) -> bool:
    """vLLM passes the whole buffer on."""
    return any(len(slots) > num_slots(inputs) for _, slots in per_group(inputs))


@deviation(
    BUILD, fields=[f"{COMMON}.num_computed_tokens_cpu"], right="one count per request"
)
def counts_are_longer_than_the_batch(inputs: dict[str, Any]) -> bool:
    """vLLM passes the whole buffer on."""
    is_used = bool(per_group(inputs))
    return is_used and len(inputs["num_computed_tokens_cpu"]) > inputs["num_reqs"]


# ---- methods of the metadata


@deviation(
    "v033_common_attention_metadata_methods",
    fields=["unpadded.positions"],
    right="the positions of the tokens that remain",
)
def positions_are_given(inputs: dict[str, Any]) -> bool:
    """vLLM drops the positions when it removes the padding."""
    return inputs["common_attn_metadata"].get("positions") is not None


@deviation(
    "v033_common_attention_metadata_methods",
    fields=["unpadded.mm_req_doc_ranges"],
    right="the ranges of the requests that remain",
)
def ranges_of_images_are_given(inputs: dict[str, Any]) -> bool:
    """vLLM drops the ranges when it removes the padding."""
    return inputs["common_attn_metadata"].get("mm_req_doc_ranges") is not None
