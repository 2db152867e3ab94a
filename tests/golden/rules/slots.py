"""Slots: start positions, short rows, and lengths that contradict each other."""

from typing import Any

from golden.deviations import deviation


def row_of(inputs: dict[str, Any]) -> list[int] | None:
    """Return the sequence's row of the block table, if there is one."""
    tables = inputs["block_tables"]
    row: list[int] | None = (tables or {}).get(str(inputs["seq_id"]))
    return row


def is_too_short(inputs: dict[str, Any]) -> bool:
    row = row_of(inputs)
    return row is not None and inputs["seq_len"] > inputs["block_size"] * len(row)


def stores_nothing(inputs: dict[str, Any]) -> bool:
    """Return whether all tokens are before the first position that is stored."""
    return max(inputs["start_idx"], inputs["context_len"]) >= inputs["seq_len"]


@deviation(
    "compute_slot_mapping_start_idx",
    fields=["start_idx"],
    right="the first position of the last sliding_window tokens of the whole sequence",
    value=lambda inputs: (
        inputs["context_len"] + inputs["query_len"] - inputs["sliding_window"]
    ),
)
def a_later_chunk_reaches_past_the_window(inputs: dict[str, Any]) -> bool:
    """vLLM ignores the context, so that later chunks of a prompt skip no token."""
    window, context = inputs["sliding_window"], inputs["context_len"]
    if not inputs["is_prompt"] or window is None:
        return False
    return bool(context > 0 and context + inputs["query_len"] > window)


@deviation(
    "compute_slot_mapping",
    fields=["slot_mapping", "num_appended"],
    right="one slot per new token, none of them stored",
)
def the_start_is_past_the_end(inputs: dict[str, Any]) -> bool:
    """vLLM appends one -1 per position before `start_idx`, also past the sequence's end."""
    if inputs["is_profile_run"] or row_of(inputs) is None or is_too_short(inputs):
        return False
    return bool(inputs["context_len"] <= inputs["seq_len"] < inputs["start_idx"])


@deviation("compute_slot_mapping", fields=["raises"], right="raises")
def the_context_is_longer_than_the_sequence(inputs: dict[str, Any]) -> bool:
    """vLLM does not compare the lengths, and stores nothing."""
    is_run = inputs["is_profile_run"] or row_of(inputs) is not None
    return is_run and inputs["context_len"] > inputs["seq_len"]


@deviation("compute_slot_mapping", fields=["raises"], right="raises: a row is expected")
def a_row_of_none_is_not_read(inputs: dict[str, Any]) -> bool:
    """vLLM accepts None as a row if no token of the sequence is stored."""
    has_none = str(inputs["seq_id"]) in (inputs["block_tables"] or {})
    is_none = has_none and row_of(inputs) is None
    return is_none and not inputs["is_profile_run"] and stores_nothing(inputs)


@deviation("compute_slot_mapping", fields=["raises"], right="raises before any slot")
def a_short_row_is_not_read(inputs: dict[str, Any]) -> bool:
    """vLLM only notices that a row is too short if a token of it is stored."""
    is_run = not inputs["is_profile_run"] and is_too_short(inputs)
    fits = inputs["context_len"] <= inputs["seq_len"]
    return is_run and fits and stores_nothing(inputs)


@deviation(
    "_compute_slot_mapping_python",
    "_compute_slot_mapping_numpy",
    fields=["raises"],
    right="raises: the range is reversed, or the row does not reach its end",
)
def an_empty_range_is_not_in_the_row(inputs: dict[str, Any]) -> bool:
    """vLLM accepts an empty range whatever its ends are."""
    begin, end = inputs["range_start"], inputs["range_end"]
    room = len(inputs["block_table"]) * inputs["block_size"]
    return bool(begin > end or begin == end > room)


@deviation(
    "v1_block_table",
    fields=["block_table"],
    right="0 past the end of every row",
)
def a_row_became_shorter(inputs: dict[str, Any]) -> bool:
    """vLLM keeps the ids of an earlier request past the end of a shorter row."""
    rows = replay(inputs)
    pairs = zip(rows.table, rows.held, strict=True)
    return not rows.fails and any(any(row[held:]) for row, held in pairs)


@deviation("v1_block_table", fields=["raises"], right="an IndexError for the position")
def a_position_is_past_its_row(inputs: dict[str, Any]) -> bool:
    """vLLM reads what is stored past the end of the row, or in the next row."""
    rows = replay(inputs)
    return rows.past_a_row and not rows.fails


@deviation("v1_block_table", fields=["raises"], right="a ValueError")
def a_run_does_not_divide_a_block(inputs: dict[str, Any]) -> bool:
    """vLLM accepts runs of positions that do not divide a block."""
    run, rows = inputs["dcp_kv_cache_interleave_size"], replay(inputs)
    divides = inputs["kernel_block_size"] % run == 0
    return not (divides or rows.fails or rows.past_a_row or rows.drops_a_block)


@deviation("v1_block_table", fields=["raises"], right="an IndexError for the row")
def a_block_is_appended_to_a_full_row(inputs: dict[str, Any]) -> bool:
    """vLLM drops a single block that is appended to a full row, and counts it."""
    rows = replay(inputs)
    return rows.drops_a_block and not rows.fails and not rows.past_a_row


class Rows:
    """vLLM's persistent rows, which are never cleared.

    Args:
        inputs: sizes of the table.
    """

    def __init__(self, inputs: dict[str, Any]) -> None:
        self.per_block = inputs["block_size"] // inputs["kernel_block_size"]
        self.per_entry = inputs["kernel_block_size"] * inputs["dcp_world_size"]
        self.width = inputs["max_num_blocks_per_req"] * self.per_block
        self.table = [[0] * self.width for _ in range(inputs["max_num_reqs"])]
        self.held = [0] * inputs["max_num_reqs"]
        self.past_a_row = self.drops_a_block = self.fails = False

    def append(self, row: int, block_ids: list[int]) -> None:
        parts = range(self.per_block)
        ids = [block * self.per_block + part for block in block_ids for part in parts]
        start = self.held[row]
        self.held[row] += len(ids)
        if self.held[row] <= self.width:
            self.table[row][start : start + len(ids)] = ids
        elif len(ids) == 1:
            self.drops_a_block = True
        else:
            self.fails = True

    def look_up(self, req: int, position: int) -> None:
        entry = position // self.per_entry
        self.past_a_row |= entry >= self.held[req]
        self.fails |= req * self.width + entry >= self.width * len(self.held)


def replay(inputs: dict[str, Any]) -> Rows:
    """Return the rows after the operations."""
    rows = Rows(inputs)
    for op in inputs["ops"]:
        if op["op"] in ("add_row", "append_row"):
            row = op["row_idx"]
            rows.held[row] = 0 if op["op"] == "add_row" else rows.held[row]
            rows.append(row, op["block_ids"])
        elif op["op"] == "move_row":
            source, target = op["src"], op["tgt"]
            count = rows.held[source]
            rows.table[target][:count] = rows.table[source][:count]
            rows.held[target] = count
        elif op["op"] == "swap_row":
            one, other = op["src"], op["tgt"]
            for column in (rows.table, rows.held):
                column[one], column[other] = column[other], column[one]  # type: ignore[index]
        elif op["op"] == "compute_slot_mapping":
            for req, position in zip(op["req_indices"], op["positions"], strict=True):
                rows.look_up(req, position)
    return rows
