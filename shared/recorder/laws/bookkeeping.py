"""Laws of one step's metadata: lengths, block tables, slots, padding, writers.

Each law takes a step on the host and returns the first violation, or None. All laws of a step
together cost a few numpy operations on arrays of its size.
"""

from collections.abc import Callable

import numpy as np

from ...contract.kinds import PAD_SLOT_ID
from ..findings import Corruption
from ..step import HostStep


def check_starts(step: HostStep) -> Corruption | None:
    """Each request's new tokens come after those of the request before it."""
    starts = step.query_start_loc
    if len(starts) != len(step.seq_lens) + 1 or starts[0] != 0:
        return Corruption(
            "starts",
            f"query_start_loc has {len(starts)} entries from"
            f" {int(starts[0]) if len(starts) else 'nothing'}: expected"
            f" {len(step.seq_lens) + 1} entries from 0",
        )
    wrong = np.flatnonzero(step.query_lens < 0)
    if wrong.size:
        row = int(wrong[0])
        return Corruption(
            "starts",
            f"query_start_loc[{row + 1}] = {int(starts[row + 1])}: expected at least"
            f" {int(starts[row])}, the start of the request",
            row,
        )
    return None


def check_lengths(step: HostStep) -> Corruption | None:
    """Lengths fit the new tokens, the rows of the block table, and the upper bounds."""
    query_lens, seq_lens = step.query_lens, step.seq_lens
    slots = step.block_table.shape[1] * step.block_size
    real = query_lens > 0
    for wrong, words in (
        (real & (seq_lens < query_lens), "at least its {query} new tokens"),
        (real & (seq_lens > step.max_seq_len), "at most max_seq_len = {longest}"),
        (real & (seq_lens > slots), "at most {slots}, what its row holds"),
    ):
        rows = np.flatnonzero(wrong)
        if rows.size:
            row = int(rows[0])
            expected = words.format(
                query=int(query_lens[row]), longest=step.max_seq_len, slots=slots
            )
            return Corruption(
                "lengths", f"seq_lens = {int(seq_lens[row])}: expected {expected}", row
            )
    rows = np.flatnonzero(query_lens > step.max_query_len)
    if rows.size:
        row = int(rows[0])
        return Corruption(
            "lengths",
            f"{int(query_lens[row])} new tokens: expected at most max_query_len ="
            f" {step.max_query_len}",
            row,
        )
    return None


def check_block_ids(step: HostStep) -> Corruption | None:
    """Every block that a sequence uses is a block of the cache."""
    table = step.block_table
    past = np.inf if step.num_blocks is None else step.num_blocks
    is_wrong = table < 0
    if step.entries.max(initial=-1) >= past:
        is_wrong |= table >= past
    is_wrong &= step.used
    if not is_wrong.any():
        return None
    row, column = map(int, np.argwhere(is_wrong)[0])
    last = "" if step.num_blocks is None else f" to {step.num_blocks - 1}"
    return Corruption(
        "block ids",
        f"entry {column} of its block-table row is {int(step.block_table[row, column])}:"
        f" expected a block of the cache, from 0{last}",
        row,
    )


def check_slots(step: HostStep) -> Corruption | None:
    """The slot of each new token is at its position, in a block of its request."""
    slots = step.slot_mapping[: step.num_tokens]
    if not step.stores_all:
        return None
    tokens = np.arange(step.num_tokens)
    if len(slots) < len(tokens):
        return Corruption(
            "slots",
            f"slot_mapping has {len(slots)} entries: expected {len(tokens)}, one per new"
            " token",
        )
    rows = np.repeat(np.arange(len(step.seq_lens)), step.query_lens)
    ends = step.query_start_loc[1:]
    positions = step.seq_lens[rows] - ends[rows] + tokens
    columns, offsets = np.divmod(positions, step.block_size)
    blocks = step.block_table[rows, columns].astype(np.int64)
    wrong = np.flatnonzero(slots != blocks * step.block_size + offsets)
    if not wrong.size:
        return None
    token = int(wrong[0])
    row, slot = int(rows[token]), int(slots[token])
    expected = int(blocks[token]) * step.block_size + int(offsets[token])
    own = step.blocks_of(row).tolist()
    if slot == PAD_SLOT_ID:
        where = "it would not be stored"
    elif slot // step.block_size in own:
        where = "another slot of the same request"
    else:
        where = f"in block {slot // step.block_size}, which is not in its row"
    return Corruption(
        "slots",
        f"new token {token - int(step.query_start_loc[row])} at position"
        f" {int(positions[token])} has slot {slot} ({where}): expected slot {expected}",
        row,
    )


