"""How does a whole trace run through the twins?

A loop around four things: the scheduler decides, the model makes queries, keys and values, every
twin computes, and the step is compared. Blocks that are handed out anew are filled with NaN first,
so that a twin which reads one slot too many cannot go unnoticed.
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
from ...contract.specs import KVCacheSpec
from .batch import Batch, keep_rows, make_batch
from .block_manager import BlockManager
from .disagreement import Difference, Disagreement, StoredStep, save_step
from .judge import SCORES_A_PIECE
from .model import LayerInputs, Model
from .scheduler import Schedule, Scheduler, blocks_at_once, make_requests
from .settings import CACHE_SHARE, Settings
from .step import Law, Stage, compare_whole_caches, run_step
from .tokens import draw_tokens
from .trace import read_trace, scale_trace
from .twins import ImplementationTwin, Twin, load_reference, make_twin

FREE, CACHED = -1, -2
"""Owners of a block that no request uses."""


@dataclass(frozen=True)
class StepRecord:
    """What there is to tell about one step.

    Args:
        step: the clock.
        prefill_tokens, decode_tokens: new tokens of requests with several, and with one.
        recomputed_tokens: new tokens that had been computed before a preemption.
        prefix_tokens: tokens that new requests found in the cache.
        regained_tokens: tokens that preempted requests found there when they came back.
        running, waiting: requests.
        preempted: numbers of the requests that had to start over.
        used, cached, free: blocks.
        seconds: for each twin its seconds in each stage.
        judging: seconds spent on the truth.
        verdicts: for each twin its worst row.
        owners: [num_blocks] number of a request, FREE or CACHED; empty unless wanted.
        shared: [num_blocks] whether several requests use a block; empty unless wanted.
    """

    step: int
    prefill_tokens: int
    decode_tokens: int
    recomputed_tokens: int
    prefix_tokens: int
    regained_tokens: int
    running: int
    waiting: int
    preempted: tuple[int, ...]
    used: int
    cached: int
    free: int
    seconds: list[dict[Stage, float]]
    judging: float
    verdicts: list[Verdict]
    owners: NDArray[np.int32]
    shared: NDArray[np.bool_]


class Replay:
    """A trace, a scheduler, and twins that run what it decides.

    Args:
        settings: everything it depends on.
        implementations: implementations that are loaded already, by name.
        folder: where a step is stored if the twins disagree; None: nowhere.
        with_owners: whether the records tell who owns which block.
        scores_a_piece: score elements that the judge holds in memory at once.

    Raises:
        FileNotFoundError, ValueError: a trace that cannot be read, twins that cannot be loaded,
            a request that does not fit in the cache.
    """

    def __init__(
        self,
        settings: Settings,
        implementations: Mapping[str, Implementation] | None = None,
        folder: Path | None = None,
        with_owners: bool = False,
        scores_a_piece: int = SCORES_A_PIECE,
    ) -> None:
        trace = scale_trace(
            read_trace(settings.trace, settings.requests), settings.scale
        )
        tokens = draw_tokens(trace, settings.seed)
        self.requests = make_requests(trace, tokens, settings.steps_per_second)
        if settings.num_blocks is None:
            settings = replace(settings, num_blocks=self._choose_num_blocks(settings))
        assert settings.num_blocks is not None
        self.settings = settings
        self.manager = BlockManager(
            settings.num_blocks, settings.block_size, settings.seed
        )
        self.scheduler = Scheduler(
            self.requests, self.manager, settings.token_budget, settings.max_running
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
                name, self.spec, settings.query_heads, settings.device, implementations
            )
            for name in settings.twins
        ]
        self.model = Model(settings)
        self.rows: list[int] = []
        """Number of the request in each row of the last step."""
        self.num_blocks = settings.num_blocks
        self._folder = folder
        self._with_owners = with_owners
        self._scores_a_piece = scores_a_piece

    @property
    def tokens_to_compute(self) -> int:
        """Tokens of all requests whose keys and values have to be in the cache once."""
        return sum(request.num_to_compute for request in self.requests)

    @property
    def tokens_done(self) -> int:
        """How many of them have been; a token computed twice counts once."""
        return sum(request.num_ever_computed for request in self.requests)

    def steps(self) -> Iterator[StepRecord]:
        """Run the trace and yield every step once it is compared.

        Raises:
            Disagreement: the twins differ; the step is stored.
            NotImplementedError: a twin does not take these settings.
        """
        layers = range(self.settings.layers)
        truth_caches = [self._new_cache(self.reference) for _ in layers]
        caches = [[self._new_cache(twin) for _ in layers] for twin in self.twins]
        count = 0
        last: tuple[int, Batch, list[LayerInputs]] | None = None
        while (schedule := self.scheduler.schedule()) is not None:
            count += 1
            batch = self._batch(schedule)
            inputs = self._inputs(batch)
            last = (schedule.step, batch, inputs)
            _forget(schedule.new_blocks, [truth_caches, *caches])
            result = run_step(
                self.reference,
                self.twins,
                batch,
                inputs,
                truth_caches,
                caches,
                check_whole_cache=count % self.settings.check_every == 0,
                scores_a_piece=self._scores_a_piece,
            )
            if result.difference is not None:
                self._stop(last, result.layer, result.difference, truth_caches)
            # before commit gives back the blocks of what is finished
            owners, shared = self._owners()
            used, cached, free = (
                self.manager.num_used,
                self.manager.num_cached,
                self.manager.num_free,
            )
            running = len(self.scheduler.running)
            self.scheduler.commit(schedule)
            counts = [turn.num_tokens for turn in schedule.turns]
            yield StepRecord(
                step=schedule.step,
                prefill_tokens=sum(count for count in counts if count > 1),
                decode_tokens=counts.count(1),
                recomputed_tokens=sum(turn.num_recomputed for turn in schedule.turns),
                prefix_tokens=schedule.num_prefix_tokens,
                regained_tokens=schedule.num_regained_tokens,
                running=running,
                waiting=schedule.num_waiting,
                preempted=tuple(schedule.preempted),
                used=used,
                cached=cached,
                free=free,
                seconds=result.seconds,
                judging=result.judging,
                verdicts=result.verdicts,
                owners=owners,
                shared=shared,
            )
        broken = compare_whole_caches(truth_caches, caches)
        if broken is not None and last is not None:
            self._stop(last, *broken, truth_caches)

    def _choose_num_blocks(self, settings: Settings) -> int:
        wanted = blocks_at_once(
            self.requests,
            settings.block_size,
            settings.token_budget,
            settings.max_running,
        )
        largest = max(request.num_to_compute for request in self.requests)
        return max(
            math.ceil(CACHE_SHARE * wanted), math.ceil(largest / settings.block_size)
        )

    def _new_cache(self, twin: Twin) -> Tensor:
        run = twin.implementation
        raw = run.allocate_kv_cache(self.spec, self.num_blocks, self.settings.device)
        cache: Tensor = run.reshape_kv_cache(raw, self.spec)
        return cache.fill_(torch.nan)

    def _batch(self, schedule: Schedule) -> Batch:
        turns = {turn.request.number: turn for turn in schedule.turns}
        rows = keep_rows(self.rows, list(turns))
        scheduled = [turns[number].num_tokens for number in rows]
        run = self.reference.implementation
        order = run.reorder_batch_to_split_decodes_and_prefills(scheduled)
        self.rows = [rows[place] for place in order]
        return make_batch(
            scheduled,
            [turns[number].num_computed for number in rows],
            [turns[number].request.row for number in rows],
            order,
            self.settings.block_size,
        )

    def _inputs(self, batch: Batch) -> list[LayerInputs]:
        sequences = [self.requests[number].tokens for number in self.rows]
        return self.model.inputs(sequences, batch.num_computed_tokens, batch.query_lens)

    def _owners(self) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        if not self._with_owners:
            return np.empty(0, np.int32), np.empty(0, np.bool_)
        owners = np.full(self.num_blocks, FREE, np.int32)
        owners[self.manager.cached_blocks()] = CACHED
        users = np.zeros(self.num_blocks, np.int32)
        for request in reversed(self.scheduler.running):
            owners[request.row] = request.number
            users[request.row] += 1
        return owners, users > 1

    def _stop(
        self,
        last: tuple[int, Batch, list[LayerInputs]],
        layer: int,
        difference: Difference,
        truth_caches: Sequence[Tensor],
    ) -> None:
        step, batch, inputs = last
        if difference.law == Law.REST.value and self.settings.check_every > 1:
            difference = replace(
                difference,
                found=f"{difference.found}; whole caches are compared every"
                f" {self.settings.check_every} steps, so an earlier step may have done it:"
                " check_every = 1 finds the step",
            )
        used = torch.tensor(batch.used_blocks(), device=self.settings.device)
        # a slot is written once in the life of its block, so before the step it held NaN
        before = truth_caches[layer][:, used].clone()
        slots = self.reference.metadata(batch).common.slot_mapping
        block_ids = slots // batch.block_size
        before[:, torch.searchsorted(used, block_ids), slots % batch.block_size] = (
            torch.nan
        )
        stored = StoredStep(
            step=step,
            layer=layer,
            twins=self.settings.twins,
            device=self.settings.device,
            batch=batch,
            inputs=inputs[layer],
            num_blocks=self.num_blocks,
            block_ids=used,
            blocks=before,
        )
        path = None
        if self._folder is not None:
            path = self._folder / f"pagetwin-step-{step}.pt"
            save_step(path, stored, difference)
        raise Disagreement(difference, stored, path)


def _forget(blocks: list[int], caches: Sequence[Sequence[Tensor]]) -> None:
    """Fill blocks that are handed out anew with NaN, in every layer of every cache."""
    if not blocks:
        return
    for of_twin in caches:
        for cache in of_twin:
            cache[:, torch.tensor(blocks, device=cache.device)] = torch.nan
