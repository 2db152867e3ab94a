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
"""

import random
from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence

from ...contract.block_classes import SlotAllocation
from ...validation.block_manager import (
    check_allocate_slots,
    check_block_id,
    check_chain,
    check_computed_tokens,
    check_enough_blocks,
    check_fork,
    check_request_known,
)
from ...validation.primitives import check_positive
from .prefix_cache import PrefixCache


class BlockManager:
    """The blocks of a KV cache: allocation, reference counts, prefix caching, copy-on-write.

    Args:
        num_blocks: blocks in the cache, from 1.
        block_size: slots per block, from 1.
        seed: Optional. If given, free blocks are handed out in a shuffled order, so that no block
            table is 0, 1, 2, ... by chance. If None, the first ones are those of the lowest ids.
        enable_caching: whether the content of full blocks is remembered, so that later requests
            with the same beginning take them. If False, `get_computed_blocks` finds nothing.

    Raises:
        ValueError: a number is out of range.

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
    ) -> None:
        """Make a cache whose blocks are all free."""
        check_positive(num_blocks=num_blocks, block_size=block_size)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_caching = enable_caching
        order = list(range(num_blocks))
        if seed is not None:
            random.Random(seed).shuffle(order)
        self._free = deque(order)
        # unused blocks of known content, the one that was released longest ago first
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._ref_cnts = [0] * num_blocks
        self._rows: dict[Hashable, list[int]] = {}
        self._prefix_cache = PrefixCache(block_size)

    def get_computed_blocks(self, token_ids: Sequence[int]) -> list[int]:
        """Return the cached blocks that hold the beginning of a sequence.

        Args:
            token_ids: [tokens] the sequence as far as it is known.

        Returns:
            Block ids in sequence order. They never hold the whole sequence: the last token is
            left to be computed, because its output is needed for the next token.
        """
        # step: look up the full blocks of all tokens but the last one
        return self._prefix_cache.find(token_ids, max(0, len(token_ids) - 1))

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
            ValueError: the counts do not fit the request's blocks, or the computed blocks are not
                cached.
        """
        row = self._rows.get(request_id)
        check_allocate_slots(
            request_id,
            num_computed_tokens,
            num_new_tokens,
            row,
            computed_blocks,
            self.block_size,
        )
        check_chain(computed_blocks, self._prefix_cache.is_sequence(computed_blocks))
        row = list(computed_blocks) if row is None else row
        # step: find the blocks that may not be written, and how many more are needed
        first_written = num_computed_tokens // self.block_size
        replaced = [
            index
            for index in range(first_written, len(row))
            if self._ref_cnts[row[index]] > 1 or row[index] in self._prefix_cache
        ]
        num_slots_needed = num_computed_tokens + num_new_tokens
        num_appended = max(0, -(-num_slots_needed // self.block_size) - len(row))
        num_revived = sum(block_id in self._cached for block_id in computed_blocks)
        check_enough_blocks(
            request_id,
            num_appended + len(replaced),
            len(self._free),
            len(self._cached) - num_revived,
            self.num_blocks,
        )
        # step: take the computed blocks
        for block_id in computed_blocks:
            self._cached.pop(block_id, None)
            self._ref_cnts[block_id] += 1
        self._rows[request_id] = row
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
        self, request_id: Hashable, token_ids: Sequence[int], num_computed_tokens: int
    ) -> None:
        """Make the content of a request's full blocks known, once it has been written.

        Args:
            request_id: the request.
            token_ids: [tokens] its sequence, at least as far as it is computed.
            num_computed_tokens: tokens whose keys and values are in the cache.

        Raises:
            KeyError: the request holds no blocks.
            ValueError: more tokens are computed than are known or have slots.
        """
        check_request_known(request_id, self._rows)
        row = self._rows[request_id]
        check_computed_tokens(
            num_computed_tokens, len(token_ids), len(row), self.block_size
        )
        if not self.enable_caching:
            return
        # step: enter each full block after the one before it
        self._prefix_cache.add(row, token_ids, num_computed_tokens)

    def fork(self, parent_id: Hashable, child_id: Hashable) -> None:
        """Let a new request hold the same blocks, for parallel sampling or beam search.

        Args:
            parent_id: a request that holds blocks.
            child_id: a request that holds none.

        Raises:
            KeyError: the parent holds no blocks.
            ValueError: the child holds blocks already.
        """
        check_fork(parent_id, child_id, self._rows)
        # step: share every block, the last one too; the first request that writes to it gets a copy
        self._rows[child_id] = list(self._rows[parent_id])
        for block_id in self._rows[child_id]:
            self._ref_cnts[block_id] += 1

    def free(self, request_id: Hashable) -> None:
        """Release all blocks of a request; those of known content stay cached.

        Args:
            request_id: the request.

        Raises:
            KeyError: the request holds no blocks.
        """
        check_request_known(request_id, self._rows)
        # step: release the last block first, so that it is evicted first
        self._release(self._rows.pop(request_id))

    def get_block_ids(self, request_id: Hashable) -> list[int]:
        """Return a copy of a request's row of the block table.

        Raises:
            KeyError: the request holds no blocks.
        """
        check_request_known(request_id, self._rows)
        return list(self._rows[request_id])

    def ref_cnt(self, block_id: int) -> int:
        """Return how many requests hold a block.

        Raises:
            IndexError: a block id is outside the cache.
        """
        check_block_id(block_id, self.num_blocks)
        return self._ref_cnts[block_id]

    def cached_blocks(self) -> list[int]:
        """Return the cached blocks in the order in which they are evicted."""
        return list(self._cached)

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
        """Blocks that a request holds; a shared block counts once."""
        return self.num_blocks - len(self._free) - len(self._cached)

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
            self._ref_cnts[block_id] -= 1
            if self._ref_cnts[block_id]:
                continue
            if block_id in self._prefix_cache:
                self._cached[block_id] = None
            else:
                self._free.append(block_id)
