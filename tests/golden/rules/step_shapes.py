"""Chunks, fast prefill, parameters of layers, ranks, and the masks of xFormers."""

from itertools import pairwise
from typing import Any

from golden.deviations import deviation

CHUNKS = "make_local_attention_virtual_batches"
FAST = "make_kv_sharing_fast_prefill_common_attn_metadata"
DERIVED = "create_fast_prefill_custom_backend"


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
    if not 0 <= count <= len(padded):
        return None
    found: list[int] = padded[:count].tolist()
    total = int(common["query_start_loc_cpu"][-1])
    return found if all(token < total for token in found) else None


def are_last_tokens(inputs: dict[str, Any], found: list[int]) -> bool:
    """Return whether they are the last tokens of their requests, in order."""
    starts = inputs["common_attn_metadata"]["query_start_loc_cpu"].tolist()
    expected = []
    for begin, end in pairwise(starts):
        count = sum(begin <= token < end for token in found)
        expected += range(end - count, end)
    return found == expected


@deviation(
    FAST, DERIVED, fields=["raises"], right="a ValueError that names the first token"
)
def other_than_the_last_tokens_are_wanted(inputs: dict[str, Any]) -> bool:
    """vLLM counts any tokens in any order, although causal attention takes the queries for the
    last tokens of each request."""
    found = logits(inputs)
    return found is not None and not are_last_tokens(inputs, found)


@deviation(FAST, DERIVED, fields=["raises"], right="a ValueError")
def more_logits_are_wanted_than_are_given(inputs: dict[str, Any]) -> bool:
    """vLLM slices the tokens whose logits are wanted without an error."""
    common = inputs["common_attn_metadata"]
    if common["max_query_len"] <= 1 or not names_its_logits(inputs):
        return False
    padded, count = common["logits_indices_padded"], common["num_logits_indices"]
    is_inside = all(token < num_tokens(common) for token in padded[:count].tolist())
    return is_inside and not 0 <= count <= len(padded)


@deviation(
    FAST,
    DERIVED,
    fields=["same_object", "result", "metadata", "underlying_build_saw"],
    right="the same object: there is nothing to leave out",
)
def no_request_has_new_tokens(inputs: dict[str, Any]) -> bool:
    """vLLM rewrites a step whose longest query is 0."""
    return has_no_tokens(inputs) and finds_its_logits(inputs)


@deviation(FAST, DERIVED, fields=["raises"], right="the same object")
def no_request_has_tokens_or_logits(inputs: dict[str, Any]) -> bool:
    """vLLM reads the logits although no token is new."""
    return has_no_tokens(inputs) and not finds_its_logits(inputs)


def has_no_tokens(inputs: dict[str, Any]) -> bool:
    return bool(inputs["common_attn_metadata"]["max_query_len"] == 0)


def num_tokens(common: dict[str, Any]) -> int:
    return int(common["query_start_loc_cpu"][-1])


def finds_its_logits(inputs: dict[str, Any]) -> bool:
    """Return whether the tokens are given, and all of them exist."""
    common = inputs["common_attn_metadata"]
    if not names_its_logits(inputs):
        return False
    wanted = common["logits_indices_padded"][: common["num_logits_indices"]]
    return all(token < num_tokens(common) for token in wanted.tolist())


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
def a_rank_or_a_length_does_not_exist(inputs: dict[str, Any]) -> bool:
    """vLLM counts the tokens of ranks that do not exist, and of lengths that are negative or
    exceed 32 bits."""
    ranks, rank, run = (
        inputs[name] for name in ("dcp_world_size", "dcp_rank", "interleave_size")
    )
    is_counted = ranks > 0 or (ranks == 0 and rank is None)
    if run == 0 or not is_counted or inputs["seq_lens"].dim() != 1:
        return False  # both raise
    is_rank = ranks > 0 and run > 0 and (rank is None or 0 <= rank < ranks)
    lens = inputs["seq_lens"].tolist()
    return not is_rank or not all(0 <= length < 2**31 for length in lens)


# ---- blocks of states

MAMBA = (
    "v033_mamba_get_block_table_tensor",
    "v033_mamba_get_block_table_tensor_more",
)


def is_selected(inputs: dict[str, Any]) -> bool:
    """Return whether every row has the blocks that vLLM selects for any mode but "none"."""
    size, (rows, width) = inputs["block_size"], inputs["block_table"].shape
    if size == 0 or rows != len(inputs["seq_lens"]):
        return False
    firsts = [max(length - 1, 0) // size for length in inputs["seq_lens"].tolist()]
    count = 1 + inputs["num_speculative_blocks"]
    return all(first + count <= width for first in firsts)


@deviation(
    *MAMBA,
    fields=["result", "same_object"],
    right="the whole table, in which the layer selects, as in vLLM 0.13",
)
def every_block_has_a_state(inputs: dict[str, Any]) -> bool:
    """vLLM 0.33 has no mode "all" any more, and selects as with "align"."""
    is_all = inputs["mamba_cache_mode"] == "all"
    return is_all and is_selected(inputs)


@deviation(*MAMBA, fields=["raises"], right="the whole table")
def every_block_has_a_state_and_a_row_is_too_short(inputs: dict[str, Any]) -> bool:
    """vLLM 0.33 selects with "all" as with "align", and finds no block."""
    is_all = inputs["mamba_cache_mode"] == "all"
    return is_all and not is_selected(inputs)


@deviation(*MAMBA, fields=["raises"], right="a ValueError")
def a_cache_mode_is_unknown(inputs: dict[str, Any]) -> bool:
    """vLLM treats every unknown mode as "align"."""
    is_known = inputs["mamba_cache_mode"] in ("none", "all", "align")
    return not is_known and is_selected(inputs)


# ---- xFormers' mask


def used_entries(inputs: dict[str, Any]) -> list[tuple[list[int], int]]:
    """Return each row of the block table and how many of its entries hold keys."""
    page = inputs["page_size"]
    pairs = zip(inputs["block_tables"].tolist(), inputs["kv_seqlen"], strict=True)
    return [(row, -(-length // page)) for row, length in pairs]


def has_lengths(inputs: dict[str, Any]) -> bool:
    """Return whether every request has both lengths and a row, which both sides need."""
    counts = {len(inputs[name]) for name in ("q_seqlen", "kv_seqlen", "block_tables")}
    return len(counts) == 1


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
    if not has_lengths(inputs) or has_more_queries_than_keys(inputs):
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
    """xFormers hides all keys from the first queries, or no key if it is not causal."""
    if not has_lengths(inputs):
        return False
    fits = all(used <= len(row) for row, used in used_entries(inputs))
    return fits and has_more_queries_than_keys(inputs)
