"""Which inputs are refused, and in which words?

Both twins call these functions first, so both refuse the same things with the same sentence,
before anything is written. An error gives the name, the value, what was expected and a way on.

Shapes, dtypes and host numbers are always checked. Contents (does this slot lie in the cache?)
must be read from the device, which stops the host and is illegal while a CUDA graph is captured:
the reference always reads them, the twin only if `values_checked()`.
"""

import os
from collections.abc import Sequence

import torch
from torch import Tensor

from .kinds import CACHE_DTYPES

FLOATS = (*CACHE_DTYPES, torch.float64)


def values_checked() -> bool:
    """Tell whether the twin reads contents too: PAGETWIN_CHECK_VALUES=1."""
    return os.environ.get("PAGETWIN_CHECK_VALUES") == "1"


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


def check_block_rows(rows: Sequence[Sequence[int]], max_blocks: int) -> None:
    """Refuse a row longer than the table is wide, and a negative block id."""
    for req, row in enumerate(rows):
        if len(row) > max_blocks:
            raise IndexError(
                f"rows[{req}] has {len(row)} blocks: expected at most max_blocks ="
                f" {max_blocks}; make the table wider"
            )
        if len(row) and min(row) < 0:
            entry = next(i for i, block_id in enumerate(row) if block_id < 0)
            raise IndexError(
                f"rows[{req}][{entry}] = {row[entry]}: expected a block id from 0"
            )


def check_append_blocks(
    block_table: Tensor, num_blocks: Tensor, new_blocks: Sequence[Sequence[int]]
) -> None:
    """Refuse blocks that do not fit behind their row."""
    check_block_table(block_table)
    reqs, max_blocks = block_table.shape
    check_length("num_blocks", num_blocks, reqs, "rows of the block table")
    if len(new_blocks) != reqs:
        raise ValueError(
            f"new_blocks has {len(new_blocks)} lists: expected {reqs}, one for each row of"
            " the block table (an empty list where nothing is added)"
        )
    for req, (held, row) in enumerate(
        zip(num_blocks.tolist(), new_blocks, strict=True)
    ):
        if held < 0 or held + len(row) > max_blocks:
            raise IndexError(
                f"row {req} holds {held} blocks and gets {len(row)} more: expected at most"
                f" {max_blocks}, the width of the block table"
            )
    check_block_rows(new_blocks, max_blocks)


def check_block_table(block_table: Tensor) -> None:
    """Refuse a table that is not one row of int32 ids a request."""
    check_dtype("block_table", block_table, torch.int32)
    if block_table.dim() != 2:
        raise ValueError(
            f"block_table has shape {list(block_table.shape)}: expected [reqs, max_blocks]"
        )


def check_length(name: str, tensor: Tensor, expected: int, what: str) -> None:
    """Refuse a vector of another length than the thing it describes."""
    if tensor.dim() != 1 or tensor.shape[0] != expected:
        raise ValueError(
            f"{name} has shape {list(tensor.shape)}: expected [{expected}] ({what})"
        )


def check_dtype(name: str, tensor: Tensor, *expected: torch.dtype) -> None:
    """Refuse a tensor of another element type."""
    if tensor.dtype not in expected:
        names = " or ".join(str(dtype) for dtype in expected)
        raise TypeError(f"{name} is {tensor.dtype}: expected {names}")


def check_same_device(**tensors: Tensor | None) -> None:
    """Refuse tensors that do not all lie on the first one's device."""
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    first, leader = next(iter(present.items()))
    for name, tensor in present.items():
        if tensor.device != leader.device:
            raise ValueError(
                f"{name} lies on {tensor.device}: expected {leader.device}, where {first}"
                f" is; move it there first"
            )


def check_one_sequence(seq_len: int, context_len: int, block_size: int) -> None:
    """Refuse lengths that no sequence can have."""
    check_positive(block_size=block_size)
    if not 0 <= context_len <= seq_len:
        raise ValueError(
            f"context_len = {context_len}, seq_len = {seq_len}: expected"
            " 0 <= context_len <= seq_len"
        )