def check_padding(step: HostStep) -> Corruption | None:
    """Tokens after those of the last request have the slot PAD_SLOT_ID."""
    padding = step.slot_mapping[step.num_tokens :]
    wrong = np.flatnonzero(padding != PAD_SLOT_ID)
    if not wrong.size:
        return None
    token = step.num_tokens + int(wrong[0])
    slot = int(padding[wrong[0]])
    holder = np.argwhere(step.used & (step.block_table == slot // step.block_size))
    whose = ""
    row = None
    if holder.size:
        row = int(holder[0][0])
        whose = ", in a block of a request"
    return Corruption(
        "padding",
        f"padded row {token} has slot {slot}{whose}: expected {PAD_SLOT_ID}, because the"
        f" requests have {step.num_tokens} tokens",
        row,
    )


def check_writers(step: HostStep) -> Corruption | None:
    """No two tokens of a step have the same slot."""
    slots = step.slot_mapping
    ordered = np.sort(slots)
    if not ((ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0)).any():
        return None
    order = np.argsort(slots, kind="stable")
    ordered = slots[order]
    twice = np.flatnonzero((ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0))
    first, second = (int(order[int(twice[0]) + offset]) for offset in (0, 1))
    row = min(step.row_of(first), len(step.seq_lens) - 1)
    return Corruption(
        "one writer",
        f"tokens {first} and {second} of the step both have slot {int(slots[first])}:"
        " expected different slots",
        row,
    )


def check_shared_blocks(step: HostStep) -> Corruption | None:
    """A block that a request writes is in no other request's row, except as a prefix hit.

    A request may join in the step that fills a block of its prefix: all slots of the block are
    keys that it has not computed itself, and the block is at the same index of both rows.
    """
    if not step.stores_all:
        return None
    entries, blocks = step.entries, step.written_blocks
    size = int(max(entries.max(initial=0), blocks.max(initial=0))) + 1
    # the last element is that of the entries that are not used
    is_written = np.zeros(size + 1, dtype=np.bool_)
    is_written[blocks] = True
    # the slots are right, so each of these blocks is in the row of its writer
    if np.count_nonzero(is_written[entries]) == np.count_nonzero(is_written):
        return None
    stored = np.flatnonzero(step.slot_mapping[: step.num_tokens] >= 0)
    writers = np.searchsorted(step.query_start_loc, stored, side="right") - 1
    positions = step.seq_lens[writers] - step.query_start_loc[writers + 1] + stored
    written = step.slot_mapping[stored] // step.block_size
    writer_of, column_of = (np.full(size + 1, -1, dtype=np.int64) for _ in range(2))
    writer_of[written], column_of[written] = writers, positions // step.block_size
    writer = writer_of[entries]
    rows = np.arange(len(step.seq_lens))[:, None]
    ends = (np.arange(entries.shape[1]) + 1) * step.block_size
    is_prefix_hit = (
        (column_of[entries] == np.arange(entries.shape[1]))
        & ((step.seq_lens - step.query_lens)[:, None] >= ends)
        & (step.seq_lens[writer] >= ends)
    )
    wrong = (writer != rows) & (writer >= 0) & ~is_prefix_hit
    if not wrong.any():
        return None
    row, column = map(int, np.argwhere(wrong)[0])
    return Corruption(
        "shared blocks",
        f"the request in row {int(writer[row, column])} writes to block"
        f" {int(entries[row, column])}, which is entry {column} of the row of another"
        " request: expected a block that only the writer holds",
        row,
    )


LAWS: tuple[Callable[[HostStep], Corruption | None], ...] = (
    check_starts,
    check_lengths,
    check_block_ids,
    check_slots,
    check_padding,
    check_writers,
    check_shared_blocks,
)
"""All laws of one step, in the order in which they are checked. A law may rely on those before."""

LAWS_OF_ROWS = (check_block_ids, check_shared_blocks)
"""Laws that follow if each row is that of a request, and no written block has another holder."""


def check_step(step: HostStep, has_own_rows: bool = False) -> Corruption | None:
    """Return the first violation of a step. A step that stores nothing at all is not checked.

    Engines run such steps to compile, to capture graphs, and on idle ranks.

    Args:
        step: the step.
        has_own_rows: whether each row is one that the scheduler gave to its request, of blocks of
            the cache, and no other request holds one that is written. `LAWS_OF_ROWS` are not
            checked then.
    """
    if step.stores_all and step.num_tokens and not (step.slot_mapping >= 0).any():
        return None
    for law in LAWS:
        if has_own_rows and law in LAWS_OF_ROWS:
            continue
        finding = law(step)
        if finding is not None:
            return finding
    return None


def check_groups(steps: list[HostStep]) -> Corruption | None:
    """Groups of layers have the same requests and lengths in a step."""
    for other in steps[1:]:
        first = steps[0]
        for name in ("query_start_loc", "seq_lens"):
            left, right = getattr(first, name), getattr(other, name)
            if left.shape == right.shape and (left == right).all():
                continue
            rows = min(len(left), len(right))
            differs = np.flatnonzero(left[:rows] != right[:rows])
            index = int(differs[0]) if differs.size else rows
            return Corruption(
                "groups",
                f"{name} differs from entry {index} on between the layers {first.group}"
                f" ({left[index : index + 1].tolist()}) and {other.group}"
                f" ({right[index : index + 1].tolist()}): expected the same",
                min(index, len(first.seq_lens) - 1),
                evidence={"kind": "groups"},
            )
    return None
