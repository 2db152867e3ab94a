"""Samples: what sampled steps compare. Cache writes and attention of one layer, watched blocks.

Layers take turns: each sampled step compares one of them.
"""

import functools
import inspect
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from ..contract.operations import load_implementation
from .graphs import CopiedRows
from .laws.attention import RecordedCall, check_attention, why_not_recomputed
from .laws.cache import RecordedWrite, WatchedBlock, check_watched, check_write
from .laws.selection import check_selection
from .reports import Reports
from .settings import RecorderSettings
from .step import HostStep, Integers


@functools.cache
def unvalidated(name: str) -> Callable[..., Any]:
    """Return an operation of the reference without its validation.

    The validation makes the host wait for the device some thirty times, and the recorder makes the
    arguments itself.
    """
    operation: Callable[..., Any]
    operation = inspect.unwrap(getattr(load_implementation("reference"), name))
    return operation


class Samples:
    """The comparisons of sampled steps, and what they need from one to the next.

    Args:
        settings: how much is compared.
        reports: takes the violations.
        checked: counts of what was compared, modified in place.
    """

    def __init__(
        self, settings: RecorderSettings, reports: Reports, checked: dict[str, int]
    ) -> None:
        self.settings = settings
        self.layers: list[str] = []
        """The layers seen so far, in the order of their first calls."""
        self._reports, self._checked = reports, checked
        self._last_write: dict[str, Integers] = {}
        self._watched: list[WatchedBlock] = []
        self._next_watched: list[WatchedBlock] = []
        # the step that was the current one when the engine changed a block by itself
        self._changed: dict[int, int] = {}

    def is_sampled(self, number: int) -> bool:
        """Return whether a step is sampled: the first one, and every `sample_every`-th."""
        every = self.settings.sample_every
        return number % every == 1 % every

    def is_turn(self, layer: str, number: int) -> bool:
        """Return whether a step compares this layer."""
        if layer not in self.layers:
            self.layers.append(layer)
        if not self.is_sampled(number):
            return False
        turn = number // self.settings.sample_every
        return self.layers[turn % len(self.layers)] == layer

    def compare_write(self, write: RecordedWrite, step: HostStep) -> None:
        """Compare some of the keys and values that a step has written."""
        self._compare_rows_written(
            write, step, {row: row for row in self._choose(step)}
        )

    def compare_replay(self, replay: CopiedRows, step: HostStep) -> None:
        """Compare what a graph has copied in a step.

        Call it before the next step writes to the cache. Not compared are padding, and tokens whose
        block the engine has copied to or filled since the step began: their request may be gone.

        Args:
            replay: the copies.
            step: the step.
        """
        slots, size = step.slot_mapping, step.block_size
        rows = {
            token: row
            for row, token in enumerate(replay.tokens)
            if token < step.num_tokens
            and self._changed.get(int(slots[token]) // size) != step.number
        }
        if replay.write is not None:
            self._compare_rows_written(replay.write, step, rows)
        call = replay.call
        index = torch.tensor(list(rows.values()), dtype=torch.int64)
        index = index.to(call.query.device)
        self.compare_rows(call.take(index), step, list(rows))

    def compare_attention(self, call: RecordedCall, step: HostStep) -> None:
        """Compare some rows of a step's attention, and watch some blocks."""
        tokens = self._choose(step, call.query.shape[0])
        rows = torch.tensor(tokens).to(call.query.device)
        self.compare_rows(call.take(rows), step, tokens)

    def compare_rows(
        self, call: RecordedCall, step: HostStep, tokens: Sequence[int]
    ) -> None:
        """Compare rows of attention, and watch some blocks of the layer.

        Args:
            call: the call, with the queries and outputs of the tokens alone.
            step: the step.
            tokens: the new tokens.
        """
        run = unvalidated("paged_attention")
        if not why_not_recomputed(call):
            self._checked["rows"] += len(tokens)
        finding = None
        if call.selection is not None and len(tokens):
            self._checked["selections"] += len(tokens)
            finding = check_selection(call.layer, call.selection, step, tokens)
        if finding is None:
            finding = check_attention(call, step, tokens, run)
        self._reports.report(finding, step, step.number)
        self._watch(call, step)

    def note_changes(self, block_ids: Iterable[int], number: int) -> None:
        """Note blocks that the engine changed without a token's write.

        Args:
            block_ids: the blocks.
            number: number of the current step, which has begun.
        """
        self._changed.update(dict.fromkeys(block_ids, number))

    def note_writes(self, step: HostStep) -> None:
        """Note which blocks a step writes."""
        blocks = step.written_blocks
        size = max(int(step.num_blocks or 0), int(blocks.max(initial=-1)) + 1)
        writes = self._last_write.get(step.group, np.zeros(0, np.int64))
        if len(writes) < size:
            writes = np.concatenate([writes, np.zeros(size - len(writes), np.int64)])
            self._last_write[step.group] = writes
        writes[blocks] = step.number

    def compare_watched(
        self, step_of: Callable[[str], HostStep | None], number: int
    ) -> None:
        """Compare the blocks watched since the last sampled step, and take over the new ones.

        Args:
            step_of: returns the current step of a group, whose writes are done.
            number: number of the current step.
        """
        watched, self._watched = self._watched, self._next_watched
        self._next_watched = []
        for block in watched:
            step = step_of(block.group)
            writes = self._last_write.get(block.group)
            if step is None or writes is None or block.block_id in self._changed:
                continue
            self._checked["blocks"] += 1
            finding = check_watched(block, step, writes)
            self._reports.report(finding, step, step.number)
        # what changed since this step began is the next step's
        self._changed = {
            block_id: changed
            for block_id, changed in self._changed.items()
            if changed >= number
        }

    def _compare_rows_written(
        self, write: RecordedWrite, step: HostStep, rows: dict[int, int]
    ) -> None:
        """Compare the new tokens that have a slot in the cache.

        Args:
            write: the call.
            step: the step.
            rows: the row of key and value of each sampled new token.
        """
        # a slot outside of the cache violates another law
        end = write.key_cache.shape[0] * write.key_cache.shape[1]
        slots = step.slot_mapping
        stored = {token: row for token, row in rows.items() if 0 <= slots[token] < end}
        if not stored:
            return
        index = torch.tensor(list(stored.values())).to(write.key.device)
        self._checked["writes"] += len(stored)
        run = unvalidated("reshape_and_cache")
        finding = check_write(write.take(index), step, list(stored), run)
        self._reports.report(finding, step, step.number)

    def _watch(self, call: RecordedCall, step: HostStep) -> None:
        """Copy some full blocks, to be compared in the next sampled step."""
        computed = step.seq_lens - step.query_lens
        full = np.where(step.query_lens > 0, computed // step.block_size, 0)
        rows = np.flatnonzero(full > 0).tolist()
        draw = self._random(step)
        for row in draw.sample(rows, min(self.settings.watched_blocks, len(rows))):
            # blocks before the window may have been given up
            first = -(-int(step.first_keys[row]) // step.block_size)
            if first >= int(full[row]):
                continue
            column = draw.randrange(first, int(full[row]))
            block_id = int(step.block_table[row, column])
            caches = (call.key_cache, call.value_cache, *call.stored_scales)
            self._next_watched.append(
                WatchedBlock.of(call.layer, step, block_id, column, *caches)
            )

    def _choose(self, step: HostStep, first: int | None = None) -> list[int]:
        """Return the sampled tokens: the last one of the longest sequence, and random ones.

        Args:
            step: the step.
            first: Optional. The tokens are among so many first ones. If None, among all.
        """
        tokens = step.num_tokens if first is None else min(first, step.num_tokens)
        ends = step.query_start_loc[1:]
        is_among = (step.query_lens > 0) & (ends <= tokens)
        longest = int(np.where(is_among, step.seq_lens, -1).argmax())
        last = min(int(ends[longest]), tokens) - 1
        count = min(self.settings.rows, tokens)
        drawn = self._random(step).sample(range(tokens), count)
        return sorted({last, *drawn[: count - (last not in drawn)]})

    def _random(self, step: HostStep) -> random.Random:
        return random.Random(self.settings.seed * 1_000_003 + step.number)