def check_row_reaches(row_len: int, seq_len: int, block_size: int) -> None:
    """Refuse a sequence that needs more blocks than its row has entries."""
    if seq_len > row_len * block_size:
        raise IndexError(
            f"position {seq_len - 1} needs entry {(seq_len - 1) // block_size} of the block"
            f" table: expected an entry below {row_len}, the length of the row; append a"
            " block first"
        )


def check_batch_lengths(
    query_lens: Sequence[int], num_computed_tokens: Sequence[int]
) -> None:
    """Refuse two descriptions of the batch that differ in length, and negative counts."""
    if len(query_lens) != len(num_computed_tokens):
        raise ValueError(
            f"query_lens has {len(query_lens)} entries but num_computed_tokens has"
            f" {len(num_computed_tokens)}: expected one of each a request"
        )
    for name, counts in (
        ("query_lens", query_lens),
        ("num_computed_tokens", num_computed_tokens),
    ):
        for req, count in enumerate(counts):
            if count < 0:
                raise ValueError(f"{name}[{req}] = {count}: expected at least 0")


def check_sequences_fit(
    query_lens: Sequence[int],
    num_computed_tokens: Sequence[int],
    row_lens: Sequence[int],
    block_size: int,
) -> None:
    """Refuse a request whose sequence is longer than its row of the block table."""
    if len(row_lens) != len(query_lens):
        raise ValueError(
            f"the block table has {len(row_lens)} rows: expected {len(query_lens)}, one a"
            " request"
        )
    batch = zip(query_lens, num_computed_tokens, row_lens, strict=True)
    for req, (query_len, computed, row_len) in enumerate(batch):
        if computed + query_len > row_len * block_size:
            raise IndexError(
                f"request {req} has {computed} + {query_len} tokens but its row of the"
                f" block table holds {row_len} blocks of {block_size}: expected at most"
                f" {row_len * block_size} tokens; append a block first"
            )


def check_start_loc(
    name: str, starts: Tensor, reqs: int, num_tokens: int, contents: bool
) -> None:
    """Refuse starts that do not begin at 0, fall, or end past the tokens there are."""
    check_dtype(name, starts, torch.int32)
    check_length(name, starts, reqs + 1, "requests + 1")
    if not contents:
        return
    values = starts.tolist()
    if values[0] != 0:
        raise ValueError(f"{name}[0] = {values[0]}: expected 0")
    for req in range(reqs):
        if values[req + 1] < values[req]:
            raise ValueError(
                f"{name}[{req + 1}] = {values[req + 1]} is less than {name}[{req}] ="
                f" {values[req]}: expected starts that never fall"
            )
    if values[-1] > num_tokens:
        raise ValueError(
            f"{name}[{reqs}] = {values[-1]}: expected at most {num_tokens}, the tokens"
            " there are"
        )


def check_slot_mapping_device(
    query_start_loc: Tensor,
    num_computed_tokens: Tensor,
    block_table: Tensor,
    block_size: int,
    num_tokens: int,
    contents: bool,
) -> None:
    """Refuse a batch whose slots cannot be computed."""
    check_positive(block_size=block_size)
    check_not_negative(num_tokens=num_tokens)
    check_dtype("num_computed_tokens", num_computed_tokens, torch.int32)
    check_block_table(block_table)
    reqs, max_blocks = block_table.shape
    check_length("num_computed_tokens", num_computed_tokens, reqs, "requests")
    check_same_device(
        block_table=block_table,
        query_start_loc=query_start_loc,
        num_computed_tokens=num_computed_tokens,
    )
    check_start_loc("query_start_loc", query_start_loc, reqs, num_tokens, contents)
    if contents:
        query_lens = query_start_loc.diff().tolist()
        computed = num_computed_tokens.tolist()
        check_batch_lengths(query_lens, computed)
        check_sequences_fit(query_lens, computed, [max_blocks] * reqs, block_size)


def check_caches(key_cache: Tensor, value_cache: Tensor) -> None:
    """Refuse a key cache and a value cache that do not belong together."""
    check_dtype("key_cache", key_cache, *FLOATS)
    check_dtype("value_cache", value_cache, key_cache.dtype)
    if key_cache.dim() != 4 or key_cache.shape != value_cache.shape:
        raise ValueError(
            f"key_cache has shape {list(key_cache.shape)} and value_cache"
            f" {list(value_cache.shape)}: expected the same"
            " [num_blocks, block_size, kv_heads, head_size]"
        )
    check_same_device(key_cache=key_cache, value_cache=value_cache)


