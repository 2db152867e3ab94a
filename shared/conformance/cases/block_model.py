"""A plain model of a block manager: what must follow from a history.

The model knows each block's content as the complete token sequence up to the end of the block, with
the extra keys up to there, in plain lists and dictionaries. It chooses no blocks: it takes the ids
that the candidate returns, and the laws compare the candidate's state with the model's.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...contract.block_classes import OutOfBlocks
from ...contract.kinds import NULL_BLOCK_ID
from .block_histories import EXTRA_KEYS, BlockAction, BlockHistory

Content = tuple[Hashable, ...]
"""The first tokens of a sequence, and its extra keys as far as they belong to these tokens."""


def content_of(tokens: Sequence[int], extra: int, end: int) -> Content:
    """Return what a model computes the keys of the first `end` tokens from.

    Args:
        tokens: the sequence.
        extra: index of its extra keys.
        end: number of tokens.
    """
    keys = EXTRA_KEYS[extra]
    seen = tuple(
        mm_feature for mm_feature in keys.mm_features if mm_feature.offset < end
    )
    images = tuple(
        (feature.identifier, feature.offset, feature.length) for feature in seen
    )
    return tuple(tokens[:end]), keys.lora_name, keys.cache_salt, images


@dataclass
class BlockModel:
    """What the actions so far imply.

    Args:
        history: the history, for its sizes.
        rows: block ids of each request.
        tokens: tokens of each request that are in the cache.
        extra: index of the extra keys of each request.
        known: the known content of blocks: all tokens up to the end of the block.
        cached: blocks of known content that no request holds, in the order of eviction.
        slots: for each block the token sequence up to each slot that was written, by offset.
        once_known: the tokens and the extra keys of every content that was known at some time.
    """

    history: BlockHistory
    rows: dict[int, list[int]] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    extra: dict[int, int] = field(default_factory=dict)
    known: dict[int, Content] = field(default_factory=dict)
    cached: list[int] = field(default_factory=list)
    slots: dict[int, dict[int, Content]] = field(default_factory=dict)
    once_known: set[tuple[tuple[int, ...], int]] = field(default_factory=set)

    @property
    def block_size(self) -> int:
        """Slots per block."""
        return self.history.block_size

    @property
    def used(self) -> set[int]:
        """Blocks that a request holds."""
        held = {block_id for row in self.rows.values() for block_id in row}
        return {block_id for block_id in held if self.is_block(block_id)}

    @property
    def free(self) -> list[int]:
        """Blocks without known content that no request holds."""
        blocks = range(self.history.first_block, self.history.num_blocks)
        taken = self.used.union(self.cached)
        return [block_id for block_id in blocks if block_id not in taken]

    def is_block(self, block_id: int) -> bool:
        """Tell whether an entry of a row is not the null block."""
        return block_id >= self.history.first_block

    def first_visible(self, position: int) -> int:
        """Return the index of the first block that a token and all later ones attend to."""
        window = self.history.window
        first = 0 if window is None else max(0, position - window + 1)
        return first // self.block_size

    def ref_cnt(self, block_id: int) -> int:
        """Return how many requests hold a block."""
        count = sum(row.count(block_id) for row in self.rows.values())
        return count if self.is_block(block_id) else 0

    def is_protected(self, block_id: int) -> bool:
        """Tell whether a block must not be written: it is shared, or its content is known."""
        return self.ref_cnt(block_id) > 1 or block_id in self.known

    def longest_prefix(self, tokens: Sequence[int], extra: int) -> list[Content | None]:
        """Return the known contents that a sequence begins with, its last token left out.

        With a window, those that its next token attends to are enough, but there has to be one. The
        others are None.
        """
        contents = set(self.known.values())
        ends = range(self.block_size, len(tokens), self.block_size)
        own = [content_of(tokens, extra, end) for end in ends]
        for num_found in range(len(own), 0, -1):
            first = self.first_visible(num_found * self.block_size)
            if contents.issuperset(own[min(first, num_found - 1) : num_found]):
                return [None] * first + own[first:num_found]
        return []

    def release(self, block_ids: list[int]) -> None:
        """Give up blocks that have left a row; the last one is released first."""
        for block_id in reversed(block_ids):
            is_unused = self.is_block(block_id) and not self.ref_cnt(block_id)
            if is_unused and block_id in self.known:
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
        row, extra = self.rows[request_id], self.extra[request_id]
        for position in range(first, len(tokens)):
            index, offset = divmod(position, self.block_size)
            content = content_of(tokens, extra, position + 1)
            self.slots[row[index]][offset] = content
        for index in range(len(tokens) // self.block_size):
            end = (index + 1) * self.block_size
            if self.is_block(row[index]):
                self.known.setdefault(row[index], content_of(tokens, extra, end))
                self.once_known.add((tuple(tokens[:end]), extra))


@dataclass(frozen=True)
class Allocation:
    """One call of `allocate_slots`, with the data that the laws check.

    Args:
        request_id: the request.
        num_computed_tokens: its tokens in the cache before the call.
        free, cached: the blocks in those states before the call, or once the blocks that the window
            has passed are released and the blocks of the prefix are taken.
        num_needed: blocks that the call needs.
        before: the request's row before the call, with the blocks of the prefix.
        expected_row: its row after the call, with None for a new block.
        expected_copies: (source, index in the row) of the copies that are needed.
        protected: blocks of the row that were protected before the call, those left out that the
            window has passed.
        written: the blocks that the new tokens go to, after the call.
        handed_out: new blocks and destinations of copies. None if the call raised OutOfBlocks.
        copies: the copies that the call requests.
    """

    request_id: int
    num_computed_tokens: int
    free: list[int]
    cached: list[int]
    num_needed: int
    before: list[int]
    expected_row: list[int | None]
    expected_copies: list[tuple[int, int]]
    protected: list[int]
    written: list[int]
    handed_out: list[int] | None
    copies: list[tuple[int, int]]


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
        is_reset: for a reset, what the manager returned, and what is right. None for others.
    """

    action: BlockAction
    manager: Any
    model: BlockModel
    allocation: Allocation | None = None
    parent: int | None = None
    child: int | None = None
    is_reset: tuple[Any, bool] | None = None


