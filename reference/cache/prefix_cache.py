"""Prefix cache: which block holds which content, so that equal beginnings are computed once.

The content of a full block is identified by its tokens, by what its keys depend on besides them
(`generate_block_hash_extra_keys`), and by all content before it. Each content gets a number, and
the content after it is found by that number, its own tokens and its own extra keys. So a lookup
costs one dictionary access per block, whatever the length of the sequence. The dictionary compares
the tokens themselves, not their hashes, so two contents are never confused.
"""

from collections.abc import Hashable, Iterator, Sequence
from itertools import pairwise
from sys import maxsize
from typing import TypeAlias

from ...contract.extra_keys import NO_EXTRA_KEYS, ExtraKeys
from ...contract.integers import as_ints
from ...contract.kinds import NULL_BLOCK_ID

NO_CONTENT = 0
"""The content before the first block of a sequence."""

ALL_BLOCKS = maxsize
"""How many blocks a token attends to if no window ends."""

Key: TypeAlias = tuple[tuple[int, ...], tuple[Hashable, ...]]
"""The tokens of a block, and its extra keys."""


def generate_block_hash_extra_keys(
    extra_keys: ExtraKeys, start_token_idx: int, end_token_idx: int
) -> tuple[Hashable, ...]:
    """Return what identifies the content of a block besides its tokens and the blocks before it.

    Args:
        extra_keys: those of the sequence.
        start_token_idx, end_token_idx: the positions of the block, the end excluded.

    Returns:
        The adapter and the salt, if it is the first block: all later ones follow from it. Each
        feature with a token in the block, with the position of its first token in the block.

    Source:
        vLLM's function of that name. There an adapter and a salt of the same name are equal.

    Example:
        An image of 6 tokens begins at position 3, in blocks of 4.

        >>> image = MultiModalFeature("image", offset=3, length=6, identifier="cat")
        >>> keys = ExtraKeys(cache_salt="alice", mm_features=(image,))
        >>> generate_block_hash_extra_keys(keys, 0, 4)
        (('salt', 'alice'), ('image', 'cat', 3, 6))
        >>> generate_block_hash_extra_keys(keys, 4, 8)
        (('image', 'cat', -1, 6),)
        >>> generate_block_hash_extra_keys(keys, 12, 16)
        ()
    """
    keys: list[Hashable] = []
    if start_token_idx == 0:
        named = ("lora", extra_keys.lora_name), ("salt", extra_keys.cache_salt)
        keys += [key for key in named if key[1] is not None]
    for feature in extra_keys.mm_features:
        begin, length = feature.offset, feature.length
        if max(begin, start_token_idx) < min(begin + length, end_token_idx):
            # the position too: two images can meet at different tokens of equal blocks
            begin -= start_token_idx
            keys.append((feature.modality, feature.identifier, begin, length))
    return tuple(keys)