def check_reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    contents: bool,
) -> None:
    """Refuse a write that does not fit the cache, before any of it is done."""
    check_caches(key_cache, value_cache)
    num_blocks, block_size, kv_heads, head_size = key_cache.shape
    for name, tensor in (("key", key), ("value", value)):
        check_dtype(name, tensor, key_cache.dtype)
        if tensor.dim() != 3 or tuple(tensor.shape[1:]) != (kv_heads, head_size):
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}: expected [tokens, {kv_heads},"
                f" {head_size}], as the cache has"
            )
    check_same_device(
        key_cache=key_cache, key=key, value=value, slot_mapping=slot_mapping
    )
    check_dtype("slot_mapping", slot_mapping, torch.int64)
    tokens = min(key.shape[0], value.shape[0])
    if slot_mapping.dim() != 1 or slot_mapping.shape[0] > tokens:
        raise ValueError(
            f"slot_mapping has shape {list(slot_mapping.shape)}: expected at most"
            f" [{tokens}], the tokens of key and value"
        )
    if not contents:
        return
    num_slots = num_blocks * block_size
    owner: dict[int, int] = {}
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot < 0:
            continue
        if slot >= num_slots:
            raise IndexError(
                f"slot_mapping[{token}] = {slot} is outside the cache: expected -1 (do not"
                f" store) or 0 <= slot < {num_slots}"
            )
        if slot in owner:
            raise ValueError(
                f"slot_mapping[{token}] = {slot} is also slot_mapping[{owner[slot]}]:"
                " expected one token a slot, since the order of two writes is not defined"
            )
        owner[slot] = token


