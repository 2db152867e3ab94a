"""Block manager: which request holds which block, and which blocks are shared.

The KV cache is a pool of blocks. A request holds a list of block ids in sequence order: its row of
the block table. Every block is in one of three states:

- **in use**: one or more requests hold it, and `ref_cnt` says how many;
- **cached**: no request holds it, but its content is known and a later request may reuse it;
- **free**: nothing is known about its content.

**Prefix caching.** The content of a full block is identified by its tokens and by all tokens before
them (`prefix_cache.py`). A request that begins with the same tokens takes the same blocks and
computes nothing for them.

**Eviction.** When no block is free, the cached block that was released longest ago is handed out.
A request releases its last block first, because a block is useless once a block before it is gone.

**Copy-on-write.** A block that another request holds, or whose content is cached, is never written.
A request that must write to it gets a new block, and the caller copies the content.

**Sliding window.** If no layer attends to more than the last `sliding_window` tokens, a request
releases the blocks before them. Its row keeps its length, so no slot changes: the null block fills
the entries. It is block 0, which no request holds.
"""

import random
from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence

from ...contract.block_classes import SlotAllocation
from ...contract.checks import check_hashable
from ...contract.extra_keys import NO_EXTRA_KEYS, ExtraKeys
from ...contract.integers import as_int, as_ints
from ...contract.kinds import NULL_BLOCK_ID
from ...validation.block_manager import (
    check_allocate_slots,
    check_block_id,
    check_chain,
    check_computed_tokens,
    check_enough_blocks,
    check_fork,
    check_manager,
    check_request_known,
    check_token_ids,
)
from .prefix_cache import ALL_BLOCKS, PrefixCache


