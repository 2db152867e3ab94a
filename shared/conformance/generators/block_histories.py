"""Histories of a block manager, and a plain model of what must follow from them.

A history is a list of actions in small numbers, so that a failing one can be read and reduced.
Every list is valid: a number selects one of the requests that exist, counted modulo their number.

The model knows each block's content as the complete token sequence up to the end of the block, in
plain lists and dictionaries. It chooses no blocks: it takes the ids that the candidate returns, and
the laws compare the candidate's state with the model's.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

from hypothesis import strategies as st

from ...contract.block_classes import OutOfBlocks

Tokens = tuple[int, ...]

KINDS = ("start", "start", "start", "grow", "grow", "grow", "fork", "free", "roll back")


@dataclass(frozen=True)
class BlockAction:
    """One action on a block manager.

    Args:
        kind: "start" (a new request), "grow" (more tokens), "fork", "free", or "roll back" (the
            last tokens of a request are discarded, as rejected drafts are).
        which: selects the request.
        count: number of tokens.
        bits: the tokens, one bit each, so that many sequences share a prefix.
    """

    kind: str
    which: int = 0
    count: int = 1
    bits: int = 0

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
    """

    actions: tuple[BlockAction, ...]
    num_blocks: int = 8
    block_size: int = 2
    seed: int | None = None


@st.composite
def block_histories(draw: st.DrawFn) -> BlockHistory:
    """Return a history; many requests share a prefix, and the cache is often full.

    All values are derived from one seed. If they are drawn one by one, most histories are short,
    and evict nothing that is looked up later.
    """
    pick = Random(draw(st.integers(0, 2**20)))
    actions = tuple(
        BlockAction(
            pick.choice(KINDS),
            pick.randint(0, 3),
            pick.choice([1, 1, 2, 3, 4, 5, 8]),
            pick.choice([0, 0, 0, 4, 5, 16, 255]),
        )
        for _ in range(pick.randint(4, 30))
    )
    return BlockHistory(
        actions,
        num_blocks=pick.choice([3, 5, 8, 12]),
        block_size=pick.choice([1, 2, 2, 3, 4]),
        seed=pick.choice([None, 0, 7]),
    )


