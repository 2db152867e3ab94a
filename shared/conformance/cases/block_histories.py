"""Histories of a block manager.

A history is a list of actions in small numbers, so that a failing one can be read and reduced.
Every list is valid: a number selects one of the requests that exist, counted modulo their number.
"""

from dataclasses import dataclass
from random import Random

from hypothesis import strategies as st

from ...contract.extra_keys import NO_EXTRA_KEYS, ExtraKeys
from ...contract.kinds import NULL_BLOCK_ID
from ...contract.multimodal_features import MultiModalFeature

KINDS = (
    *("start", "grow") * 6,
    *("fork", "free", "roll back", "look ahead") * 2,
    "reset",
)


def _image(identifier: str, offset: int, length: int) -> MultiModalFeature:
    return MultiModalFeature("image", offset, length, identifier=identifier)


EXTRA_KEYS = (
    NO_EXTRA_KEYS,
    ExtraKeys(cache_salt="a"),
    ExtraKeys(cache_salt="b"),
    ExtraKeys(lora_name="a"),
    ExtraKeys(lora_name="a", cache_salt="a"),
    ExtraKeys(mm_features=(_image("a", 1, 3),)),
    ExtraKeys(mm_features=(_image("b", 1, 3),)),
    ExtraKeys(mm_features=(_image("a", 2, 2),)),
    ExtraKeys(mm_features=(_image("a", 0, 1), _image("b", 5, 1))),
    ExtraKeys(mm_features=(_image("a", 0, 1), _image("a", 5, 1))),
)
"""Extra keys of which none are equal; some differ after the first blocks alone."""


@dataclass(frozen=True)
class BlockAction:
    """One action on a block manager.

    Args:
        kind: "start" (a new request), "grow" (more tokens), "look ahead" (more slots than tokens,
            as for drafts), "fork", "free", "roll back" (the last tokens of a request are
            discarded, as rejected drafts are), or "reset" (of the prefix cache).
        which: selects the request.
        count: number of tokens.
        bits: the tokens, one bit each, so that many sequences share a prefix.
        extra: index of the extra keys of a new request.
    """

    kind: str
    which: int = 0
    count: int = 1
    bits: int = 0
    extra: int = 0

    @property
    def tokens(self) -> list[int]:
        """[count] token ids, 0 or 1."""
        return [self.bits >> index & 1 for index in range(self.count)]


@dataclass(frozen=True)
class BlockHistory:
    """All actions on one block manager.

    Args:
        actions: in order. An action that is not possible is skipped.
        num_blocks: blocks in the cache.
        block_size: slots per block.
        seed: seed of the order of the free blocks.
        window: Optional. The sliding window. If None, no block is released before the request.
    """

    actions: tuple[BlockAction, ...]
    num_blocks: int = 8
    block_size: int = 2
    seed: int | None = None
    window: int | None = None

    @property
    def first_block(self) -> int:
        """The smallest block that requests hold."""
        return 0 if self.window is None else NULL_BLOCK_ID + 1


def block_history(seed: int) -> BlockHistory:
    """Return a history; many requests share a prefix, and the cache is often full."""
    pick = Random(seed)
    actions = tuple(
        BlockAction(
            pick.choice(KINDS),
            pick.randint(0, 3),
            pick.choice([1, 1, 2, 3, 4, 5, 8]),
            pick.choice([0, 0, 0, 4, 5, 16, 255]),
            pick.choice([0, 0, pick.randrange(len(EXTRA_KEYS))]),
        )
        for _ in range(pick.randint(4, 30))
    )
    return BlockHistory(
        actions,
        num_blocks=pick.choice([3, 5, 8, 12]),
        block_size=pick.choice([1, 2, 2, 3, 4]),
        seed=pick.choice([None, 0, 7]),
        window=pick.choice([None, None, None, 1, 2, 3, 5]),
    )


def block_histories() -> st.SearchStrategy[BlockHistory]:
    """Return histories, each derived from one seed.

    If their values are drawn one by one, most histories are short, and evict nothing that is looked
    up later.
    """
    return st.integers(0, 2**20).map(block_history)