def check_block_ids(
    block_table: Tensor, seq_lens: Tensor, block_size: int, num_blocks: int
) -> None:
    """Refuse a length its row cannot hold, and a used entry that names no block."""
    max_blocks = block_table.shape[1]
    rows, lens = block_table.tolist(), seq_lens.tolist()
    for req, (row, seq_len) in enumerate(zip(rows, lens, strict=True)):
        if not 0 <= seq_len <= max_blocks * block_size:
            raise IndexError(
                f"seq_lens[{req}] = {seq_len}: expected 0 to {max_blocks * block_size},"
                f" what {max_blocks} blocks of {block_size} hold"
            )
        for entry in range(-(-seq_len // block_size)):
            if not 0 <= row[entry] < num_blocks:
                raise IndexError(
                    f"block_table[{req}, {entry}] = {row[entry]} is outside the cache:"
                    f" expected 0 <= block id < {num_blocks}"
                )


def check_gather_cache(
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_start_loc: Tensor,
    num_tokens: int,
    contents: bool,
) -> None:
    """Refuse a gather that would read outside the cache."""
    check_caches(key_cache, value_cache)
    check_not_negative(num_tokens=num_tokens)
    check_block_table(block_table)
    check_same_device(
        key_cache=key_cache, block_table=block_table, seq_start_loc=seq_start_loc
    )
    check_start_loc(
        "seq_start_loc", seq_start_loc, block_table.shape[0], num_tokens, contents
    )
    if contents:
        num_blocks, block_size = key_cache.shape[:2]
        check_block_ids(block_table, seq_start_loc.diff(), block_size, num_blocks)


def check_block_mapping(
    block_mapping: Tensor, num_source: int, num_destination: int, same_cache: bool
) -> None:
    """Refuse pairs of blocks whose copies would leave the cache or depend on their order."""
    check_dtype("block_mapping", block_mapping, torch.int64)
    if block_mapping.dim() != 2 or block_mapping.shape[1] != 2:
        raise ValueError(
            f"block_mapping has shape {list(block_mapping.shape)}: expected [pairs, 2],"
            " source and destination"
        )
    if block_mapping.device.type != "cpu":
        raise ValueError(
            f"block_mapping lies on {block_mapping.device}: expected cpu, where the block"
            " manager made it"
        )
    sources = {source for source, _ in block_mapping.tolist()}
    taken: set[int] = set()
    for pair, (source, destination) in enumerate(block_mapping.tolist()):
        if not 0 <= source < num_source:
            raise IndexError(
                f"block_mapping[{pair}] copies from block {source}: expected 0 <= block id"
                f" < {num_source}"
            )
        if not 0 <= destination < num_destination:
            raise IndexError(
                f"block_mapping[{pair}] copies to block {destination}: expected"
                f" 0 <= block id < {num_destination}"
            )
        if destination in taken:
            raise ValueError(
                f"block_mapping[{pair}] copies to block {destination}, as an earlier pair"
                " does: expected every destination once"
            )
        if same_cache and destination in sources:
            raise ValueError(
                f"block_mapping[{pair}] copies to block {destination}, which another pair"
                " copies from: expected no block on both sides; make two calls"
            )
        taken.add(destination)


def check_kv_caches_alike(caches: Sequence[Tensor]) -> None:
    """Refuse layers whose caches differ in shape or element type."""
    for layer, cache in enumerate(caches):
        if cache.dim() != 5 or cache.shape[0] != 2:
            raise ValueError(
                f"cache {layer} has shape {list(cache.shape)}: expected"
                " [2, num_blocks, block_size, kv_heads, head_size]"
            )
        if cache.dtype != caches[0].dtype or cache.shape[2:] != caches[0].shape[2:]:
            raise ValueError(
                f"cache {layer} is {list(cache.shape)} {cache.dtype} and cache 0"
                f" {list(caches[0].shape)} {caches[0].dtype}: expected blocks alike"
            )


def check_paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    max_seq_len: int,
    out: Tensor | None,
    lse: Tensor | None,
    contents: bool,
) -> None:
    """Refuse a batch whose attention is not defined, before anything is computed."""
    check_caches(key_cache, value_cache)
    num_blocks, block_size, kv_heads, head_size = key_cache.shape
    check_dtype("query", query, key_cache.dtype)
    if query.dim() != 3 or query.shape[2] != head_size:
        raise ValueError(
            f"query has shape {list(query.shape)}: expected [tokens, query_heads,"
            f" {head_size}], as the cache has"
        )
    tokens, query_heads, _ = query.shape
    check_positive(num_query_heads=query_heads, num_kv_heads=kv_heads)
    if query_heads % kv_heads:
        raise ValueError(
            f"num_query_heads = {query_heads} is not a multiple of num_kv_heads ="
            f" {kv_heads}"
        )
    check_block_table(block_table)
    check_dtype("seq_lens", seq_lens, torch.int32)
    reqs, max_blocks = block_table.shape
    check_length("seq_lens", seq_lens, reqs, "rows of the block table")
    check_same_device(
        key_cache=key_cache,
        query=query,
        block_table=block_table,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        out=out,
        lse=lse,
    )
    check_not_negative(max_query_len=max_query_len, max_seq_len=max_seq_len)
    if max_seq_len > max_blocks * block_size:
        raise IndexError(
            f"max_seq_len = {max_seq_len}: expected at most {max_blocks * block_size}, what"
            f" a row of {max_blocks} blocks of {block_size} holds"
        )
    if out is not None and out.shape != query.shape:
        raise ValueError(
            f"out has shape {list(out.shape)}: expected {list(query.shape)}, as query has"
        )
    if lse is not None and tuple(lse.shape) != (query_heads, tokens):
        raise ValueError(
            f"lse has shape {list(lse.shape)}: expected [{query_heads}, {tokens}]"
        )
    check_start_loc("query_start_loc", query_start_loc, reqs, tokens, contents)
    if not contents:
        return
    check_block_ids(block_table, seq_lens, block_size, num_blocks)
    batch = zip(query_start_loc.diff().tolist(), seq_lens.tolist(), strict=True)
    for req, (query_len, seq_len) in enumerate(batch):
        if query_len > seq_len:
            raise ValueError(
                f"request {req} has {query_len} new tokens but seq_lens[{req}] = {seq_len}:"
                " expected the new tokens to be part of the sequence"
            )
        if query_len > max_query_len:
            raise ValueError(
                f"request {req} has {query_len} new tokens: expected at most max_query_len"
                f" = {max_query_len}"
            )
        if seq_len > max_seq_len:
            raise ValueError(
                f"seq_lens[{req}] = {seq_len}: expected at most max_seq_len = {max_seq_len}"
            )