@dataclass
class BlockModel:
    """What the actions so far imply.

    Args:
        block_size: slots per block.
        num_blocks: blocks in the cache.
        rows: block ids of each request.
        tokens: tokens of each request that are in the cache.
        known: the known content of blocks: all tokens up to the end of the block.
        cached: blocks of known content that no request holds, in the order of eviction.
        slots: for each block the token sequence up to each slot that was written, by offset.
        once_known: every content that was known at some time.
    """

    block_size: int
    num_blocks: int
    rows: dict[int, list[int]] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    known: dict[int, Tokens] = field(default_factory=dict)
    cached: list[int] = field(default_factory=list)
    slots: dict[int, dict[int, Tokens]] = field(default_factory=dict)
    once_known: set[Tokens] = field(default_factory=set)

    @property
    def free(self) -> list[int]:
        """Blocks without known content that no request holds."""
        used = {block_id for row in self.rows.values() for block_id in row}
        return [
            block_id
            for block_id in range(self.num_blocks)
            if block_id not in used and block_id not in self.cached
        ]

    def ref_cnt(self, block_id: int) -> int:
        """Return how many requests hold a block."""
        return sum(row.count(block_id) for row in self.rows.values())

    def is_protected(self, block_id: int) -> bool:
        """Tell whether a block must not be written: it is shared, or its content is known."""
        return self.ref_cnt(block_id) > 1 or block_id in self.known

    def longest_prefix(self, tokens: list[int]) -> list[Tokens]:
        """Return the known contents that a sequence begins with, its last token left out."""
        found = []
        contents = set(self.known.values())
        for end in range(self.block_size, len(tokens), self.block_size):
            if tuple(tokens[:end]) not in contents:
                break
            found.append(tuple(tokens[:end]))
        return found

    def release(self, block_ids: list[int]) -> None:
        """Give up blocks that have left a row; the last one is released first."""
        for block_id in reversed(block_ids):
            if not self.ref_cnt(block_id) and block_id in self.known:
                self.cached.append(block_id)

    def take(self, block_id: int) -> None:
        """Forget a block that was handed out for new content."""
        self.known.pop(block_id, None)
        self.slots[block_id] = {}
        if block_id in self.cached:
            self.cached.remove(block_id)

    def write(self, request_id: int, first: int, tokens: list[int]) -> None:
        """Store the tokens from a position on, and make the content of full blocks known."""
        self.tokens[request_id] = tokens
        row = self.rows[request_id]
        for position in range(first, len(tokens)):
            index, offset = divmod(position, self.block_size)
            self.slots[row[index]][offset] = tuple(tokens[: position + 1])
        for index in range(len(tokens) // self.block_size):
            end = (index + 1) * self.block_size
            self.known.setdefault(row[index], tuple(tokens[:end]))
            self.once_known.add(tuple(tokens[:end]))


@dataclass(frozen=True)
class Allocation:
    """One call of `allocate_slots`, with the data that the laws check.

    Args:
        request_id: the request.
        free, cached: the blocks in those states before the call.
        num_needed: blocks that the call needs.
        written: the blocks that the new tokens go to, after the call.
        protected: those of them that were protected before the call.
        handed_out: new blocks and destinations of copies. None if the call raised OutOfBlocks.
        copies: the copies that the call requests.
        expected_copies: (source, index in the row) of the copies that are needed.
    """

    request_id: int
    free: list[int]
    cached: list[int]
    num_needed: int
    written: list[int]
    protected: list[int]
    handed_out: list[int] | None
    copies: list[tuple[int, int]]
    expected_copies: list[tuple[int, int]]


@dataclass(frozen=True)
class Moment:
    """The state after one action.

    Args:
        action: the action.
        manager: the candidate's block manager.
        model: the expected state.
        allocation: the allocation of the action. None if it made none.
        parent: for a fork, the request that was forked. None for other actions.
        child: for a fork, the new request. None for other actions.
    """

    action: BlockAction
    manager: Any
    model: BlockModel
    allocation: Allocation | None = None
    parent: int | None = None
    child: int | None = None


def play(manager: Any, history: BlockHistory) -> Iterator[Moment]:
    """Run a history on a block manager and on the model; yield the state after each action."""
    model = BlockModel(history.block_size, history.num_blocks)
    next_id = 0
    for action in history.actions:
        chosen = None
        if action.kind != "start":
            if not model.rows:
                continue
            chosen = sorted(model.rows)[action.which % len(model.rows)]
        if action.kind == "start":
            next_id += 1
            tokens = action.tokens
            hits = list(manager.get_computed_blocks(tokens))
            yield _allocate(manager, model, action, next_id, tokens, hits)
        elif action.kind == "grow" and chosen is not None:
            tokens = model.tokens[chosen] + action.tokens
            yield _allocate(manager, model, action, chosen, tokens, None)
        elif action.kind == "roll back" and chosen is not None:
            kept = model.tokens[chosen][: -action.count] or model.tokens[chosen][:1]
            model.tokens[chosen] = kept
            # another token than the one that was discarded
            tokens = [*kept, 2]
            yield _allocate(manager, model, action, chosen, tokens, None)
        elif action.kind == "fork" and chosen is not None:
            next_id += 1
            manager.fork(chosen, next_id)
            model.rows[next_id] = list(model.rows[chosen])
            model.tokens[next_id] = list(model.tokens[chosen])
            yield Moment(action, manager, model, parent=chosen, child=next_id)
        elif action.kind == "free" and chosen is not None:
            manager.free(chosen)
            del model.tokens[chosen]
            model.release(model.rows.pop(chosen))
            yield Moment(action, manager, model)


def _allocate(
    manager: Any,
    model: BlockModel,
    action: BlockAction,
    request_id: int,
    tokens: list[int],
    hits: list[int] | None,
) -> Moment:
    """Allocate slots for the tokens that are not in the cache, and write them."""
    size = model.block_size
    before = list(model.rows.get(request_id, hits or ()))
    computed = (
        len(model.tokens.get(request_id, ())) if hits is None else len(hits) * size
    )
    written = range(computed // size, -(-len(tokens) // size))
    replaced = [
        index
        for index in range(computed // size, len(before))
        if model.is_protected(before[index])
    ]
    num_needed = max(0, written.stop - len(before)) + len(replaced)
    cached = [each for each in model.cached if each not in (hits or ())]
    call: dict[str, Any] = {
        "request_id": request_id,
        "free": model.free,
        "cached": cached,
        "num_needed": num_needed,
        "protected": [before[index] for index in replaced],
        "expected_copies": [
            (before[index], index) for index in replaced if index * size < computed
        ],
    }
    try:
        found = manager.allocate_slots(
            request_id, computed, len(tokens) - computed, hits or ()
        )
    except OutOfBlocks:
        allocation = Allocation(**call, written=[], handed_out=None, copies=[])
        return Moment(action, manager, model, allocation)
    copies = list(found.blocks_to_copy)
    row = list(manager.get_block_ids(request_id))
    handed_out = [*found.new_block_ids, *(target for _, target in copies)]
    model.cached = list(cached)
    model.rows[request_id] = row
    contents = {target: dict(model.slots.get(source, {})) for source, target in copies}
    for block_id in handed_out:
        model.take(block_id)
    model.slots |= contents
    model.release([before[index] for index in replaced])
    model.write(request_id, computed, tokens)
    # the tokens of a prompt are known before they are computed
    manager.cache_full_blocks(request_id, [*tokens, *[1] * size], len(tokens))
    allocation = Allocation(
        **call,
        written=[row[index] for index in written if index < len(row)],
        handed_out=handed_out,
        copies=copies,
    )
    return Moment(action, manager, model, allocation)


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
)
"""Histories that lead to the rare states; drawn ones often do not."""
