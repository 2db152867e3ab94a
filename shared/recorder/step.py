"""The metadata of one step: as the engine's tensors, and as arrays on the host.

On a CUDA device the tensors are copied to pinned memory without waiting. The copies are read in
the next step, so the recorder does not make the host wait for the device.
"""

from collections.abc import Hashable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..contract.metadata_classes import CommonAttentionMetadata

Integers = NDArray[np.integer[Any]]
ARRAYS = ("query_start_loc", "seq_lens", "block_table", "slot_mapping")


@dataclass(frozen=True)
class StepTensors:
    """One step's metadata as the engine has it.

    Args:
        query_start_loc: [reqs + 1] start of each request's new tokens.
        seq_lens: [reqs] tokens of each sequence after the step's cache write.
        block_table: [reqs, max_blocks].
        slot_mapping: [tokens], padding included.
        max_query_len, max_seq_len: upper bounds on the host.
        block_size: slots per block.
        stores_all: whether every new token has a slot. False for layers that share a cache and
            for context parallelism.
        window: Optional. Keys that a query attends to. If None, all.
        scheduler_group: name of the rows in `Recorder.schedule_groups` that belong to the step.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    max_query_len: int
    max_seq_len: int
    block_size: int
    stores_all: bool = True
    window: int | None = None
    scheduler_group: Hashable = 0

    def addresses(self) -> dict[str, int]:
        """Return the address of each tensor, by name."""
        return {name: getattr(self, name).data_ptr() for name in ARRAYS}


def step_tensors(
    common: CommonAttentionMetadata,
    block_size: int,
    window: int | None = None,
    stores_all: bool = True,
) -> StepTensors:
    """Return what the recorder needs of a step's metadata.

    Args:
        common: the step.
        block_size: slots per block.
        window, stores_all: as in `StepTensors`.
    """
    return StepTensors(
        query_start_loc=common.query_start_loc,
        seq_lens=common.seq_lens,
        block_table=common.block_table_tensor,
        slot_mapping=common.slot_mapping,
        max_query_len=common.max_query_len,
        max_seq_len=common.max_seq_len,
        block_size=block_size,
        stores_all=stores_all,
        window=window,
    )


@dataclass(frozen=True)
class HostStep:
    """One step's metadata on the host.

    Args:
        number: number of the step, from 1.
        group: name of the layers that share these metadata.
        query_start_loc, seq_lens, block_table, slot_mapping: as in `StepTensors`, as arrays.
        max_query_len, max_seq_len, block_size, stores_all, window: as in `StepTensors`.
        num_blocks: Optional. Blocks in the cache. None before the first cache was seen.
    """

    number: int
    group: str
    query_start_loc: Integers
    seq_lens: Integers
    block_table: Integers
    slot_mapping: Integers
    max_query_len: int
    max_seq_len: int
    block_size: int
    stores_all: bool = True
    window: int | None = None
    num_blocks: int | None = None

    @cached_property
    def query_lens(self) -> Integers:
        """[reqs] new tokens of each request."""
        return np.diff(self.query_start_loc)

    @cached_property
    def used(self) -> NDArray[np.bool_]:
        """[reqs, max_blocks]: whether an entry holds keys that new tokens attend to."""
        starts = np.arange(self.block_table.shape[1]) * self.block_size
        lens = np.where(self.query_lens > 0, self.seq_lens, 0)
        used: NDArray[np.bool_] = starts < lens[:, None]
        if self.window is not None:
            used &= starts + self.block_size > self.first_keys[:, None]
        return used

    @cached_property
    def first_keys(self) -> Integers:
        """[reqs] the first key of each request that its new tokens attend to."""
        if self.window is None:
            return np.zeros_like(self.seq_lens)
        first: Integers = self.seq_lens - self.query_lens - self.window + 1
        return first.clip(min=0)

    @cached_property
    def entries(self) -> Integers:
        """[reqs, max_blocks]: the entries of `used`, and -1 for the others."""
        return np.where(self.used, self.block_table, -1)

    @cached_property
    def written_blocks(self) -> Integers:
        """[stored tokens] the block of each new token that is stored."""
        stored = self.slot_mapping
        if stored.min(initial=0) < 0:
            stored = stored[stored >= 0]
        return stored // self.block_size

    @property
    def num_tokens(self) -> int:
        """New tokens, padding not counted."""
        return int(self.query_start_loc[-1]) if len(self.query_start_loc) else 0

    def row_of(self, token: int) -> int:
        """Return the row of the request that a new token belongs to."""
        return int(np.searchsorted(self.query_start_loc, token, side="right")) - 1

    def position_of(self, token: int) -> int:
        """Return the position of a new token in its sequence."""
        row = self.row_of(token)
        return int(self.seq_lens[row] - self.query_start_loc[row + 1] + token)

    def blocks_of(self, row: int) -> Integers:
        """Return the blocks that hold a request's sequence, in order."""
        used = -(-int(self.seq_lens[row]) // self.block_size)
        return self.block_table[row, :used]

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain numbers and tensors, to be stored."""
        stored: dict[str, Any] = {
            field.name: getattr(self, field.name) for field in fields(self)
        }
        for name in ARRAYS:
            stored[name] = torch.from_numpy(np.ascontiguousarray(stored[name]))
        # columns that no request uses would only cost space
        width = -(-int(self.seq_lens.max(initial=0)) // self.block_size)
        stored["block_table"] = stored["block_table"][:, : max(width, 1)].clone()
        return stored

    @classmethod
    def of_dict(cls, stored: dict[str, Any]) -> "HostStep":
        """Return the step that `as_dict` stored."""
        known = {field.name: stored[field.name] for field in fields(cls)}
        for name in ARRAYS:
            known[name] = known[name].numpy()
        return cls(**known)


class StepCopy:
    """A copy of a step's tensors to the host, which may still be under way.

    Args:
        tensors: the step.
        number, group: of the `HostStep`.
    """

    def __init__(self, tensors: StepTensors, number: int, group: str) -> None:
        self._tensors = tensors
        self._number, self.group = number, group
        self._event: Any = None
        used = -(-tensors.max_seq_len // tensors.block_size)
        width = min(max(used, 1), tensors.block_table.shape[1])
        parts = {name: getattr(tensors, name) for name in ARRAYS}
        parts["block_table"] = tensors.block_table[:, :width]
        self._parts = {name: _to_host(part) for name, part in parts.items()}
        if tensors.seq_lens.is_cuda:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self, num_blocks: int | None) -> HostStep:
        """Return the step; waits until it is copied."""
        if self._event is not None:
            self._event.synchronize()
        tensors = self._tensors
        arrays = {name: part.numpy() for name, part in self._parts.items()}
        return HostStep(
            number=self._number,
            group=self.group,
            max_query_len=int(tensors.max_query_len),
            max_seq_len=int(tensors.max_seq_len),
            block_size=tensors.block_size,
            stores_all=tensors.stores_all,
            window=tensors.window,
            num_blocks=num_blocks,
            **arrays,
        )


def _to_host(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        # the engine may change its buffers in place before the step is stored
        return tensor.detach().clone()
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor.detach(), non_blocking=True)