class BlockManager:
    """The blocks of a KV cache: allocation, reference counts, prefix caching, copy-on-write.

    Args:
        num_blocks: blocks in the cache, from 1.
        block_size: slots per block, from 1.
        seed: Optional. If given, free blocks are handed out in a shuffled order, so that no block
            table is 0, 1, 2, ... by chance. If None, the first ones are those of the lowest ids.
        enable_caching: whether the content of full blocks is remembered, so that later requests
            with the same beginning take them. If False, `get_computed_blocks` finds nothing.
        sliding_window: Optional. Tokens that a token attends to, its own included, in the layer
            that attends to most. Blocks before them are released, and block 0 is the null block.
            If None, a request keeps all of its blocks.

    Raises:
        TypeError, ValueError: a number is not an integer, or out of range.

    Source:
        vLLM's `KVCacheManager` and `BlockPool` (V1). vLLM identifies a block's content by a hash
        chain, and counts cached blocks as free.

    Example:
        >>> manager = BlockManager(num_blocks=5, block_size=2)
        >>> manager.allocate_slots("a", num_computed_tokens=0, num_new_tokens=5).new_block_ids
        [0, 1, 2]
        >>> manager.cache_full_blocks("a", [7, 8, 7, 9, 7], num_computed_tokens=5)
        >>> manager.get_computed_blocks([7, 8, 7, 9, 6, 6])
        [0, 1]
        >>> manager.allocate_slots("b", 4, 2, computed_blocks=[0, 1]).new_block_ids
        [3]
        >>> manager.fork("a", "c")
        >>> [manager.ref_cnt(block_id) for block_id in range(5)]
        [3, 3, 2, 1, 0]
        >>> manager.allocate_slots("c", num_computed_tokens=5, num_new_tokens=1).blocks_to_copy
        [(2, 4)]
        >>> manager.get_block_ids("a"), manager.get_block_ids("b"), manager.get_block_ids("c")
        ([0, 1, 2], [0, 1, 3], [0, 1, 4])
        >>> for request_id in ("b", "c", "a"):
        ...     manager.free(request_id)
        >>> manager.num_free_blocks, manager.cached_blocks()
        (3, [1, 0])
        >>> manager.allocate_slots("d", num_computed_tokens=0, num_new_tokens=8).new_block_ids
        [3, 4, 2, 1]
        >>> manager.get_computed_blocks([7, 8, 7, 9, 6, 6])
        [0]
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        seed: int | None = None,
        enable_caching: bool = True,
        sliding_window: int | None = None,
    ) -> None:
        """Make a cache whose blocks are all free."""
        check_manager(num_blocks, block_size, seed, enable_caching, sliding_window)
        self.num_blocks = int(num_blocks)
        self.block_size = int(block_size)
        self.enable_caching = enable_caching
        self.sliding_window = None if sliding_window is None else int(sliding_window)
        self.null_block_id = None if sliding_window is None else NULL_BLOCK_ID
        order = [
            block_id for block_id in range(num_blocks) if block_id != self.null_block_id
        ]
        if seed is not None:
            random.Random(int(seed)).shuffle(order)
        self._free = deque(order)
        # unused blocks of known content, the one that was released longest ago first
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._ref_cnts = [0] * num_blocks
        self._rows: dict[Hashable, list[int]] = {}
        self._prefix_cache = PrefixCache(block_size)

    def get_computed_blocks(
        self, token_ids: Sequence[int], extra_keys: ExtraKeys = NO_EXTRA_KEYS
    ) -> list[int]:
        """Return the cached blocks that hold the beginning of a sequence.

        Args:
            token_ids: [tokens] the sequence as far as it is known.
            extra_keys: what its keys depend on besides its tokens.

        Returns:
            Block ids in sequence order. They never hold the whole sequence: the last token is
            left to be computed, because its output is needed for the next token. With a sliding
            window, the null block takes the place of those that the next token does not attend to.
        """
        check_token_ids(token_ids, extra_keys)
        # step: look up the full blocks of all tokens but the last one
        num_tokens = max(0, len(token_ids) - 1)
        return self._prefix_cache.find(
            token_ids, num_tokens, extra_keys, self._num_visible_blocks
        )

    def allocate_slots(
        self,
        request_id: Hashable,
        num_computed_tokens: int,
        num_new_tokens: int,
        computed_blocks: Sequence[int] = (),
    ) -> SlotAllocation:
        """Give a request blocks for its new tokens; no one else reads what it will write.

        Args:
            request_id: the request. It holds no blocks before its first call.
            num_computed_tokens: tokens of it that are in the cache. New ones are stored after.
            num_new_tokens: tokens to be stored, from 1.
            computed_blocks: blocks that `get_computed_blocks` returned, for a first call. The
                request takes them, and `num_computed_tokens` is the number of their slots.

        Returns:
            The new blocks, and the copies that must be made before the tokens are written.

        Raises:
            OutOfBlocks: too few blocks are free or cached. Nothing has changed.
            TypeError: a count or a block id is not an integer, or the id is not hashable.
            ValueError: the counts do not fit the request's blocks, or the computed blocks are not
                cached.
        """
        check_hashable("request_id", request_id)
        num_computed_tokens = as_int("num_computed_tokens", num_computed_tokens)
        num_new_tokens = as_int("num_new_tokens", num_new_tokens, smallest=1)
        is_new = request_id not in self._rows
        row = self._computed_row(computed_blocks) if is_new else self._rows[request_id]
        first_visible = self._first_visible_block(num_computed_tokens)
        check_allocate_slots(
            request_id,
            num_computed_tokens,
            row,
            None if is_new else computed_blocks,
            self.block_size,
            first_visible,
            self.null_block_id,
        )
        # step: find the blocks that may not be written, and how many more are needed
        first_written = num_computed_tokens // self.block_size
        num_blocks = -(-(num_computed_tokens + num_new_tokens) // self.block_size)
        replaced = [
            index
            for index in range(first_written, min(num_blocks, len(row)))
            if self._ref_cnts[row[index]] > 1 or row[index] in self._prefix_cache
        ]
        num_appended = max(0, num_blocks - len(row))
        # find the blocks that the sliding window has passed
        passed = self._passed_blocks(row, first_visible)
        num_free, num_cached = self._count_available(passed, row if is_new else ())
        num_needed = num_appended + len(replaced)
        check_enough_blocks(
            request_id, num_needed, num_free, num_cached, self.num_blocks
        )
        # step: take the computed blocks
        if is_new:
            self._rows[request_id] = row
            for block_id in row:
                if block_id != self.null_block_id:
                    self._cached.pop(block_id, None)
                    self._ref_cnts[block_id] += 1
        # release the blocks that the sliding window has passed; leave the null block there
        if passed:
            row[first_visible - len(passed) : first_visible] = [NULL_BLOCK_ID] * len(
                passed
            )
            self._release(passed)
        # step: replace what may not be written; copy a block that is partly computed
        new_block_ids, blocks_to_copy, released = [], [], []
        for index in replaced:
            new_block_id = self._take_block()
            if index * self.block_size < num_computed_tokens:
                blocks_to_copy.append((row[index], new_block_id))
            else:
                new_block_ids.append(new_block_id)
            released.append(row[index])
            row[index] = new_block_id
        # step: append the blocks that are missing
        for _ in range(num_appended):
            new_block_ids.append(self._take_block())
            row.append(new_block_ids[-1])
        self._release(released)
        return SlotAllocation(new_block_ids, blocks_to_copy)

    def cache_full_blocks(
        self,
        request_id: Hashable,
        token_ids: Sequence[int],
        num_computed_tokens: int,
        extra_keys: ExtraKeys = NO_EXTRA_KEYS,
    ) -> None:
        """Make the content of a request's full blocks known, once it has been written.

        Args:
            request_id: the request.
            token_ids: [tokens] its sequence, at least as far as it is computed.
            num_computed_tokens: tokens whose keys and values are in the cache.
            extra_keys: what the keys depend on besides the tokens, as in `get_computed_blocks`.

        Raises:
            KeyError: the request holds no blocks.
            TypeError: a token or the count is not an integer.
            ValueError: more tokens are computed than are known or have slots.
        """
        check_request_known("request_id", request_id, self._rows)
        check_token_ids(token_ids, extra_keys)
        num_computed_tokens = as_int("num_computed_tokens", num_computed_tokens)
        row = self._rows[request_id]
        check_computed_tokens(
            num_computed_tokens, len(token_ids), len(row), self.block_size
        )
        if not self.enable_caching:
            return
        # step: enter each full block after the one before it
        self._prefix_cache.add(
            row, token_ids, num_computed_tokens, extra_keys, self.null_block_id
        )

    def fork(self, parent_id: Hashable, child_id: Hashable) -> None:
        """Let a new request hold the same blocks, for parallel sampling or beam search.

        Args:
            parent_id: a request that holds blocks.
            child_id: a request that holds none.

        Raises:
            KeyError: the parent holds no blocks.
            TypeError: the child's id is not hashable.
            ValueError: the child holds blocks already.
        """
        check_fork(parent_id, child_id, self._rows)
        # step: share every block, the last one too; the first request that writes to it gets a copy
        self._rows[child_id] = list(self._rows[parent_id])
        for block_id in self._rows[child_id]:
            if block_id != self.null_block_id:
                self._ref_cnts[block_id] += 1

    def free(self, request_id: Hashable) -> None:
        """Release all blocks of a request; those of known content stay cached.

        Args:
            request_id: the request.

        Raises:
            KeyError: the request holds no blocks.
        """
        check_request_known("request_id", request_id, self._rows)
        # step: release the last block first, so that it is evicted first
        self._release(self._rows.pop(request_id))

    def reset_prefix_cache(self) -> bool:
        """Forget the content of all blocks, for example because the model has new weights.

        Returns:
            Whether it was forgotten. Nothing changes while a request holds blocks, because it
            would make old content known again.

        Source:
            vLLM's `BlockPool.reset_prefix_cache`.

        Example:
            >>> manager = BlockManager(num_blocks=2, block_size=2)
            >>> _ = manager.allocate_slots("a", 0, 3)
            >>> manager.cache_full_blocks("a", [7, 8, 7], 3)
            >>> manager.reset_prefix_cache()
            False
            >>> manager.free("a")
            >>> manager.reset_prefix_cache(), manager.get_computed_blocks([7, 8, 7])
            (True, [])
        """
        if self.num_used_blocks:
            return False
        # the cached blocks become free, in the order in which they would be evicted
        self._free.extend(self._cached)
        self._cached.clear()
        self._prefix_cache = PrefixCache(self.block_size)
        return True

    def get_block_ids(self, request_id: Hashable) -> list[int]:
        """Return a copy of a request's row of the block table.

        Raises:
            KeyError: the request holds no blocks.
        """
        check_request_known("request_id", request_id, self._rows)
        return list(self._rows[request_id])

    def num_blocks_of(self, request_id: Hashable) -> int:
        """Return how many entries a request's row has; 0 if it holds no blocks."""
        check_hashable("request_id", request_id)
        return len(self._rows.get(request_id, ()))

    def ref_cnt(self, block_id: int) -> int:
        """Return how many requests hold a block.

        Raises:
            IndexError: a block id is outside the cache.
            TypeError: it is not an integer.
        """
        check_block_id(block_id, self.num_blocks)
        return self._ref_cnts[block_id]

    def cached_blocks(self) -> list[int]:
        """Return the cached blocks in the order in which they are evicted."""
        return list(self._cached)

    @property
    def num_requests(self) -> int:
        """Requests that hold blocks."""
        return len(self._rows)

    @property
    def num_free_blocks(self) -> int:
        """Blocks without known content that no request holds."""
        return len(self._free)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks of known content that no request holds."""
        return len(self._cached)

    @property
    def num_used_blocks(self) -> int:
        """Blocks that a request holds; a shared block counts once, the null block never."""
        num_used = self.num_blocks - len(self._free) - len(self._cached)
        return num_used - (self.null_block_id is not None)

    @property
    def _num_visible_blocks(self) -> int:
        """Blocks before it that the first token of a block attends to."""
        if self.sliding_window is None:
            return ALL_BLOCKS
        return -(-(self.sliding_window - 1) // self.block_size)

    def _first_visible_block(self, position: int) -> int:
        """Return the index of the first block that a token and all later ones attend to."""
        if self.sliding_window is None:
            return 0
        return max(0, position - self.sliding_window + 1) // self.block_size

    def _computed_row(self, computed_blocks: Sequence[int]) -> list[int]:
        """Return the row that a new request begins with; raise if it is not one content."""
        row, num_visible = (
            as_ints("computed_blocks", computed_blocks),
            self._num_visible_blocks,
        )
        check_chain(row, self._prefix_cache.is_sequence(row, num_visible))
        num_hidden = max(0, len(row) - num_visible)
        row[:num_hidden] = [NULL_BLOCK_ID] * num_hidden
        return row

    def _passed_blocks(self, row: Sequence[int], first_visible: int) -> list[int]:
        """Return the blocks of a row before its first visible one."""
        if not first_visible:
            return []
        first = first_visible
        while first and row[first - 1] != self.null_block_id:
            first -= 1
        return list(row[first:first_visible])

    def _count_available(
        self, passed: Sequence[int], computed_blocks: Sequence[int]
    ) -> tuple[int, int]:
        """Return how many blocks are free and cached, once some are released and others taken."""
        if not passed and not computed_blocks:
            return len(self._free), len(self._cached)
        released = [block_id for block_id in passed if self._ref_cnts[block_id] == 1]
        num_known = sum(block_id in self._prefix_cache for block_id in released)
        num_taken = sum(block_id in self._cached for block_id in computed_blocks)
        num_free = len(self._free) + len(released) - num_known
        return num_free, len(self._cached) + num_known - num_taken

    def _take_block(self) -> int:
        """Return a free block for one request, or evict the cached block released longest ago."""
        if self._free:
            block_id = self._free.popleft()
        else:
            # step: evict the cached block that was released longest ago
            block_id, _ = self._cached.popitem(last=False)
            self._prefix_cache.remove(block_id)
        self._ref_cnts[block_id] = 1
        return block_id

    def _release(self, block_ids: Sequence[int]) -> None:
        """Count one request less for each block, the last block first."""
        for block_id in reversed(block_ids):
            if block_id == self.null_block_id:
                continue
            self._ref_cnts[block_id] -= 1
            if self._ref_cnts[block_id]:
                continue
            if block_id in self._prefix_cache:
                self._cached[block_id] = None
            else:
                self._free.append(block_id)