def play(manager: Any, history: BlockHistory) -> Iterator[Moment]:
    """Run a history on a block manager and on the model; yield the state after each action."""
    model = BlockModel(history)
    next_id = 0
    for action in history.actions:
        if action.kind == "reset":
            is_reset = not model.rows
            if is_reset:
                model.known, model.cached = {}, []
            found = manager.reset_prefix_cache()
            yield Moment(action, manager, model, is_reset=(found, is_reset))
            continue
        if action.kind == "start":
            next_id += 1
            model.extra[next_id] = action.extra
            yield _allocate(manager, model, action, next_id, action.tokens)
            continue
        if not model.rows:
            continue
        chosen = sorted(model.rows)[action.which % len(model.rows)]
        if action.kind == "grow":
            tokens = model.tokens[chosen] + action.tokens
            yield _allocate(manager, model, action, chosen, tokens)
        elif action.kind == "look ahead":
            tokens = [*model.tokens[chosen], 0]
            yield _allocate(manager, model, action, chosen, tokens, action.count)
        elif action.kind == "roll back":
            kept = model.tokens[chosen][: -action.count] or model.tokens[chosen][:1]
            first = model.first_visible(len(kept))
            if model.is_block([*model.rows[chosen], NULL_BLOCK_ID + 1][first]):
                model.tokens[chosen] = kept
            # another token than the one that was discarded
            tokens = [*model.tokens[chosen], 2]
            yield _allocate(manager, model, action, chosen, tokens)
        elif action.kind == "fork":
            next_id += 1
            manager.fork(chosen, next_id)
            model.rows[next_id] = list(model.rows[chosen])
            model.tokens[next_id] = list(model.tokens[chosen])
            model.extra[next_id] = model.extra[chosen]
            yield Moment(action, manager, model, parent=chosen, child=next_id)
        elif action.kind == "free":
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
    num_lookahead_tokens: int = 0,
) -> Moment:
    """Allocate slots for the tokens that are not in the cache, and write them."""
    size, keys = model.block_size, EXTRA_KEYS[model.extra[request_id]]
    hits: list[int] = []
    if request_id in model.rows:
        before, computed = model.rows[request_id], len(model.tokens[request_id])
    else:
        before = hits = list(manager.get_computed_blocks(tokens, keys))
        computed = len(hits) * size
    # what the window has passed, what must not be written, and what is missing
    first_visible = model.first_visible(computed)
    passed = [
        block_id for block_id in before[:first_visible] if model.is_block(block_id)
    ]
    num_slots = len(tokens) + num_lookahead_tokens
    written = range(computed // size, -(-num_slots // size))
    replaced = [
        index
        for index in written
        if index < len(before) and model.is_protected(before[index])
    ]
    row: list[int | None] = [*before]
    row[:first_visible] = [NULL_BLOCK_ID] * first_visible
    for index in replaced:
        row[index] = None
    row += [None] * (written.stop - len(row))
    released = [block_id for block_id in passed if model.ref_cnt(block_id) == 1]
    newly_cached = [
        block_id for block_id in reversed(released) if block_id in model.known
    ]
    cached = [
        block_id for block_id in model.cached if block_id not in hits
    ] + newly_cached
    free = [block_id for block_id in model.free if block_id not in hits]
    call: dict[str, Any] = {
        "request_id": request_id,
        "num_computed_tokens": computed,
        "free": free
        + [block_id for block_id in released if block_id not in model.known],
        "cached": cached,
        "num_needed": row.count(None),
        "before": list(before),
        "expected_row": row,
        "expected_copies": [
            (before[index], index) for index in replaced if index * size < computed
        ],
        "protected": [
            block_id
            for block_id in before[first_visible:]
            if model.is_protected(block_id)
        ],
    }
    try:
        found = manager.allocate_slots(
            request_id, computed, num_slots - computed, tuple(hits)
        )
    except OutOfBlocks:
        allocation = Allocation(**call, written=[], handed_out=None, copies=[])
        return Moment(action, manager, model, allocation)
    copies = list(found.blocks_to_copy)
    handed_out = [*found.new_block_ids, *(target for _, target in copies)]
    old = [before[index] for index in replaced]
    model.rows[request_id] = list(manager.get_block_ids(request_id))
    model.cached = list(cached)
    contents = {target: dict(model.slots.get(source, {})) for source, target in copies}
    for block_id in handed_out:
        model.take(block_id)
    model.slots |= contents
    model.release(old)
    model.write(request_id, computed, tokens)
    # the tokens of a prompt are known before they are computed
    manager.cache_full_blocks(request_id, [*tokens, *[1] * size], len(tokens), keys)
    own = model.rows[request_id]
    allocation = Allocation(
        **call,
        written=[own[index] for index in written if index < len(own)],
        handed_out=handed_out,
        copies=copies,
    )
    return Moment(action, manager, model, allocation)
