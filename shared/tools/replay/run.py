"""The replay loop: a whole trace, step by step, on all twins.

In each step the scheduler decides, the synthetic model makes queries, keys and values, every twin
computes, and the results are compared. Blocks that are handed out for new content are filled with
NaN first (poison), so a twin that reads one slot too many gives NaN.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...contract.budgets import Verdict
from ...contract.operations import Implementation
from ...contract.scheduler_classes import SchedulerOutput
from ...contract.specs import KVCacheSpec
from ...recorder import Recorder
from ...reference.batch.arrivals import schedule_arrivals
from ...reference.batch.scheduler import Scheduler
from ...reference.cache.block_manager import BlockManager
from ...validation.scheduler import check_fits
from .batch import ReplayBatch, keep_rows, make_batch
from .memory import check_memory
from .mismatch import StoredStep, TwinMismatch, Violation, save_step
from .model import LayerInputs, SyntheticModel
from .named_twins import load_reference, make_twin
from .oracle import MAX_SCORES_PER_CHUNK
from .settings import CACHE_SHARE, ReplaySettings
from .step import ReplayLaw, Stage, compare_whole_caches, run_step
from .tokens import draw_tokens
from .trace import TraceLengths, read_trace, scale_trace
from .traffic import arrival_steps, make_requests, next_tokens, peak_blocks
from .twins import ImplementationTwin, ReplayTwin

FREE, CACHED = -1, -2
"""Entries of `StepRecord.holders` for blocks that no request holds."""


@dataclass(frozen=True)
class StepRecord:
    """Counts, times and comparisons of one step.

    Args:
        step: number of the step, from 1. Idle times of the trace are not counted.
        prefill_tokens: new tokens of requests that compute more than one.
        decode_tokens: new tokens of requests that compute one.
        recomputed_tokens: new tokens that had been computed before a preemption.
        prefix_hit_tokens: tokens that new requests found in the cache.
        regained_tokens: tokens that preempted requests found there when they were admitted again.
        running, waiting: number of requests.
        preempted: numbers of the requests that were preempted.
        used, cached, free: number of blocks in each state.
        has_attention: whether attention was computed.
        seconds: for each twin its seconds in each stage.
        oracle_seconds: seconds spent on the float64 oracle and the comparisons.
        verdicts: for each twin its worst row.
        holders: [num_blocks] number of the request that holds each block, FREE or CACHED. Empty
            unless recorded.
        shared: [num_blocks] whether several requests hold a block. Empty unless recorded.
    """

    step: int
    prefill_tokens: int
    decode_tokens: int
    recomputed_tokens: int
    prefix_hit_tokens: int
    regained_tokens: int
    running: int
    waiting: int
    preempted: tuple[int, ...]
    used: int
    cached: int
    free: int
    has_attention: bool
    seconds: list[dict[Stage, float]]
    oracle_seconds: float
    verdicts: list[Verdict]
    holders: NDArray[np.int32]
    shared: NDArray[np.bool_]


class Replay:
    """A trace, a scheduler, and the twins that compute each step.

    Args:
        settings: everything that the replay depends on.
        implementations: implementations that are loaded already, by name.
        folder: Optional. Folder in which a step is stored if the twins differ. If None, the step
            is not stored.
        with_holders: whether the records contain the holder of every block.
        max_scores: score elements that the oracle holds in memory at once.
        recorder: Optional. Checks the steps of the last twin. If None, no recorder does.

    Raises:
        FileNotFoundError, ValueError: the trace cannot be read, a twin cannot be loaded, or a
            request does not fit in the cache.
        MemoryError: the caches need more memory than is available.
    """

    def __init__(
        self,
        settings: ReplaySettings,
        implementations: Mapping[str, Implementation] | None = None,
        folder: Path | None = None,
        with_holders: bool = False,
        max_scores: int = MAX_SCORES_PER_CHUNK,
        recorder: Recorder | None = None,
    ) -> None:
        whole = read_trace(settings.trace, settings.requests)
        trace = scale_trace(whole, settings.scale, settings.output_scale)
        self.lengths = TraceLengths.of(trace)
        """Lengths of the requests that are replayed."""
        self.trace_lengths = TraceLengths.of(whole)
        """Lengths of the same requests in the trace."""
        self.sequences = draw_tokens(trace, settings.seed)
        self.requests = make_requests(trace, self.sequences)
        self._arrivals = arrival_steps(trace, settings.steps_per_second)
        if settings.num_blocks is None:
            peak = peak_blocks(
                trace,
                self.sequences,
                settings.steps_per_second,
                settings.block_size,
                settings.token_budget,
                settings.max_running,
            )
            settings = replace(settings, num_blocks=self._num_blocks(settings, peak))
        assert settings.num_blocks is not None
        check_memory(settings)
        self.settings = settings
        self.num_blocks = settings.num_blocks
        self.manager = BlockManager(
            settings.num_blocks, settings.block_size, settings.seed
        )
        self.scheduler = Scheduler(
            self.manager, settings.token_budget, settings.max_running
        )
        for request in self.requests:
            check_fits(
                request, self.num_blocks, settings.block_size, settings.token_budget
            )
        self.spec = KVCacheSpec(
            settings.block_size,
            settings.kv_heads,
            settings.head_size,
            settings.torch_dtype,
        )
        self.reference = ImplementationTwin(
            "reference", load_reference(implementations), settings.device
        )
        self.twins = [
            make_twin(
                name,
                self.spec,
                settings.query_heads,
                settings.device,
                settings.token_budget,
                implementations,
            )
            for name in settings.names
        ]
        self._recorder = recorder
        if recorder is not None:
            self.twins[-1].record(recorder)
        is_sampled = recorder is None and not any(
            twin.writes_in_attend for twin in self.twins
        )
        self._attention_every = settings.attention_every if is_sampled else 1
        self.model = SyntheticModel(settings)
        self.rows: list[int] = []
        """Number of the request in each row of the last step."""
        self._folder = folder
        self._with_holders = with_holders
        self._max_scores = max_scores

    @property
    def tokens_to_compute(self) -> int:
        """Tokens of all requests whose keys and values are stored at least once."""
        return sum(request.max_tokens_in_cache for request in self.requests)

    @property
    def tokens_done(self) -> int:
        """Those computed so far; a token that is computed twice counts once."""
        return sum(request.max_computed_tokens for request in self.requests)

    @property
    def requests_finished(self) -> int:
        """Requests whose last output token is sampled."""
        return sum(request.is_finished for request in self.requests)

    def steps(self) -> Iterator[StepRecord]:
        """Run the trace and yield every step once it is compared.

        Raises:
            TwinMismatch: the twins differ; the step is stored.
            NotImplementedError: a twin does not support these settings.
        """
        layers = range(self.settings.layers)
        expected_caches = [self._new_cache(self.reference) for _ in layers]
        caches = [[self._new_cache(twin) for _ in layers] for twin in self.twins]
        last: tuple[int, ReplayBatch, list[LayerInputs]] | None = None
        steps = schedule_arrivals(self.scheduler, self.requests, self._arrivals)
        # numbered from 1 without gaps, so the number of the last step is the number of steps
        for step, (_, output) in enumerate(steps, 1):
            if self._recorder is not None:
                self._recorder.schedule_output(output, self.settings.block_size)
            batch = self._batch(output)
            inputs = self._inputs(batch)
            last = (step, batch, inputs)
            assert not output.blocks_to_copy, "no request is forked here"
            _poison(output.new_block_ids, [expected_caches, *caches])
            has_attention = (step - 1) % self._attention_every == 0
            result = run_step(
                self.reference,
                self.twins,
                batch,
                inputs,
                expected_caches,
                caches,
                check_whole_cache=step % self.settings.check_every == 0,
                has_attention=has_attention,
                max_scores=self._max_scores,
            )
            if result.violation is not None:
                self._stop(last, result.layer, result.violation, expected_caches)
            # before the update frees the blocks of finished requests
            holders, shared = self._holders()
            manager, running = self.manager, len(self.scheduler.running)
            used = manager.num_used_blocks
            cached, free = manager.num_cached_blocks, manager.num_free_blocks
            sampled = next_tokens(output, self.sequences)
            self.scheduler.update_from_output(output, sampled)
            scheduled = output.scheduled_requests
            counts = [request.num_scheduled_tokens for request in scheduled]
            yield StepRecord(
                step=step,
                prefill_tokens=sum(count for count in counts if count > 1),
                decode_tokens=counts.count(1),
                recomputed_tokens=sum(
                    request.num_recomputed_tokens for request in scheduled
                ),
                prefix_hit_tokens=output.num_prefix_hit_tokens,
                regained_tokens=output.num_regained_tokens,
                running=running,
                waiting=output.num_waiting_reqs,
                preempted=tuple(output.preempted_req_ids),  # type: ignore[arg-type]
                used=used,
                cached=cached,
                free=free,
                has_attention=has_attention,
                seconds=result.seconds,
                oracle_seconds=result.oracle_seconds,
                verdicts=result.verdicts,
                holders=holders,
                shared=shared,
            )
        if self._recorder is not None:
            self._recorder.finish()
        broken = compare_whole_caches(expected_caches, caches)
        if broken is not None and last is not None:
            self._stop(last, *broken, expected_caches)

    def _num_blocks(self, settings: ReplaySettings, peak: int) -> int:
        largest = max(request.max_tokens_in_cache for request in self.requests)
        return max(
            math.ceil(CACHE_SHARE * peak), math.ceil(largest / settings.block_size)
        )

    def _new_cache(self, twin: ReplayTwin) -> Tensor:
        run = twin.implementation
        raw = run.allocate_kv_cache(self.spec, self.num_blocks, self.settings.device)
        cache: Tensor = run.reshape_kv_cache(raw, self.spec)
        return cache.fill_(torch.nan)

    def _batch(self, output: SchedulerOutput) -> ReplayBatch:
        by_number = {
            scheduled_request.request.request_id: scheduled_request
            for scheduled_request in output.scheduled_requests
        }
        rows = keep_rows(self.rows, list(by_number))  # type: ignore[arg-type]
        in_rows = [by_number[number] for number in rows]
        counts = [request.num_scheduled_tokens for request in in_rows]
        run = self.reference.implementation
        order = run.reorder_batch_to_split_decodes_and_prefills(counts)
        self.rows = [rows[row] for row in order]
        return make_batch(
            counts,
            [request.num_computed_tokens for request in in_rows],
            [request.block_ids for request in in_rows],
            order,
            self.settings.block_size,
        )

    def _inputs(self, batch: ReplayBatch) -> list[LayerInputs]:
        sequences = [self.sequences[number] for number in self.rows]
        return self.model.inputs(sequences, batch.num_computed_tokens, batch.query_lens)

    def _holders(self) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        if not self._with_holders:
            return np.empty(0, np.int32), np.empty(0, np.bool_)
        holders = np.full(self.num_blocks, FREE, np.int32)
        holders[self.manager.cached_blocks()] = CACHED
        for request in reversed(self.scheduler.running):
            row = self.manager.get_block_ids(request.request_id)
            holders[row] = request.request_id  # type: ignore[call-overload]
        ref_cnts = [self.manager.ref_cnt(block) for block in range(self.num_blocks)]
        return holders, np.array(ref_cnts) > 1

    def _stop(
        self,
        last: tuple[int, ReplayBatch, list[LayerInputs]],
        layer: int,
        violation: Violation,
        expected_caches: Sequence[Tensor],
    ) -> None:
        """Store the step and raise."""
        step, batch, inputs = last
        if violation.law == ReplayLaw.REST.value and self.settings.check_every > 1:
            violation = replace(
                violation,
                found=f"{violation.found}; whole caches are compared every"
                f" {self.settings.check_every} steps, so an earlier step may have done it:"
                " check_every = 1 finds the step",
            )
        used = torch.tensor(batch.used_blocks(), device=self.settings.device)
        # a slot is written once while its block is allocated, so before the step it held NaN
        before = expected_caches[layer][:, used].clone()
        slots = self.reference.metadata(batch).common.slot_mapping
        block_ids = slots // batch.block_size
        before[:, torch.searchsorted(used, block_ids), slots % batch.block_size] = (
            torch.nan
        )
        stored = StoredStep(
            step=step,
            layer=layer,
            twins=self.settings.names,
            device=self.settings.device,
            batch=batch,
            inputs=inputs[layer],
            num_blocks=self.num_blocks,
            block_ids=used,
            blocks=before,
        )
        if self._folder is None:
            raise TwinMismatch(violation, stored, None)
        path = self._folder / f"pagetwin-step-{step}.pt"
        try:
            save_step(path, stored, violation)
        except (OSError, RuntimeError) as error:
            # the mismatch is the result, so it is reported also if the disk is full
            raise TwinMismatch(violation, stored, None, str(error)) from error
        raise TwinMismatch(violation, stored, path)


def _poison(blocks: list[int], caches: Sequence[Sequence[Tensor]]) -> None:
    """Fill blocks that are handed out for new content with NaN, in every layer and cache."""
    if not blocks:
        return
    for of_twin in caches:
        for cache in of_twin:
            cache[:, torch.tensor(blocks, device=cache.device)] = torch.nan
