"""Prefix cache: which block holds which tokens, so that equal beginnings are computed once.

The content of a full block is identified by its tokens and by all tokens before them. Each content
gets a number, and the content after it is found by that number and its own tokens. So a lookup
costs one dictionary access per block, whatever the length of the sequence. The dictionary compares
the tokens themselves, not their hashes, so two contents are never confused.
"""

from collections.abc import Sequence

NO_CONTENT = 0
"""The content before the first block of a sequence."""


class PrefixCache:
    """Which block holds which content.

    Args:
        block_size: tokens per block.

    Example:
        >>> cache = PrefixCache(block_size=2)
        >>> cache.add(row=[5, 3, 8], token_ids=[7, 8, 7, 9, 7], num_tokens=5)
        >>> cache.find([7, 8, 7, 9, 6, 6], num_tokens=6)
        [5, 3]
        >>> cache.remove(3)
        >>> cache.find([7, 8, 7, 9, 6, 6], num_tokens=6), 3 in cache
        ([5], False)
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._num_contents = 0
        # content before it, own tokens -> content; and back
        self._contents: dict[tuple[int, tuple[int, ...]], int] = {}
        self._keys: dict[int, tuple[int, tuple[int, ...]]] = {}
        # which blocks hold a content, the one that was added first at the front; and back
        self._blocks_with: dict[int, list[int]] = {}
        self._content_of: dict[int, int] = {}

    def __contains__(self, block_id: int) -> bool:
        """Tell whether a block's content is known."""
        return block_id in self._content_of

    def find(self, token_ids: Sequence[int], num_tokens: int) -> list[int]:
        """Return the blocks that hold the full blocks of the first tokens, as far as known."""
        found: list[int] = []
        content = NO_CONTENT
        for index in range(num_tokens // self.block_size):
            key = (content, self._tokens_of_block(token_ids, index))
            if key not in self._contents:
                break
            content = self._contents[key]
            found.append(self._blocks_with[content][0])
        return found

    def add(
        self, row: Sequence[int], token_ids: Sequence[int], num_tokens: int
    ) -> None:
        """Add the content of a row's blocks that the first tokens fill.

        Args:
            row: block ids. Those whose content is known come first.
            token_ids: the tokens that they hold.
            num_tokens: how many tokens have been written.
        """
        num_full = first_unknown = num_tokens // self.block_size
        while first_unknown and row[first_unknown - 1] not in self:
            first_unknown -= 1
        content = NO_CONTENT
        if first_unknown:
            content = self._content_of[row[first_unknown - 1]]
        for index in range(first_unknown, num_full):
            key = (content, self._tokens_of_block(token_ids, index))
            if key not in self._contents:
                self._num_contents += 1
                self._contents[key] = self._num_contents
                self._keys[self._num_contents] = key
                self._blocks_with[self._num_contents] = []
            content = self._contents[key]
            self._blocks_with[content].append(row[index])
            self._content_of[row[index]] = content

    def remove(self, block_id: int) -> None:
        """Forget the content of one block; a content that no block holds is dropped."""
        content = self._content_of.pop(block_id)
        self._blocks_with[content].remove(block_id)
        if not self._blocks_with[content]:
            del self._blocks_with[content]
            del self._contents[self._keys.pop(content)]

    def is_sequence(self, block_ids: Sequence[int]) -> list[bool]:
        """Return for each block whether its content continues that of the block before it."""
        is_next, before = [], NO_CONTENT
        for block_id in block_ids:
            content = self._content_of.get(block_id, NO_CONTENT)
            is_next.append(content in self._keys and self._keys[content][0] == before)
            before = content
        return is_next

    def _tokens_of_block(self, token_ids: Sequence[int], index: int) -> tuple[int, ...]:
        first = index * self.block_size
        return tuple(token_ids[first : first + self.block_size])
