"""Prefix tree: the known content of full blocks, for prefix caching.

The content of a full block is identified by its tokens and by all tokens before them. Each node of
the tree stands for one such content; the path from the root to it is the token sequence. Tokens are
compared, not hashes, so two contents are never confused. A lookup costs one dictionary access per
block, whatever the length of the sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(eq=False)
class _Node:
    """The content of one full block: its tokens, and the content of the block before it.

    Args:
        tokens: [block_size] the block's tokens.
        parent: the content of the block before it. None for the root, which is no block's.
        children: the contents that continue this one, by their tokens.
        block_ids: the blocks that hold this content, the one that was added first at the front.
    """

    tokens: tuple[int, ...] = ()
    parent: "_Node | None" = None
    children: "dict[tuple[int, ...], _Node]" = field(default_factory=dict)
    block_ids: list[int] = field(default_factory=list)


class PrefixTree:
    """Which block holds which content.

    Args:
        block_size: tokens per block.

    Example:
        >>> tree = PrefixTree(block_size=2)
        >>> tree.add(row=[5, 3, 8], token_ids=[7, 8, 7, 9, 7], num_tokens=5)
        >>> tree.find([7, 8, 7, 9, 6, 6], num_tokens=6)
        [5, 3]
        >>> tree.remove(3)
        >>> tree.find([7, 8, 7, 9, 6, 6], num_tokens=6), 3 in tree
        ([5], False)
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._root = _Node()
        self._node_of: dict[int, _Node] = {}

    def __contains__(self, block_id: int) -> bool:
        """Tell whether a block's content is known."""
        return block_id in self._node_of

    def find(self, token_ids: Sequence[int], num_tokens: int) -> list[int]:
        """Return the blocks that hold the full blocks of the first tokens, as far as known."""
        found: list[int] = []
        node = self._root
        for index in range(num_tokens // self.block_size):
            tokens = self._block(token_ids, index)
            if tokens not in node.children:
                break
            node = node.children[tokens]
            found.append(node.block_ids[0])
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
        while first_unknown and row[first_unknown - 1] not in self._node_of:
            first_unknown -= 1
        node = self._node_of[row[first_unknown - 1]] if first_unknown else self._root
        for index in range(first_unknown, num_full):
            tokens = self._block(token_ids, index)
            parent = node
            node = parent.children.setdefault(tokens, _Node(tokens, parent))
            node.block_ids.append(row[index])
            self._node_of[row[index]] = node

    def remove(self, block_id: int) -> None:
        """Forget the content of one block; a content that no block holds is dropped."""
        node = self._node_of.pop(block_id)
        node.block_ids.remove(block_id)
        if not node.block_ids and node.parent is not None:
            del node.parent.children[node.tokens]

    def is_path(self, block_ids: Sequence[int]) -> list[bool]:
        """Return for each block whether its content continues that of the block before it."""
        nodes = [self._node_of.get(block_id) for block_id in block_ids]
        parents = [self._root, *nodes[:-1]]
        return [
            node is not None and node.parent is parent
            for node, parent in zip(nodes, parents, strict=False)
        ]

    def _block(self, token_ids: Sequence[int], index: int) -> tuple[int, ...]:
        """Return the tokens of one block."""
        first = index * self.block_size
        return tuple(token_ids[first : first + self.block_size])