class PrefixCache:
    """Which block holds which content.

    Args:
        block_size: tokens per block.

    Example:
        >>> cache = PrefixCache(block_size=2)
        >>> cache.add(row=[5, 3, 8], token_ids=[7, 8, 7, 9, 7], num_tokens=5)
        >>> cache.find([7, 8, 7, 9, 6, 6], num_tokens=6)
        [5, 3]
        >>> cache.find([7, 8, 7, 9], 4, extra_keys=ExtraKeys(cache_salt="alice"))
        []
        >>> cache.remove(3)
        >>> cache.find([7, 8, 7, 9, 6, 6], num_tokens=6), 3 in cache
        ([5], False)
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._num_contents = 0
        # content before it, own key -> content; and back
        self._contents: dict[tuple[int, Key], int] = {}
        self._keys: dict[int, tuple[int, Key]] = {}
        # which blocks hold a content, the one that was added first at the front; and back
        self._blocks_with: dict[int, list[int]] = {}
        self._content_of: dict[int, int] = {}
        # how many known contents continue a content
        self._num_next = {NO_CONTENT: 0}

    def __contains__(self, block_id: int) -> bool:
        """Tell whether a block's content is known."""
        return block_id in self._content_of

    def find(
        self,
        token_ids: Sequence[int],
        num_tokens: int,
        extra_keys: ExtraKeys = NO_EXTRA_KEYS,
        num_visible: int = ALL_BLOCKS,
    ) -> list[int]:
        """Return the blocks that hold the full blocks of the first tokens, as far as known.

        Args:
            token_ids: the sequence.
            num_tokens: how many of them are looked up.
            extra_keys: those of the sequence.
            num_visible: how many blocks before it the next token attends to. The others are the
                null block, whether they are known or not; only the last one has to be known.

        Raises:
            TypeError, ValueError: a token is not an integer of 64 bits.
        """
        # follow the known contents
        contents, content = [], NO_CONTENT
        for key in self._keys_of(token_ids, 0, num_tokens, extra_keys):
            content = self._contents.get((content, key), NO_CONTENT)
            if content == NO_CONTENT:
                break
            contents.append(content)
        # find the most tokens whose visible blocks are all there
        num_found = num_in_a_row = 0
        for end, content in enumerate(contents, 1):
            num_in_a_row = num_in_a_row + 1 if self._blocks_with[content] else 0
            if num_in_a_row >= min(end, max(1, num_visible)):
                num_found = end
        first = max(0, num_found - num_visible)
        found = [self._blocks_with[content][0] for content in contents[first:num_found]]
        return [NULL_BLOCK_ID] * first + found

    def add(
        self,
        row: Sequence[int],
        token_ids: Sequence[int],
        num_tokens: int,
        extra_keys: ExtraKeys = NO_EXTRA_KEYS,
        null_block_id: int | None = None,
    ) -> None:
        """Add the content of a row's blocks that the first tokens fill.

        Args:
            row: block ids: null blocks, those whose content is known, and others, in this order.
            token_ids: the tokens that they hold.
            num_tokens: how many tokens have been written.
            extra_keys: those of the sequence.
            null_block_id: Optional. The null block. If None, the row has none.

        Raises:
            TypeError, ValueError: a token is not an integer of 64 bits. Nothing is added.
        """
        num_full = first = num_tokens // self.block_size
        while first and row[first - 1] not in self and row[first - 1] != null_block_id:
            first -= 1
        if first == num_full:
            return
        content, known_to = NO_CONTENT, 0
        if first and row[first - 1] in self:
            content, known_to = self._content_of[row[first - 1]], first
        # a list: all tokens are validated before anything is added
        keys = [*self._keys_of(token_ids, known_to, num_tokens, extra_keys)]
        for index, key in enumerate(keys, known_to):
            content = self._number_of(content, key)
            if index >= first:
                self._blocks_with[content].append(row[index])
                self._content_of[row[index]] = content

    def remove(self, block_id: int) -> None:
        """Forget the content of one block.

        A content that no block holds is dropped once no known content continues it.
        """
        content = self._content_of.pop(block_id)
        self._blocks_with[content].remove(block_id)
        while (
            content and not self._blocks_with[content] and not self._num_next[content]
        ):
            key = self._keys.pop(content)
            del self._contents[key], self._blocks_with[content], self._num_next[content]
            content = key[0]
            self._num_next[content] -= 1

    def is_sequence(
        self, block_ids: Sequence[int], num_visible: int = ALL_BLOCKS
    ) -> list[bool]:
        """Return for each block whether its content continues that of the blocks before it.

        Args:
            block_ids: block ids of a sequence.
            num_visible: as in `find`. The null block is right before the visible ones.
        """
        num_hidden = max(0, len(block_ids) - num_visible)
        first = 0
        while first < num_hidden and block_ids[first] == NULL_BLOCK_ID:
            first += 1
        contents = [
            self._content_of.get(block_id, NO_CONTENT) for block_id in block_ids[first:]
        ]
        if not contents:
            return [True] * first
        before = self._keys[contents[0]][0] if contents[0] else NO_CONTENT
        is_next = [contents[0] != NO_CONTENT and self._depth_of(before) == first]
        for one, other in pairwise(contents):
            is_next.append(other != NO_CONTENT and self._keys[other][0] == one)
        return [True] * first + is_next

    def _depth_of(self, content: int) -> int:
        """Return how many blocks a sequence has up to a content."""
        depth = 0
        while content != NO_CONTENT:
            content, depth = self._keys[content][0], depth + 1
        return depth

    def _number_of(self, content: int, key: Key) -> int:
        """Return the content that continues another one; it gets a number if it has none."""
        found = self._contents.get((content, key))
        if found is None:
            self._num_contents += 1
            found = self._contents[content, key] = self._num_contents
            self._keys[found] = content, key
            self._blocks_with[found] = []
            self._num_next[found] = 0
            self._num_next[content] += 1
        return found

    def _keys_of(
        self,
        token_ids: Sequence[int],
        first: int,
        num_tokens: int,
        extra_keys: ExtraKeys,
    ) -> Iterator[Key]:
        """Yield the keys of the full blocks of a sequence from block `first` on."""
        size = self.block_size
        own: tuple[Hashable, ...] = ()
        for start in range(first * size, num_tokens // size * size, size):
            tokens = tuple(token_ids[start : start + size])
            if set(map(type, tokens)) != {int}:
                tokens = tuple(as_ints("token_ids", tokens, smallest=-(2**63)))
            if extra_keys is not NO_EXTRA_KEYS:
                own = generate_block_hash_extra_keys(extra_keys, start, start + size)
            yield tokens, own
