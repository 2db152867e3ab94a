"""Chunks, fast prefill, parameters of layers, ranks, and the masks of xFormers."""

from itertools import pairwise
from typing import Any

from golden.deviations import deviation

CHUNKS = "make_local_attention_virtual_batches"
FAST = "make_kv_sharing_fast_prefill_common_attn_metadata"


# ---- chunks


def chunked(inputs: dict[str, Any]) -> tuple[list[int], list[int]]:
    common = inputs["common_attn_metadata"]
    lens: list[int] = common["query_start_loc_cpu"].diff().tolist()
    return lens, common["seq_lens_cpu"].tolist()


def chunks_are_blocks(inputs: dict[str, Any]) -> bool:
    """Return whether both sides accept the sizes of chunks and blocks."""
    chunk, block = inputs["attn_chunk_size"], inputs.get("block_size", 0)
    return bool(block > 0 and chunk > 0 and chunk % block == 0)


def fits_its_row(inputs: dict[str, Any]) -> bool:
    """Return whether every sequence fits its row and contains its new tokens."""
    width = inputs["common_attn_metadata"]["block_table_tensor"].shape[1]
    room = width * inputs["block_size"]
    pairs = zip(*chunked(inputs), strict=True)
    return all(new <= length <= room for new, length in pairs)


@deviation(CHUNKS, fields=["raises"], right="raises")
def a_sequence_is_longer_than_its_row(inputs: dict[str, Any]) -> bool:
    """vLLM repeats the row's last block, and accepts more new tokens than tokens."""
    has_rows = inputs["common_attn_metadata"]["block_table_tensor"].numel() > 0
    if not (has_rows and chunks_are_blocks(inputs)):
        return False
    return reads_the_table(inputs) and not fits_its_row(inputs)


