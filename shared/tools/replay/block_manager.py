"""Who owns which block, and which blocks can be shared?

Every block is in one of three states: in use by one request or several, cached (nobody uses it, but
its content is known and may be wanted again), or free. A full block is known by its exact content:
its own tokens and the chain of blocks before it. A request that begins with the same tokens takes
the same blocks and computes nothing. When free blocks run out, the cached block that was used
longest ago loses its content and is handed out anew.
"""

import random
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence

from .tokens import Tokens

NO_PARENT = 0
"""The content before a sequence's first block."""


class OutOfBlocks(RuntimeError):
    """More blocks were asked for than are free or cached."""


class BlockManager:
    """Hands out blocks, counts who uses them, and finds what can be shared.

    Args:
        num_blocks: blocks in the cache, from 1.
        block_size: slots in a block, from 1.
        seed: scrambles the order in which blocks are handed out, so that no block table is
            0, 1, 2, ... by chance.

    Raises:
        ValueError: a number out of range.
    """

    def __init__(self, num_blocks: int, block_size: int, seed: int = 0) -> None:
        for name, number in (("num_blocks", num_blocks), ("block_size", block_size)):
            if number < 1:
                raise ValueError(f"{name} = {number}: expected at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        order = list(range(num_blocks))
        random.Random(seed).shuffle(order)
        self._free = deque(order)
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._users: Counter[int] = Counter()
        # a content is a number that stands for one chain of tokens and never for another: the
        # dictionary compares the tokens themselves, their hash only finds the place
        self._contents: dict[tuple[int, bytes], int] = {}
        self._block_of: dict[int, int] = {}
        self._content_of: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks whose content means nothing."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody uses, whose content may be wanted again."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks in use, a shared one counted once."""
        return len(self._users)

    def users(self, block_id: int) -> int:
        """Return how many requests use a block."""
        return self._users.get(block_id, 0)

    def cached_blocks(self) -> list[int]:
        """Return the cached blocks, the one to be evicted first at the front."""
        return list(self._cached)

    def find_prefix(self, tokens: Tokens) -> list[int]:
        """Return the blocks that already hold a sequence's beginning.

        Args:
            tokens: [known] the sequence as far as it is known.

        Returns:
            Block ids in sequence order. They never hold the whole sequence: its last token is
            left to be computed, since without a query there is no answer.
        """
        found: list[int] = []
        content = NO_PARENT
        for index in range((len(tokens) - 1) // self.block_size):
            child = self._contents.get((content, self._bytes(tokens, index)))
            if child is None or child not in self._block_of:
                break
            content = child
            found.append(self._block_of[child])
        return found

    def can_take(self, shared: Sequence[int], new: int) -> bool:
        """Tell whether those blocks can be shared and as many new ones handed out."""
        revived = sum(block_id in self._cached for block_id in shared)
        return new <= self.num_free + self.num_cached - revived

    def share(self, blocks: Sequence[int]) -> None:
        """Count one more user of each block, which `find_prefix` returned.

        Raises:
            ValueError: a block without known content.
        """
        for block_id in blocks:
            if block_id not in self._content_of:
                raise ValueError(
                    f"block {block_id} holds no known content: expected a block that"
                    " find_prefix returned"
                )
        for block_id in blocks:
            self._cached.pop(block_id, None)
            self._users[block_id] += 1

    def allocate(self, count: int) -> list[int]:
        """Return new blocks for one user; what they held is forgotten.

        Raises:
            OutOfBlocks: fewer are free or cached; nothing is handed out.
        """
        if count > self.num_free + self.num_cached:
            raise OutOfBlocks(
                f"{count} blocks asked for, {self.num_free} free and {self.num_cached}"
                f" cached of {self.num_blocks}: expected at most"
                f" {self.num_free + self.num_cached}; release some first"
            )
        blocks = []
        for _ in range(count):
            if self._free:
                block_id = self._free.popleft()
            else:
                block_id, _ = self._cached.popitem(last=False)
                del self._block_of[self._content_of.pop(block_id)]
            self._users[block_id] = 1
            blocks.append(block_id)
        return blocks

    def remember(self, row: Sequence[int], tokens: Tokens, contents: list[int]) -> None:
        """Make a request's full blocks known to others, once they are written.

        Args:
            row: the request's blocks.
            tokens: [computed] the tokens whose keys and values are in the cache.
            contents: what the request's first blocks hold, changed: extended by the blocks that
                became full.
        """
        for index in range(len(contents), len(tokens) // self.block_size):
            parent = contents[-1] if contents else NO_PARENT
            chain = (parent, self._bytes(tokens, index))
            content = self._contents.setdefault(chain, len(self._contents) + 1)
            contents.append(content)
            # of two blocks with one content the first is known; the other stays private
            if content not in self._block_of and row[index] not in self._content_of:
                self._block_of[content] = row[index]
                self._content_of[row[index]] = content

    def release(self, row: Sequence[int]) -> None:
        """Give a request's blocks back; the ones of known content stay cached.

        Raises:
            ValueError: a block that nobody uses.
        """
        for block_id in row:
            if block_id not in self._users:
                raise ValueError(
                    f"block {block_id} is released but nobody uses it: expected a block in"
                    " use"
                )
        # the tail first: a block is worth nothing once one before it is gone
        for block_id in reversed(row):
            self._users[block_id] -= 1
            if self._users[block_id]:
                continue
            del self._users[block_id]
            if block_id in self._content_of:
                self._cached[block_id] = None
            else:
                self._free.append(block_id)

    def _bytes(self, tokens: Tokens, index: int) -> bytes:
        first = index * self.block_size
        return tokens[first : first + self.block_size].tobytes()
