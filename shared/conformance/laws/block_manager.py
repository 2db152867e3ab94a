"""Laws of the block manager: reference counts, prefix caching, copy-on-write and eviction.

Whole histories of requests are run, and the state is compared with a plain model after each action.
"""

from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any

from hypothesis import strategies as st

from ...contract.block_classes import OutOfBlocks
from ..candidates.setting import Setting
from ..cases.block_histories import (
    DIRECTED_HISTORIES,
    EXTRA_KEYS,
    BlockAction,
    BlockHistory,
    block_histories,
)
from ..cases.block_model import Moment, content_of, play
from ..checks.expect import Disagreement, expect_rejection, expect_same
from .law import law

HISTORIES = st.one_of(st.just(DIRECTED_HISTORIES), st.tuples(block_histories()))
"""All directed cases at once, or one drawn case."""


def _for_each(
    body: Callable[[Setting, BlockHistory], None],
) -> Callable[[Setting, tuple[BlockHistory, ...]], None]:
    """Return a law's function for several cases from its function for one."""

    @wraps(body)
    def run(setting: Setting, cases: tuple[BlockHistory, ...]) -> None:
        for case in cases:
            body(setting, case)

    return run


def _play(setting: Setting, history: BlockHistory) -> Iterator[Moment]:
    manager = setting.candidate.BlockManager(
        history.num_blocks,
        history.block_size,
        history.seed,
        sliding_window=history.window,
    )
    return play(manager, history)


LARGE_HISTORIES = (
    BlockHistory(
        (
            BlockAction("start", 0, 600, 2**500 + 5),
            BlockAction("fork", 0),
            BlockAction("grow", 1, 270, 5),
            BlockAction("free", 0),
            BlockAction("start", 0, 590, 2**500 + 5),
            BlockAction("roll back", 1, 300),
        ),
        num_blocks=1500,
        block_size=1,
        seed=7,
    ),
    BlockHistory(
        (
            BlockAction("start", 0, 700, 3),
            BlockAction("grow", 0, 300, 5),
            BlockAction("free", 0),
            BlockAction("start", 0, 690, 3),
        ),
        num_blocks=900,
        block_size=2,
        window=300,
    ),
)
"""Rows, ids, tokens and windows that do not fit eight bits."""


@law("BlockManager", cases=HISTORIES, edges=[LARGE_HISTORIES])
@_for_each
def a_reference_count_is_the_number_of_requests_that_hold_the_block(
    setting: Setting, history: BlockHistory
) -> None:
    for moment in _play(setting, history):
        for block_id in range(history.num_blocks):
            expect_same(
                f"ref_cnt({block_id}) after {moment.action.kind}",
                moment.manager.ref_cnt(block_id),
                moment.model.ref_cnt(block_id),
            )


@law("BlockManager", cases=HISTORIES, edges=[LARGE_HISTORIES])
@_for_each
def every_block_is_used_or_cached_or_free(
    setting: Setting, history: BlockHistory
) -> None:
    for moment in _play(setting, history):
        manager, model = moment.manager, moment.model
        when = f"after {moment.action.kind}"
        expect_same(f"num_used_blocks {when}", manager.num_used_blocks, len(model.used))
        expect_same(
            f"num_cached_blocks {when}", manager.num_cached_blocks, len(model.cached)
        )
        expect_same(f"num_free_blocks {when}", manager.num_free_blocks, len(model.free))


@law("BlockManager", cases=HISTORIES)
@_for_each
def a_row_keeps_its_blocks_until_the_request_changes_it(
    setting: Setting, history: BlockHistory
) -> None:
    for moment in _play(setting, history):
        for request_id, row in moment.model.rows.items():
            found = list(moment.manager.get_block_ids(request_id))
            expect_same(f"row of request {request_id}", found, row)


