"""Histories of a cache, run with a candidate's operations and with a plain model.

Requests start, share a prefix, grow token by token, fork and then diverge (copy on write), end, are
preempted, and are swapped to the host and back. Blocks that are freed are soon reused. A history is
a list of such actions in small numbers, so that a failing one can be read and shrunk. Every list is
valid: a number selects one of the requests that exist, counted modulo their number.

The machine does each action twice: with the candidate's operations, and in a model that consists of
lists and one indexed tensor per cache. After every action both caches must hold the same bytes, and
every tensor of the step the same numbers.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...contract.kinds import PAD_SLOT_ID
from ..candidates.setting import Setting
from ..cases.batches import empty_cache
from ..checks.expect import expect_same

KINDS = (
    "start",
    "share",
    "step",
    "append",
    "fork",
    "free",
    "preempt",
    "swap out",
    "swap in",
)
MOST_REQUESTS = 4
MOST_BLOCKS = 6
"""Maximum number of blocks per sequence."""
NUM_BLOCKS = 14
HOST_BLOCKS = 12
CAPTURED_REQS = (1, 2, 4)
CAPTURED_TOKENS = (1, 2, 4, 8, 16, 32)
"""Sizes to which a step is padded, as for captured CUDA graphs."""


@dataclass(frozen=True)
class CacheAction:
    """One action.

    Args:
        kind: One of KINDS.
        which: Selects a request, modulo the number of requests.
        tokens: Number of new tokens, for actions that add some.
    """

    kind: str
    which: int = 0
    tokens: int = 1


@dataclass(frozen=True)
class CacheHistory:
    """All actions on one cache.

    Args:
        actions: The actions in order. An action that is not possible is skipped.
        block_size: Slots per block.
        layout: Strides of the cache.
        filled: Whether steps are padded to captured sizes.
        shuffled: Whether the requests of a step are in another order than their rows.
    """

    actions: tuple[CacheAction, ...]
    block_size: int = 4
    layout: str = "separate"
    filled: bool = True
    shuffled: bool = False


@dataclass
class Sequence:
    """One request: its tokens and their blocks.

    Args:
        row: Its row of the block table. None while it is swapped out.
        tokens: The ids of its tokens, in order.
        blocks: Its blocks, on the device, or on the host while it is swapped out.
        on_host: Whether its blocks are on the host.
    """

    row: int | None
    tokens: list[int]
    blocks: list[int]
    on_host: bool = False


@dataclass
class Pool:
    """The reference count of each block, and the free blocks."""

    owners: list[int]
    free: list[int]

    @classmethod
    def of(cls, count: int) -> "Pool":
        # scattered: 5 is coprime to both pool sizes
        order = sorted(range(count), key=lambda block: (5 * block + 3) % count)
        return cls([0] * count, order)

    def take(self) -> int:
        block = self.free.pop()
        self.owners[block] = 1
        return block

    def leave(self, block: int) -> None:
        self.owners[block] -= 1
        if not self.owners[block]:
            self.free.append(block)


@dataclass
class Machine:
    """A cache with its block table, modified by a candidate, and the model of both.

    Args:
        setting: The candidate and its device.
        history: The actions, and the layout of the cache.
    """

    setting: Setting
    history: CacheHistory
    sequences: list[Sequence] = field(default_factory=list)
    next_token: int = 1

    def __post_init__(self) -> None:
        size, device = self.history.block_size, self.setting.device
        sizes = (size, 2, 3, torch.float32)
        # NaN everywhere: a slot that is not written must remain NaN
        self.cache = empty_cache(self.history.layout, NUM_BLOCKS, *sizes, device)
        self.host_cache = empty_cache("separate", HOST_BLOCKS, *sizes)
        self.right = torch.full_like(
            self.cache, torch.nan, device="cpu", memory_format=torch.contiguous_format
        )
        self.right_on_host = torch.full_like(self.host_cache, torch.nan)
        self.pool, self.host_pool = Pool.of(NUM_BLOCKS), Pool.of(HOST_BLOCKS)
        self.buffers = self.setting.candidate.StepBuffers(
            MOST_REQUESTS, CAPTURED_TOKENS[-1], MOST_BLOCKS, size, device
        )
        self.first_step: Any = None

    # step: actions

    def run(self) -> None:
        """Do all actions, and compare both caches after each."""
        for action in self.history.actions:
            getattr(self, action.kind.replace(" ", "_"))(action)
            self.compare(action)

    def start(self, action: CacheAction) -> None:
        """Start a request with a new prompt."""
        self._begin([], [], action.tokens)

    def share(self, action: CacheAction) -> None:
        """Start a request that shares the full blocks of another one."""
        if other := self._one(action, waiting=False):
            full = len(other.tokens) // self.history.block_size
            tokens = other.tokens[: full * self.history.block_size]
            self._begin(other.blocks[:full], tokens, action.tokens)

    def fork(self, action: CacheAction) -> None:
        """Start a request that shares all blocks of another one, including the last."""
        row = self._free_row()
        if (other := self._one(action, waiting=False)) and row is not None:
            for block in other.blocks:
                self.pool.owners[block] += 1
            self._set_row(row, other.blocks)
            self.sequences.append(Sequence(row, list(other.tokens), list(other.blocks)))

    def step(self, action: CacheAction) -> None:
        """Add one new token to every running request, in one step."""
        self._step([(sequence, 1) for sequence in self._running()])

    def append(self, action: CacheAction) -> None:
        """Add some new tokens to one request, and one token to every other."""
        chosen = self._one(action, waiting=False)
        self._step(
            [
                (sequence, action.tokens if sequence is chosen else 1)
                for sequence in self._running()
            ]
        )

    def free(self, action: CacheAction) -> None:
        """End a request."""
        if (chosen := self._one(action, waiting=False)) and chosen.row is not None:
            self.buffers.clear_rows([chosen.row])
            for block in chosen.blocks:
                self.pool.leave(block)
            self._drop(chosen)

    def preempt(self, action: CacheAction) -> None:
        """Free a request, and start one with as many tokens."""
        if chosen := self._one(action, waiting=False):
            count = len(chosen.tokens)
            self.free(action)
            self._begin([], [], count)

    def swap_out(self, action: CacheAction) -> None:
        """Move the blocks of a request to the host."""
        chosen = self._one(action, waiting=False)
        if chosen is None or len(self.host_pool.free) < len(chosen.blocks):
            return
        assert chosen.row is not None
        there = [self.host_pool.take() for _ in chosen.blocks]
        pairs = list(zip(chosen.blocks, there, strict=True))
        self._swap(self.cache, self.host_cache, pairs)
        for taken, given in pairs:
            self.right_on_host[:, given] = self.right[:, taken]
            self.pool.leave(taken)
        self.buffers.clear_rows([chosen.row])
        chosen.row, chosen.blocks, chosen.on_host = None, there, True

    def swap_in(self, action: CacheAction) -> None:
        """Move the blocks of a swapped-out request back to newly allocated blocks."""
        chosen, row = self._one(action, waiting=True), self._free_row()
        if chosen is None or row is None:
            return
        if len(self.pool.free) < len(chosen.blocks):
            return
        here = [self.pool.take() for _ in chosen.blocks]
        pairs = list(zip(chosen.blocks, here, strict=True))
        self._swap(self.host_cache, self.cache, pairs)
        for taken, given in pairs:
            self.right[:, given] = self.right_on_host[:, taken]
            self.host_pool.leave(taken)
        self._set_row(row, here)
        chosen.row, chosen.blocks, chosen.on_host = row, here, False

    # step: parts of the actions

    def _running(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if sequence.row is not None]

    def _one(self, action: CacheAction, waiting: bool) -> Sequence | None:
        there = [sequence for sequence in self.sequences if sequence.on_host == waiting]
        return there[action.which % len(there)] if there else None

    def _drop(self, chosen: Sequence) -> None:
        self.sequences = [
            sequence for sequence in self.sequences if sequence is not chosen
        ]

    def _free_row(self) -> int | None:
        used = {sequence.row for sequence in self._running()}
        # the last row first, so that the rows in use do not begin at 0
        free = [row for row in reversed(range(MOST_REQUESTS)) if row not in used]
        return free[0] if free else None

    def _set_row(self, row: int, blocks: list[int]) -> None:
        self.buffers.clear_rows([row])
        self.buffers.append_blocks([row], [list(blocks)])

    def _swap(
        self, source: Tensor, destination: Tensor, pairs: list[tuple[int, int]]
    ) -> None:
        mapping = torch.tensor(pairs, dtype=torch.int64).view(-1, 2)
        self.setting.candidate.swap_blocks(source, destination, mapping)

    def _begin(self, blocks: list[int], tokens: list[int], new: int) -> None:
        """Start a request with some cached and some new tokens."""
        row = self._free_row()
        if row is None:
            return
        for block in blocks:
            self.pool.owners[block] += 1
        sequence = Sequence(row, list(tokens), list(blocks))
        self._set_row(row, blocks)
        self.sequences.append(sequence)
        if not self._step([(sequence, new)]):
            self.buffers.clear_rows([row])
            for block in blocks:
                self.pool.leave(block)
            self._drop(sequence)

    def _make_room(self, sequence: Sequence, new: int) -> bool:
        """Allocate unshared blocks for new tokens; return False if there are not enough."""
        size = self.history.block_size
        blocks, held = sequence.blocks, len(sequence.tokens)
        needed = -(-(held + new) // size)
        # copy on write: the block to which new tokens are written must not be shared
        written = range(held // size, min(len(blocks), needed))
        shared = [index for index in written if self.pool.owners[blocks[index]] > 1]
        fresh = needed - len(blocks)
        if needed > MOST_BLOCKS or len(shared) + fresh > len(self.pool.free):
            return False
        copies = []
        for index in shared:
            copies.append((blocks[index], self.pool.take()))
            self.pool.leave(blocks[index])
            blocks[index] = copies[-1][1]
        assert sequence.row is not None
        if copies:
            mapping = torch.tensor(copies, dtype=torch.int64)
            self.setting.candidate.copy_blocks([self.cache], mapping)
            for source, destination in copies:
                self.right[:, destination] = self.right[:, source]
            self._set_row(sequence.row, blocks)
        more = [self.pool.take() for _ in range(fresh)]
        blocks += more
        # a decode that needs no new block appends an empty list, as engines do
        self.buffers.append_blocks([sequence.row], [more])
        return True

    def _step(self, wanted: list[tuple[Sequence, int]]) -> bool:
        """Compute new tokens of some requests in one step; return whether there were any."""
        batch = []
        room = CAPTURED_TOKENS[-1]
        for sequence, new in wanted:
            if new <= room and self._make_room(sequence, new):
                batch.append((sequence, new))
                room -= new
        if not batch:
            return False
        if self.history.shuffled:
            batch = batch[1::2] + batch[::2]
        size = self.history.block_size
        lens = [new for _, new in batch]
        computed = [len(sequence.tokens) for sequence, _ in batch]
        rows = [sequence.row for sequence, _ in batch]
        tokens, slots = [], []
        for sequence, new in batch:
            for _ in range(new):
                block = sequence.blocks[len(sequence.tokens) // size]
                slots.append(block * size + len(sequence.tokens) % size)
                sequence.tokens.append(self.next_token)
                tokens.append(self.next_token)
                self.next_token += 1
        reqs_padded = next(size for size in CAPTURED_REQS if size >= len(batch))
        tokens_padded = next(size for size in CAPTURED_TOKENS if size >= len(tokens))
        padded = (
            {"num_reqs_padded": reqs_padded, "num_tokens_padded": tokens_padded}
            if self.history.filled
            else {}
        )
        found = self.buffers.build(lens, computed, rows, **padded)
        reqs = reqs_padded if padded else len(batch)
        self._compare_step(found, batch, reqs, computed, slots)
        key, value = (
            self._contents(tokens, len(found.slot_mapping), sign) for sign in (1, -1)
        )
        self.setting.candidate.reshape_and_cache(
            key, value, *self.cache.unbind(0), found.slot_mapping
        )
        for token, slot in zip(tokens, slots, strict=True):
            for side, sign in enumerate((1, -1)):
                self.right[side, slot // size, slot % size] = self._content(token, sign)
        return True

    def _content(self, token: int, sign: int) -> Tensor:
        """Return [kv_heads, head_size] a token's key or value, in which all numbers are unique."""
        return sign * (8.0 * token + torch.arange(6.0).view(2, 3))

    def _contents(self, tokens: list[int], rows: int, sign: int) -> Tensor:
        """Return [rows, kv_heads, head_size]; padding rows are NaN."""
        found = torch.full((rows, 2, 3), torch.nan)
        for index, token in enumerate(tokens):
            found[index] = self._content(token, sign)
        return found.to(self.setting.device)

    # step: comparisons

    def _compare_step(
        self,
        found: Any,
        batch: list[tuple[Sequence, int]],
        reqs: int,
        computed: list[int],
        slots: list[int],
    ) -> None:
        """Compare every tensor of a step; tensors of the first step must hold the same values."""
        lens = [new for _, new in batch] + [0] * (reqs - len(batch))
        seq_lens = [
            before + new for before, (_, new) in zip(computed, batch, strict=True)
        ]
        seq_lens += [0] * (reqs - len(batch))
        starts = [sum(lens[:req]) for req in range(reqs + 1)]

        def int32(numbers: list[int]) -> Tensor:
            return torch.tensor(numbers, dtype=torch.int32)

        padding = [PAD_SLOT_ID] * (len(found.slot_mapping) - len(slots))
        expect_same("num_reqs", found.num_reqs, reqs)
        expect_same("num_actual_tokens", found.num_actual_tokens, len(slots))
        expect_same("max_query_len", found.max_query_len, max(lens))
        expect_same("max_seq_len", found.max_seq_len, max(seq_lens))
        expect_same("seq_lens", found.seq_lens, int32(seq_lens))
        expect_same("seq_lens_cpu", found.seq_lens_cpu, int32(seq_lens))
        expect_same("query_start_loc", found.query_start_loc, int32(starts))
        expect_same("query_start_loc_cpu", found.query_start_loc_cpu, int32(starts))
        expect_same(
            "num_computed_tokens_cpu",
            found.num_computed_tokens_cpu,
            int32(computed + [0] * (reqs - len(batch))),
        )
        right = torch.tensor(slots + padding, dtype=torch.int64)
        expect_same("slot_mapping", found.slot_mapping, right)
        for req, (sequence, _) in enumerate(batch):
            row = found.block_table_tensor[req, : len(sequence.blocks)]
            expect_same(f"row {req} of the table", row, int32(sequence.blocks))
        if self.first_step is None:
            self.first_step = found
        for name in ("slot_mapping", "seq_lens", "query_start_loc"):
            # a captured graph reads the tensors of the first step, so these must be updated
            old, new = getattr(self.first_step, name), getattr(found, name)
            both = min(len(old), len(new))
            expect_same(f"{name} of the first step, now", old[:both], new[:both].cpu())
        old, new = self.first_step.block_table_tensor, found.block_table_tensor
        both = min(len(old), len(new))
        expect_same("the first step's table, now", old[:both], new[:both].cpu())

    def compare(self, action: CacheAction) -> None:
        """Compare both caches, and the gathered keys and values of all sequences."""
        expect_same(f"the cache after {action.kind}", self.cache, self.right)
        expect_same(
            f"the host's cache after {action.kind}", self.host_cache, self.right_on_host
        )
        running = self._running()
        width = max((len(sequence.blocks) for sequence in running), default=0)
        # past the end of a row: an id outside of the cache
        table = torch.full((len(running), width), NUM_BLOCKS + 7, dtype=torch.int32)
        starts, tokens = [0], []
        for req, sequence in enumerate(running):
            table[req, : len(sequence.blocks)] = torch.tensor(
                sequence.blocks, dtype=torch.int32
            )
            tokens += sequence.tokens
            starts.append(len(tokens))
        device = self.setting.device
        found = self.setting.candidate.gather_cache(
            *self.cache.unbind(0),
            table.to(device),
            torch.tensor(starts, dtype=torch.int32, device=device),
            len(tokens),
        )
        for name, gathered, sign in zip(
            ("keys", "values"), found, (1, -1), strict=True
        ):
            right = self._contents(tokens, len(tokens), sign)
            expect_same(f"gathered {name} after {action.kind}", gathered, right)