def virtual_seq_lens(inputs: dict[str, Any]) -> list[int]:
    """Return the keys of every chunk that has new tokens; none for an empty sequence."""
    chunk, found = inputs["attn_chunk_size"], []
    for new, length in zip(*chunked(inputs), strict=True):
        last = max(length - 1, 0) // chunk
        first = min((length - new) // chunk, last)
        found += [
            max(0, min(length - number * chunk, chunk))
            for number in range(first, last + 1)
        ]
    return found


@deviation(
    CHUNKS,
    fields=[
        f"result.{name}"
        for name in (
            "seq_lens",
            "max_seq_len",
            "num_computed_tokens_cpu",
            "block_table_tensor",
        )
    ],
    right="a virtual request without keys; all others are equal",
    value=virtual_seq_lens,
)
def a_padding_request_has_no_keys(inputs: dict[str, Any]) -> bool:
    """vLLM gives an empty sequence a virtual request with a whole chunk of keys."""
    return has_padding(inputs) and reads_the_table(inputs)


@deviation(CHUNKS, fields=["raises"], right="a virtual request without keys")
def a_padding_request_is_before_its_row(inputs: dict[str, Any]) -> bool:
    """vLLM reads the chunk before an empty sequence, which fails if the row is too short."""
    return has_padding(inputs) and not reads_the_table(inputs)


def has_padding(inputs: dict[str, Any]) -> bool:
    is_run = chunks_are_blocks(inputs) and fits_its_row(inputs)
    return is_run and 0 in chunked(inputs)[1]


def reads_the_table(inputs: dict[str, Any]) -> bool:
    """Return whether vLLM finds a block for every chunk.

    The chunks of an empty sequence, and of new tokens before their sequence, have negative
    numbers. Their blocks are counted from the end of the row, which must be that long.
    """
    chunk, block = inputs["attn_chunk_size"], inputs["block_size"]
    width = inputs["common_attn_metadata"]["block_table_tensor"].shape[1]
    pairs = zip(*chunked(inputs), strict=True)
    firsts = [length - max(new, 1) for new, length in pairs]
    return all(-(first // chunk) * chunk // block <= width for first in firsts)


@deviation(CHUNKS, fields=["result.causal"], right="as in the step")
def a_chunked_step_is_not_causal(inputs: dict[str, Any]) -> bool:
    """vLLM makes every virtual request causal."""
    is_run = chunks_are_blocks(inputs) and fits_its_row(inputs)
    is_causal = inputs["common_attn_metadata"].get("causal") is not False
    return is_run and reads_the_table(inputs) and not is_causal


# ---- fast prefill


def logits(inputs: dict[str, Any]) -> list[int] | None:
    """Return the tokens whose logits are wanted, if vLLM gets as far as to count them."""
    common = inputs["common_attn_metadata"]
    padded, count = (
        common.get("logits_indices_padded"),
        common.get("num_logits_indices"),
    )
    if common["max_query_len"] <= 1 or padded is None or count is None:
        return None
    found: list[int] = padded[:count].tolist()
    total = int(common["query_start_loc_cpu"][-1])
    return found if all(each < total for each in found) else None


def are_last_tokens(inputs: dict[str, Any], found: list[int]) -> bool:
    """Return whether they are the last tokens of their requests, in order."""
    starts = inputs["common_attn_metadata"]["query_start_loc_cpu"].tolist()
    expected = []
    for begin, end in pairwise(starts):
        count = sum(begin <= each < end for each in found)
        expected += range(end - count, end)
    return found == expected


@deviation(FAST, fields=["raises"], right="a ValueError that names the first token")
def other_than_the_last_tokens_are_wanted(inputs: dict[str, Any]) -> bool:
    """vLLM counts any tokens in any order, although causal attention takes the queries for the
    last tokens of each request."""
    found = logits(inputs)
    return found is not None and not are_last_tokens(inputs, found)


@deviation(
    FAST,
    fields=["same_object", "result"],
    right="the same object: there is nothing to leave out",
)
def no_request_has_new_tokens(inputs: dict[str, Any]) -> bool:
    """vLLM rewrites a step whose longest query is 0."""
    return has_no_tokens(inputs) and names_its_logits(inputs)


@deviation(FAST, fields=["raises"], right="the same object")
def no_request_has_tokens_or_logits(inputs: dict[str, Any]) -> bool:
    """vLLM asserts that the logits are given although there are no new tokens."""
    return has_no_tokens(inputs) and not names_its_logits(inputs)


def has_no_tokens(inputs: dict[str, Any]) -> bool:
    return bool(inputs["common_attn_metadata"]["max_query_len"] == 0)


def names_its_logits(inputs: dict[str, Any]) -> bool:
    common = inputs["common_attn_metadata"]
    names = ("logits_indices_padded", "num_logits_indices")
    return all(common.get(name) is not None for name in names)


@deviation(FAST, fields=["result.causal"], right="as in the step")
def a_fast_prefill_is_not_causal(inputs: dict[str, Any]) -> bool:
    """vLLM makes the step causal."""
    found = logits(inputs)
    is_run = found is not None and are_last_tokens(inputs, found)
    return is_run and inputs["common_attn_metadata"].get("causal") is False


# ---- classes and layers


@deviation(
    "subclass_attention_backend",
    fields=["on_instance"],
    right="the builder, as on the class",
    value=lambda inputs: inputs["builder_name"],
)
def a_backend_is_an_instance(inputs: dict[str, Any]) -> bool:
    """vLLM's method takes no argument, so that it fails on an instance."""
    return True


@deviation(
    "infer_global_hyperparameters",
    fields=["is_first_object"],
    right="a copy; the caller's entries do not change",
    value=lambda inputs: False,
)
def there_is_a_layer(inputs: dict[str, Any]) -> bool:
    """vLLM writes the flags into the caller's first entry and returns it."""
    return bool(inputs["per_layer_params"])


# ---- ranks


@deviation(
    "get_dcp_local_seq_lens",
    fields=["result"],
    right="[reqs, 1], as in 0.33",
    value=lambda inputs: inputs["seq_lens"][:, None].int(),
)
def there_is_one_rank(inputs: dict[str, Any]) -> bool:
    """vLLM 0.11 drops the axis of the ranks if there is only one."""
    return inputs["dcp_world_size"] == 1 and inputs["dcp_rank"] is None


@deviation("get_dcp_local_seq_lens", fields=["raises"], right="a ValueError")
def a_rank_does_not_exist(inputs: dict[str, Any]) -> bool:
    """vLLM counts the tokens of a rank that does not exist."""
    ranks, rank = inputs["dcp_world_size"], inputs["dcp_rank"]
    return rank is not None and not 0 <= rank < ranks


@deviation("v033_mamba_get_block_table_tensor", fields=["raises"], right="a ValueError")
def a_cache_mode_is_unknown(inputs: dict[str, Any]) -> bool:
    """vLLM treats every unknown mode as "align"."""
    return inputs["mamba_cache_mode"] not in ("none", "all", "align")


# ---- xFormers' mask


def used_entries(inputs: dict[str, Any]) -> list[tuple[list[int], int]]:
    """Return each row of the block table and how many of its entries hold keys."""
    page = inputs["page_size"]
    pairs = zip(inputs["block_tables"].tolist(), inputs["kv_seqlen"], strict=True)
    return [(row, -(-length // page)) for row, length in pairs]


def has_more_queries_than_keys(inputs: dict[str, Any]) -> bool:
    pairs = zip(inputs["q_seqlen"], inputs["kv_seqlen"], strict=True)
    return any(queries > keys for queries, keys in pairs)


@deviation(
    "paged_block_diagonal_causal_mask",
    fields=["visible_physical_keys"],
    right="entries past the end of a row are not read",
)
def an_unused_entry_names_a_used_page(inputs: dict[str, Any]) -> bool:
    """xFormers writes its mask page by page, so that an unused entry hides a used page again."""
    if has_more_queries_than_keys(inputs):
        return False
    return any(
        queries > 0 and set(row[used:]) & set(row[:used])
        for (row, used), queries in zip(
            used_entries(inputs), inputs["q_seqlen"], strict=True
        )
    )


@deviation(
    "paged_block_diagonal_causal_mask",
    fields=["raises"],
    right="raises: a query is part of its sequence",
)
def there_are_more_queries_than_keys(inputs: dict[str, Any]) -> bool:
    """xFormers hides all keys from the first queries."""
    fits = all(used <= len(row) for row, used in used_entries(inputs))
    return fits and has_more_queries_than_keys(inputs)