@law("BlockManager", cases=HISTORIES)
@_for_each
def a_block_is_allocated_once(setting: Setting, history: BlockHistory) -> None:
    """A block that a request holds is never handed out, and no block twice in one call."""
    for moment in _play(setting, history):
        call = moment.allocation
        if call is None or call.handed_out is None:
            continue
        available = {*call.free, *call.cached}
        for index, block_id in enumerate(call.handed_out):
            if block_id not in available or block_id in call.handed_out[:index]:
                raise Disagreement(
                    "blocks handed out", f"entry {index}", block_id, sorted(available)
                )


@law("BlockManager", cases=HISTORIES, edges=[LARGE_HISTORIES])
@_for_each
def a_cached_block_is_evicted_only_if_no_block_is_free(
    setting: Setting, history: BlockHistory
) -> None:
    """Then the block that was released first is evicted, the tail of a sequence first."""
    for moment in _play(setting, history):
        expect_same(
            f"order of eviction after {moment.action.kind}",
            list(moment.manager.cached_blocks()),
            moment.model.cached,
        )
        call = moment.allocation
        if call is None or call.handed_out is None:
            continue
        num_evicted = max(0, len(call.handed_out) - len(call.free))
        evicted = [block_id for block_id in call.cached if block_id in call.handed_out]
        expect_same("evicted blocks", evicted, call.cached[:num_evicted])


@law("BlockManager", cases=HISTORIES, edges=[LARGE_HISTORIES])
@_for_each
def an_allocation_takes_exactly_the_blocks_that_it_needs(
    setting: Setting, history: BlockHistory
) -> None:
    """It raises OutOfBlocks if, and only if, fewer are free or cached; then nothing changes."""
    for moment in _play(setting, history):
        call, manager = moment.allocation, moment.manager
        if call is None:
            continue
        num_available = len(call.free) + len(call.cached)
        if call.handed_out is not None:
            expect_same("blocks handed out", len(call.handed_out), call.num_needed)
            continue
        if call.num_needed <= num_available:
            raise Disagreement(
                f"allocation of {call.num_needed} blocks",
                "as a whole",
                "OutOfBlocks",
                f"success, as {num_available} are free or cached",
            )
        expect_same("free blocks", manager.num_free_blocks, len(moment.model.free))
        expect_same("cached", list(manager.cached_blocks()), moment.model.cached)
        for request_id, row in moment.model.rows.items():
            expect_same("row", list(manager.get_block_ids(request_id)), row)
        if call.request_id not in moment.model.rows:
            expect_rejection(
                "free of a request whose allocation failed",
                partial(manager.free, call.request_id),
            )


@law("BlockManager", cases=HISTORIES)
@_for_each
def a_block_that_others_may_read_is_never_written(
    setting: Setting, history: BlockHistory
) -> None:
    """Others are requests that also hold it, and requests that may find it in the cache."""
    for moment in _play(setting, history):
        call = moment.allocation
        if call is None or call.handed_out is None:
            continue
        shared = [
            block_id for block_id in call.written if moment.model.ref_cnt(block_id) > 1
        ]
        expect_same("shared blocks that are written", shared, [])
        kept = [block_id for block_id in call.written if block_id in call.protected]
        expect_same("protected blocks that are written", kept, [])


@law("BlockManager", cases=HISTORIES)
@_for_each
def a_copy_is_made_of_each_protected_block_that_is_partly_computed(
    setting: Setting, history: BlockHistory
) -> None:
    """No other block is copied. The copy goes to the same index of the request's row."""
    for moment in _play(setting, history):
        call = moment.allocation
        if call is None or call.handed_out is None:
            continue
        row = moment.model.rows[call.request_id]
        expected = [(source, row[index]) for source, index in call.expected_copies]
        expect_same("blocks to copy", call.copies, expected)


