"""Laws of the identity of cached content: a block is found by its tokens, not by a hash of them.

An implementation may hash the tokens of a block. A weak hash confuses blocks of different tokens,
and then a request reads the keys of another one. The cases are pairs of blocks that common weak
hashes confuse: sums, polynomials, joined digits, and hashes of a few bits.
"""

from ..candidates.setting import Setting
from ..checks.expect import expect_same
from .law import law

Pair = tuple[tuple[int, ...], tuple[int, ...]]

BASES = (2, 3, 5, 7, 17, 31, 33, 37, 53, 101, 127, 131, 137, 257, 1000003)
"""Bases of polynomial hashes in use. Base 1 is the sum of the tokens."""

CONFUSED: dict[str, Pair] = {
    "equal sums": ((4, 9), (5, 8)),
    "the same tokens in another order": ((4, 9), (9, 4)),
    "equal exclusive ors": ((5, 6), (4, 7)),
    "equal products": ((6, 4), (3, 8)),
    "equal digits one after the other": ((1, 12), (11, 2)),
    "equal lowest 8 bits": ((7, 9), (7 + 2**8, 9)),
    "equal lowest 16 bits": ((7, 9), (7 + 2**16, 9)),
    "equal first tokens": ((4, 9), (4, 8)),
    "equal last tokens": ((4, 9), (5, 9)),
    **{
        f"equal polynomials of base {base}, lowest power first": (
            (4, 9),
            (4 + base, 8),
        )
        for base in BASES
    },
    **{
        f"equal polynomials of base {base}, highest power first": (
            (4, 9 + base),
            (5, 9),
        )
        for base in BASES
    },
}
"""Pairs of blocks of two tokens."""


@law("BlockManager", cases=[*CONFUSED])
def blocks_that_a_weak_hash_confuses_are_told_apart(
    setting: Setting, name: str
) -> None:
    """Both blocks are the first of their sequence, and then the second, after equal tokens."""
    for before in ((), (1, 2)):
        manager = setting.candidate.BlockManager(8, 2)
        sequences = [[*before, *tokens, 0] for tokens in CONFUSED[name]]
        known = len(before) // 2
        rows: list[list[int]] = []
        for number, tokens in enumerate(sequences):
            hits = list(manager.get_computed_blocks(tokens))
            first = rows[0][:known] if rows else []
            expect_same(f"computed blocks of {tokens}, not known yet", hits, first)
            manager.allocate_slots(
                number, 2 * len(hits), len(tokens) - 2 * len(hits), hits
            )
            manager.cache_full_blocks(number, tokens, len(tokens))
            rows.append(list(manager.get_block_ids(number)))
        for tokens, row in zip(sequences, rows, strict=True):
            hits = list(manager.get_computed_blocks(tokens))
            expect_same(f"computed blocks of {tokens}", hits, row[: known + 1])