DIRECTED_HISTORIES = (
    # a fork writes in the middle of a block that its parent holds
    BlockHistory(
        (
            BlockAction("start", 0, 5, 0),
            BlockAction("fork", 0),
            BlockAction("grow", 1, 3, 5),
            BlockAction("grow", 0, 3, 0),
            BlockAction("free", 1),
            BlockAction("grow", 0, 1),
        )
    ),
    # a shared prefix remains cached after the request that computed it is freed
    BlockHistory(
        (
            BlockAction("start", 0, 8, 16),
            BlockAction("free", 0),
            BlockAction("start", 0, 8, 16),
            BlockAction("start", 0, 8, 0),
            BlockAction("free", 0),
            BlockAction("start", 0, 5, 16),
        ),
        num_blocks=6,
    ),
    # two requests compute the same content at the same time; one is freed, then the other
    BlockHistory(
        (
            BlockAction("start", 0, 1, 0),
            BlockAction("start", 0, 1, 0),
            BlockAction("grow", 0, 4, 0),
            BlockAction("grow", 1, 4, 0),
            BlockAction("free", 0),
            BlockAction("start", 0, 5, 0),
            BlockAction("free", 0),
            BlockAction("free", 0),
            BlockAction("start", 0, 8, 255),
        ),
        num_blocks=9,
    ),
    # rejected drafts: the block that loses its last tokens is cached already
    BlockHistory(
        (
            BlockAction("start", 0, 4, 5),
            BlockAction("roll back", 0, 3),
            BlockAction("start", 0, 5, 5),
            BlockAction("roll back", 1, 1),
            BlockAction("start", 0, 5, 5),
        )
    ),
    # the cache is full, and everything is evicted block by block
    BlockHistory(
        (
            BlockAction("start", 0, 4, 0),
            BlockAction("start", 0, 4, 255),
            BlockAction("start", 0, 1),
            BlockAction("free", 1),
            BlockAction("free", 0),
            BlockAction("start", 0, 1, 4),
            BlockAction("start", 0, 3, 16),
            BlockAction("start", 0, 5, 255),
        ),
        num_blocks=4,
    ),
    # a prompt finds all of its blocks but one; the blocks that it finds are the only ones left
    BlockHistory(
        (
            BlockAction("start", 0, 8),
            BlockAction("free", 0),
            BlockAction("start", 0, 9),
            BlockAction("start", 0, 8),
        ),
        num_blocks=4,
    ),
    # the blocks that a prompt finds would be evicted next, and it needs one more
    BlockHistory(
        (
            BlockAction("start", 0, 4),
            BlockAction("start", 0, 4, 255),
            BlockAction("free", 0),
            BlockAction("free", 0),
            BlockAction("start", 0, 5),
        ),
        num_blocks=4,
    ),
    # a fork must copy a block, and no block is left
    BlockHistory(
        (
            BlockAction("start", 0, 3),
            BlockAction("fork", 0),
            BlockAction("grow", 1, 1),
            BlockAction("grow", 0, 1),
        ),
        num_blocks=2,
    ),
    # content is made known step by step, and evicted
    BlockHistory(
        (
            BlockAction("start", 0, 3),
            BlockAction("grow", 0, 2),
            BlockAction("grow", 0, 1),
            BlockAction("free", 0),
            BlockAction("start", 0, 6, 255),
            BlockAction("start", 0, 1),
        ),
        num_blocks=3,
    ),
    # known content is dropped, other content is made known, and the rest is looked up again
    BlockHistory(
        (
            BlockAction("start", 0, 2, 255),
            BlockAction("roll back", 0, 1),
            BlockAction("start", 0, 2, 0),
        ),
        num_blocks=4,
        block_size=1,
    ),
    # rejected drafts end at the edge of a cached block: it is replaced, not copied
    BlockHistory((BlockAction("start", 0, 4), BlockAction("roll back", 0, 2))),
    # rejected drafts in the second of four cached blocks; one block is free, and one is written
    BlockHistory(
        (BlockAction("start", 0, 8), BlockAction("roll back", 0, 5)), num_blocks=5
    ),
    # a fork shares an empty block for drafts, which only its next token but one is written to
    BlockHistory(
        (
            BlockAction("start", 0, 2),
            BlockAction("look ahead", 0, 4),
            BlockAction("fork", 0),
            BlockAction("grow", 1, 1),
            BlockAction("grow", 1, 2),
        ),
        num_blocks=5,
    ),
    # equal tokens with other images, and with the same image
    BlockHistory(
        (
            BlockAction("start", 0, 5, extra=8),
            BlockAction("start", 0, 5, extra=9),
            BlockAction("start", 0, 8, extra=8),
            BlockAction("start", 0, 8, extra=9),
            BlockAction("start", 0, 8, extra=9),
        ),
        num_blocks=12,
    ),
    # all blocks are freed, and the next request finds nothing
    BlockHistory(
        (
            BlockAction("start", 0, 5),
            BlockAction("reset"),
            BlockAction("free"),
            BlockAction("reset"),
            BlockAction("start", 0, 5),
        )
    ),
    # a window passes a block, which is evicted; the blocks after it are found
    BlockHistory(
        (
            BlockAction("start", 0, 4),
            BlockAction("grow", 0, 3),
            BlockAction("grow", 0, 2),
            BlockAction("start", 0, 4, 255),
            BlockAction("free", 0),
            BlockAction("start", 0, 8),
        ),
        num_blocks=5,
        window=3,
    ),
    # a window passes the blocks of a fork and of its origin, and then drafts are rejected
    BlockHistory(
        (
            BlockAction("start", 0, 5),
            BlockAction("fork", 0),
            BlockAction("grow", 0, 3),
            BlockAction("grow", 0, 1),
            BlockAction("roll back", 0, 1),
            BlockAction("roll back", 0, 5),
            BlockAction("grow", 1, 5),
            BlockAction("grow", 1, 1),
        ),
        num_blocks=9,
        window=2,
    ),
    # a token attends to itself alone, so that no block is taken; then the last block is evicted
    BlockHistory(
        (
            BlockAction("start", 0, 5),
            BlockAction("start", 0, 5),
            BlockAction("free"),
            BlockAction("start", 0, 4),
        ),
        num_blocks=7,
        block_size=1,
        window=1,
    ),
    # blocks that the window has passed are the only ones left
    BlockHistory(
        tuple(
            BlockAction("start", 0, 2) if not step else BlockAction("grow", 0, 2)
            for step in range(8)
        ),
        num_blocks=4,
        window=3,
    ),
)
"""Histories that lead to the rare states; drawn ones often do not."""