@law("BlockManager", cases=HISTORIES, edges=[LARGE_HISTORIES])
@_for_each
def an_allocation_changes_only_the_entries_of_a_row_that_it_must(
    setting: Setting, history: BlockHistory
) -> None:
    """It replaces protected blocks to which it writes, and appends those that are missing.

    With a window, the null block takes the place of blocks that no later token attends to.
    """
    for moment in _play(setting, history):
        call = moment.allocation
        if call is None or call.handed_out is None:
            continue
        found = list(moment.manager.get_block_ids(call.request_id))
        expect_same("entries", len(found), len(call.expected_row))
        for index, right in enumerate(call.expected_row):
            if right is not None:
                expect_same(f"entry {index}", found[index], right)
            elif found[index] not in call.handed_out:
                raise Disagreement("row", f"entry {index}", found[index], "a new block")


@law("BlockManager", cases=HISTORIES)
@_for_each
def a_request_reads_the_tokens_that_it_wrote(
    setting: Setting, history: BlockHistory
) -> None:
    """Each slot that it attends to is read through its row, whatever other requests do."""
    for moment in _play(setting, history):
        model = moment.model
        for request_id, tokens in model.tokens.items():
            row = moment.manager.get_block_ids(request_id)
            extra, first = model.extra[request_id], 0
            if history.window is not None:
                first = max(0, len(tokens) - history.window + 1)
            for position in range(first, len(tokens)):
                index, offset = divmod(position, model.block_size)
                found = None
                if index < len(row):
                    found = model.slots.get(row[index], {}).get(offset)
                expect_same(
                    f"request {request_id}, position {position} after"
                    f" {moment.action.kind}",
                    found,
                    content_of(tokens, extra, position + 1),
                )


@law("BlockManager", cases=HISTORIES)
@_for_each
def computed_blocks_hold_the_longest_known_prefix(
    setting: Setting, history: BlockHistory
) -> None:
    """Their content is the sequence's own, and the last token is always left to compute."""
    for moment in _play(setting, history):
        manager, model = moment.manager, moment.model
        sequences = [
            (tuple(tokens), model.extra[request_id])
            for request_id, tokens in model.tokens.items()
        ]
        for tokens, extra in [*sequences, *sorted(model.once_known)]:
            for probe in (tokens, (*tokens, 1), (*tokens[:-1], 1 - tokens[-1], 0)):
                # also what equal tokens hold with other extra keys
                for index in {extra, (extra + len(tokens)) % len(EXTRA_KEYS)}:
                    keys = EXTRA_KEYS[index]
                    found = [
                        model.known.get(block_id) if model.is_block(block_id) else None
                        for block_id in manager.get_computed_blocks(probe, keys)
                    ]
                    right = model.longest_prefix(probe, index)
                    expect_same(f"computed blocks of {probe}, {keys}", found, right)


@law("BlockManager", cases=HISTORIES)
@_for_each
def a_fork_shares_the_blocks_of_its_parent_and_allocates_none(
    setting: Setting, history: BlockHistory
) -> None:
    for moment in _play(setting, history):
        if moment.child is None:
            continue
        manager, model = moment.manager, moment.model
        parent = list(manager.get_block_ids(moment.parent))
        expect_same("row", list(manager.get_block_ids(moment.child)), parent)
        expect_same("free blocks", manager.num_free_blocks, len(model.free))


@law("BlockManager", cases=HISTORIES)
@_for_each
def all_blocks_can_be_allocated_again_once_all_requests_are_freed(
    setting: Setting, history: BlockHistory
) -> None:
    last = None
    for moment in _play(setting, history):
        last = moment
    if last is None:
        return
    manager = last.manager
    for request_id in last.model.rows:
        manager.free(request_id)
    expect_same("used blocks", manager.num_used_blocks, 0)
    blocks = list(range(history.first_block, history.num_blocks))
    total = len(blocks) * history.block_size
    found = manager.allocate_slots("all", 0, total).new_block_ids
    expect_same("blocks", sorted(found), blocks)
    expect_same("cached blocks", list(manager.cached_blocks()), [])
    try:
        manager.allocate_slots("one more", 0, 1)
    except OutOfBlocks:
        return
    raise Disagreement(
        "allocation in a full cache", "as a whole", "success", "an error"
    )


