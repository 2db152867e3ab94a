"""The block-table rows of a `PagedCache`, which all of its layers share.

The library's batch has one length: requests are padded. A column of it is a token or padding.
Padding gets no slot, so a request's tokens are consecutive in its blocks.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ....contract.block_classes import OutOfBlocks
from ....contract.metadata_classes import CommonAttentionMetadata
from ....contract.operations import Implementation
from ....reference.cache.block_manager import BlockManager
from ....validation.library_caches import check_num_requests, check_same_tokens


@dataclass(frozen=True, eq=False)
class Contents:
    """What the pages hold after a write, the same for every layer.

    Args:
        is_token: [reqs, columns] bool, on the CPU: the columns that are tokens and have slots.
        num_new: columns of the last write.
        metadata: block table, lengths, and the slots of the last write.
        blocks_to_copy: copies that each layer makes before it writes.
    """

    is_token: Tensor
    num_new: int
    metadata: CommonAttentionMetadata
    blocks_to_copy: Sequence[tuple[int, int]]

    @property
    def num_columns(self) -> int:
        """Columns so far."""
        return self.is_token.shape[1]

    @property
    def new_tokens(self) -> Tensor:
        """[reqs, num_new] bool: the columns of the last write that are tokens."""
        return self.is_token[:, self.num_columns - self.num_new :]


class BlockRows:
    """The requests of a cache, their blocks, and which of their columns are tokens.

    Args:
        run: the implementation that builds metadata.
        num_blocks: blocks in each layer's cache.
        block_size: slots per block.
        lengths: Optional. [reqs] tokens of each request that are stored. If None, the attention
            mask says which columns are tokens.
    """

    def __init__(
        self,
        run: Implementation,
        num_blocks: int,
        block_size: int,
        lengths: Sequence[int] | None,
    ) -> None:
        self.run = run
        # shuffled, so that no block table is 0, 1, 2, ... by chance
        self.manager = BlockManager(num_blocks, block_size, seed=0)
        self.lengths = None if lengths is None else list(lengths)
        self.contents: Contents | None = None
        self._ids: list[int] = []
        self._next_id = 0
        self._holding: set[int] = set()

    @property
    def num_columns(self) -> int:
        """Columns so far."""
        return 0 if self.contents is None else self.contents.num_columns

    @property
    def num_requests(self) -> int:
        """Requests in the cache."""
        return len(self._ids)

    def check_requests(self, num_reqs: int) -> None:
        """Raise ValueError if the number of requests has changed."""
        if self.lengths is not None:
            check_num_requests(num_reqs, len(self.lengths), "lengths")
        if self._ids:
            check_num_requests(num_reqs, len(self._ids), "rows")

    def extend(self, tokens: Tensor, device: torch.device) -> Contents:
        """Return the contents after new columns; their tokens get slots.

        Args:
            tokens: [reqs, new] bool: the new columns that are tokens.
            device: device of the pages.

        Raises:
            OutOfBlocks: the cache is full. Nothing has changed.
        """
        before = self.flags(len(tokens))
        ids = self._ids or [self._take_id() for _ in tokens]
        after = torch.cat([before, tokens], 1)
        computed, known = before.sum(1).tolist(), after.sum(1).tolist()
        held = [len(row) for row in self._rows()] or [0] * len(ids)
        block_size = self.manager.block_size
        # no more blocks than these are taken: new ones, and copies of those from the first written
        most = sum(
            max(end // block_size + 1, num_held) - first // block_size
            for first, end, num_held in zip(computed, known, held, strict=True)
        )
        backup = self.manager
        if most > self.manager.num_free_blocks:
            backup = copy.deepcopy(self.manager)
        holding, blocks_to_copy = set(self._holding), []
        try:
            for request_id, first, end in zip(ids, computed, known, strict=True):
                if end > first:
                    allocation = self.manager.allocate_slots(
                        request_id, first, end - first
                    )
                    holding.add(request_id)
                    blocks_to_copy += allocation.blocks_to_copy
        except OutOfBlocks:
            self.manager = backup
            raise
        self._ids, self._holding = ids, holding
        self.contents = self._contents(after, tokens.shape[1], device, blocks_to_copy)
        return self.contents

    def same_step(self, tokens: Tensor) -> Contents:
        """Return the contents that another layer of the same run has written."""
        assert self.contents is not None
        check_same_tokens(torch.equal(self.contents.new_tokens, tokens))
        return self.contents

    def select(self, indices: Sequence[int], device: torch.device) -> list[int]:
        """Replace the requests by some of them; return the blocks that became free.

        Args:
            indices: for each new request the old one whose content it gets. Requests that occur
                several times share their blocks; blocks are copied when one of them is written.
            device: device of the pages.
        """
        before = {block_id for row in self._rows() for block_id in row}
        selected = []
        for index in indices:
            parent_id, child_id = self._ids[index], self._take_id()
            selected.append(child_id)
            if parent_id in self._holding:
                self.manager.fork(parent_id, child_id)
                self._holding.add(child_id)
        for request_id in self._ids:
            if request_id in self._holding:
                self.manager.free(request_id)
                self._holding.remove(request_id)
        self._ids = selected
        if self.lengths is not None:
            self.lengths = [self.lengths[index] for index in indices]
        self._rewrite(
            lambda flags: flags[torch.tensor(indices, dtype=torch.int64)], device
        )
        return sorted(
            block_id for block_id in before if self.manager.ref_cnt(block_id) == 0
        )

    def crop(self, num_columns: int, device: torch.device) -> None:
        """Forget the last columns; their blocks stay with the requests, for the next tokens."""
        self._rewrite(lambda flags: flags[:, :num_columns], device)

    def reset(self) -> list[int]:
        """Forget all requests; return the blocks that became free."""
        freed = {block_id for row in self._rows() for block_id in row}
        for request_id in self._holding:
            self.manager.free(request_id)
        self._ids, self._holding, self.contents = [], set(), None
        return sorted(freed)

    def _take_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def _rows(self) -> list[list[int]]:
        """Return [reqs] block ids of each request."""
        return [
            self.manager.get_block_ids(request_id)
            if request_id in self._holding
            else []
            for request_id in self._ids
        ]

    def flags(self, num_reqs: int) -> Tensor:
        """Return [reqs, columns] bool: the columns that are tokens."""
        if self.contents is None:
            return torch.zeros(num_reqs, 0, dtype=torch.bool)
        return self.contents.is_token

    def _rewrite(
        self, change: Callable[[Tensor], Tensor], device: torch.device
    ) -> None:
        """Change the columns without a write."""
        if self.contents is not None:
            flags = change(self.contents.is_token)
            self.contents = self._contents(flags, 0, device, ())

    def _contents(
        self,
        is_token: Tensor,
        num_new: int,
        device: torch.device,
        blocks_to_copy: Sequence[tuple[int, int]],
    ) -> Contents:
        known = is_token.sum(1).tolist()
        computed = is_token[:, : is_token.shape[1] - num_new].sum(1).tolist()
        metadata: CommonAttentionMetadata = self.run.build_common_attn_metadata(
            query_lens=[
                end - first for first, end in zip(computed, known, strict=True)
            ],
            num_computed_tokens=computed,
            block_rows=self._rows(),
            block_size=self.manager.block_size,
            device=device,
        )
        return Contents(is_token, num_new, metadata, blocks_to_copy)