@law("BlockManager", cases=HISTORIES)
@_for_each
def a_reset_of_the_prefix_cache_forgets_everything_unless_a_request_holds_blocks(
    setting: Setting, history: BlockHistory
) -> None:
    for moment in _play(setting, history):
        manager, model = moment.manager, moment.model
        if moment.is_reset is None:
            continue
        found, right = moment.is_reset
        expect_same("reset", found, right)
        expect_same("cached blocks", list(manager.cached_blocks()), model.cached)
        for tokens, extra in sorted(model.once_known) if right else ():
            hits = list(manager.get_computed_blocks([*tokens, 1], EXTRA_KEYS[extra]))
            expect_same(f"computed blocks of {tokens}", hits, [])


@law("BlockManager", cases=[300, 70_000])
def blocks_and_references_past_255_are_counted(
    setting: Setting, num_blocks: int
) -> None:
    """Many requests hold one block, and one request holds many blocks."""
    manager = setting.candidate.BlockManager(num_blocks + 5, 2)
    row = list(manager.allocate_slots("a", 0, 2 * num_blocks).new_block_ids)
    expect_same("blocks", row == list(range(num_blocks)), True)
    expect_same("row", list(manager.get_block_ids("a")) == row, True)
    expect_same("num_blocks_of", manager.num_blocks_of("a"), num_blocks)
    numbers = (manager.num_used_blocks, manager.num_free_blocks)
    expect_same("used and free blocks", numbers, (num_blocks, 5))
    tokens = [position * 7 % 5 for position in range(2 * num_blocks)]
    manager.cache_full_blocks("a", tokens, len(tokens), EXTRA_KEYS[0])
    known = list(manager.get_computed_blocks([*tokens, 1], EXTRA_KEYS[0]))
    expect_same("computed blocks", known == row, True)
    new = list(manager.allocate_slots("b", len(tokens), 4, tuple(known)).new_block_ids)
    expect_same("new blocks", new, [num_blocks, num_blocks + 1])
    expect_same("references", manager.ref_cnt(num_blocks - 1), 2)
    manager.free("a")
    expect_same("references", manager.ref_cnt(num_blocks - 1), 1)
    manager.free("b")
    expect_same("cached blocks", manager.num_cached_blocks, num_blocks)
    order = list(manager.cached_blocks())
    expect_same("order of eviction", order == row[::-1], True)
    many = [(child, child + 1) for child in range(300)]
    manager.allocate_slots(0, 0, 3)
    for parent, child in many:
        manager.fork(parent, child)
    first = next(iter(manager.get_block_ids(300)))
    expect_same("references of a fork", manager.ref_cnt(first), 301)
    expect_same("requests", manager.num_requests, 301)
    expect_same("a reset", manager.reset_prefix_cache(), False)
    for request in range(301):
        expect_same("references", manager.ref_cnt(first), 301 - request)
        manager.free(request)
    expect_same("a reset", manager.reset_prefix_cache(), True)
    expect_same("free blocks", manager.num_free_blocks, num_blocks + 5)


@law("BlockManager", cases=st.sampled_from([1, 2, 9]))
def free_blocks_are_allocated_in_order_of_their_ids_unless_a_seed_shuffles_them(
    setting: Setting, num_blocks: int
) -> None:
    make = setting.candidate.BlockManager
    plain = make(num_blocks, 2).allocate_slots("a", 0, 2 * num_blocks).new_block_ids
    expect_same("blocks without a seed", list(plain), list(range(num_blocks)))
    for seed in (0, 5):
        orders = [
            list(
                make(num_blocks, 2, seed)
                .allocate_slots("a", 0, 2 * num_blocks)
                .new_block_ids
            )
            for _ in range(2)
        ]
        expect_same("blocks of one seed", orders[0], orders[1])
        expect_same("sorted blocks", sorted(orders[0]), list(range(num_blocks)))
        if num_blocks == 9 and orders[0] == list(range(num_blocks)):
            raise Disagreement("order", f"seed {seed}", orders[0], "a shuffled one")


@law("BlockManager", cases=st.integers(1, 5))
def without_prefix_caching_no_content_is_known(
    setting: Setting, block_size: int
) -> None:
    manager = setting.candidate.BlockManager(4, block_size, None, enable_caching=False)
    tokens = list(range(3 * block_size))
    manager.allocate_slots("a", 0, len(tokens))
    manager.cache_full_blocks("a", tokens, len(tokens))
    found = list(manager.get_computed_blocks([*tokens, 1]))
    expect_same("blocks with the same tokens", found, [])
    manager.free("a")
    counts = manager.num_cached_blocks, manager.num_free_blocks
    expect_same("cached and free blocks at the end", counts, (0, 4))


def _unknown_block(manager: Any) -> Any:
    return manager.allocate_slots("b", 2, 1, [2])


INVALID_CALLS: dict[str, Callable[[Any], Any]] = {
    "free of an unknown request": lambda manager: manager.free("b"),
    "row of an unknown request": lambda manager: manager.get_block_ids("b"),
    "fork of an unknown request": lambda manager: manager.fork("b", "c"),
    "fork to a request that holds blocks": lambda manager: manager.fork("a", "a"),
    "full blocks of an unknown request": lambda manager: manager.cache_full_blocks(
        "b", [1, 2], 2
    ),
    "more computed tokens than known ones": lambda manager: manager.cache_full_blocks(
        "a", [1, 2], 4
    ),
    "more computed tokens than slots": lambda manager: manager.cache_full_blocks(
        "a", [1] * 9, 9
    ),
    "no new tokens": lambda manager: manager.allocate_slots("b", 0, 0),
    "a negative count": lambda manager: manager.allocate_slots("b", -1, 2),
    "computed tokens without blocks": lambda manager: manager.allocate_slots("b", 2, 1),
    "computed tokens past the row": lambda manager: manager.allocate_slots("a", 7, 1),
    "computed blocks of a request that holds blocks": lambda manager: (
        manager.allocate_slots("a", 5, 1, [0])
    ),
    "a computed block that is not cached": _unknown_block,
    "computed blocks in another order": lambda manager: manager.allocate_slots(
        "b", 4, 1, [1, 0]
    ),
    "a computed block twice": lambda manager: manager.allocate_slots("b", 4, 1, [0, 0]),
    "a computed block without the one before it": lambda manager: (
        manager.allocate_slots("b", 2, 1, [1])
    ),
    "a block id past the last": lambda manager: manager.ref_cnt(4),
    "a negative block id": lambda manager: manager.ref_cnt(-1),
}


@law(
    "BlockManager",
    cases=st.sampled_from(sorted(INVALID_CALLS)),
    claim="rejects contents",
)
def a_block_manager_rejects_invalid_calls_and_stays_unchanged(
    setting: Setting, name: str
) -> None:
    manager = setting.candidate.BlockManager(4, 2)
    manager.allocate_slots("a", 0, 5)
    manager.cache_full_blocks("a", [1, 2, 3, 4, 5], 5)
    expect_rejection(name, lambda: INVALID_CALLS[name](manager))
    expect_same("row", list(manager.get_block_ids("a")), [0, 1, 2])
    expect_same("free blocks", manager.num_free_blocks, 1)
    counts = [manager.ref_cnt(block_id) for block_id in range(4)]
    expect_same("reference counts", counts, [1, 1, 1, 0])
    found = list(manager.get_computed_blocks([1, 2, 3, 4, 5]))
    expect_same("computed blocks", found, [0, 1])


@law(
    "BlockManager",
    cases=st.sampled_from([(0, 1), (-1, 1), (1, 0), (1, -1)]),
    claim="rejects shapes",
)
def a_cache_without_blocks_or_slots_is_rejected(
    setting: Setting, sizes: tuple[int, int]
) -> None:
    expect_rejection(
        f"BlockManager{sizes}", lambda: setting.candidate.BlockManager(*sizes)
    )
