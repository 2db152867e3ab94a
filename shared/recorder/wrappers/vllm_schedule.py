"""The scheduler's decisions in vLLM: what each worker is told, as rows of the recorder's ledger.

A worker's wrapper gets one `SchedulerOutput` per step. Its dummy runs and captures do not pass
there, so the steps between its call and its return are the steps of requests.
"""

import functools
import importlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from ..laws.schedule import ScheduledRow
from ..recorder import Recorder

WORKER = "vllm.v1.worker.worker_base"


class WorkerSchedule:
    """The rows of one worker's requests, kept from step to step.

    Args:
        wrapper: vLLM's `WorkerWrapperBase`, whose worker has its caches.
    """

    def __init__(self, wrapper: Any) -> None:
        self.block_size = comparable_block_size(wrapper)
        self.is_alone = True
        """Whether no other worker of the process has run since this one began."""
        self._rows: dict[str, tuple[int, ...]] = {}

    def tell(self, recorders: Sequence[Recorder], output: Any) -> None:
        """Tell the recorders what a `SchedulerOutput` decides about the next step."""
        if self.block_size is None:
            return
        freed = [*output.finished_req_ids, *(output.preempted_req_ids or ())]
        rows, given = self._take(output, freed)
        for recorder in recorders:
            recorder.blocks_changed(given)
            recorder.schedule(rows, self.block_size, freed)

    def _take(
        self, output: Any, freed: list[str]
    ) -> tuple[list[ScheduledRow], list[int]]:
        """Return the step's rows, and the blocks that the step adds to them."""
        for each in freed:
            self._rows.pop(each, None)
        given: list[int] = []
        computed: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            computed[new.req_id] = new.num_computed_tokens
            given += self._extend(new.req_id, new.block_ids, is_new=True)
        cached = output.scheduled_cached_reqs
        resumed, new_block_ids = cached.resumed_req_ids, cached.new_block_ids
        for index, req_id in enumerate(cached.req_ids):
            computed[req_id] = cached.num_computed_tokens[index]
            is_new, new = req_id in resumed, new_block_ids[index]
            if is_new or new is not None:
                given += self._extend(req_id, new, is_new)
        rows = [
            ScheduledRow(req_id, computed[req_id], scheduled, self._rows[req_id])
            for req_id, scheduled in output.num_scheduled_tokens.items()
        ]
        copies = getattr(output, "kv_cache_block_copies", None) or ()
        return rows, [*given, *(each.dst_block_id for each in copies)]

    def _extend(
        self, req_id: str, block_ids: tuple[list[int], ...] | None, is_new: bool
    ) -> list[int]:
        """Extend or replace a row; return the blocks that are new in it."""
        added = [] if block_ids is None else list(block_ids[0])
        before = () if is_new else self._rows[req_id]
        if is_new or added:
            # a tuple, since the step before may not have been checked yet
            self._rows[req_id] = (*before, *added)
        return added


def comparable_block_size(wrapper: Any) -> int | None:
    """Return the slots per block; None if the rows of a worker's steps are not the scheduler's.

    Rows are compared if the worker has one group of caches, without a window, and does not decode
    speculatively, since only the device knows the lengths then.
    """
    worker = wrapper.worker
    groups = worker.model_runner.kv_cache_config.kv_cache_groups
    if len(groups) != 1 or worker.vllm_config.speculative_config is not None:
        return None
    spec = groups[0].kv_cache_spec
    kinds = ("FullAttentionSpec", "MLAAttentionSpec")
    if type(spec).__name__ not in kinds or spec.sliding_window is not None:
        return None
    return int(spec.block_size)


class WorkerSteps:
    """The steps of this process's workers, and the recorders that are told of them."""

    def __init__(self) -> None:
        self.recorders: list[Recorder] = []
        self.is_watched = False
        """Whether workers report their steps here."""
        self._running = 0
        self._alive = 0
        self._of_worker: WeakKeyDictionary[Any, WorkerSchedule] = WeakKeyDictionary()

    @property
    def is_step(self) -> bool:
        """Whether metadata that are built now are those of requests, not of a dummy run."""
        return not self.is_watched or self._running > 0

    def watch(self) -> None:
        """Wrap `execute_model` of vLLM's worker wrapper. May be called several times."""
        wrapper = importlib.import_module(WORKER).WorkerWrapperBase
        plain: Callable[..., Any] = wrapper.execute_model
        self.is_watched = True
        if getattr(plain, "is_recorded", False):
            return

        @functools.wraps(plain)
        def execute_model(
            worker: Any, scheduler_output: Any, *args: Any, **kwargs: Any
        ) -> Any:
            self.begin(worker, scheduler_output)
            try:
                return plain(worker, scheduler_output, *args, **kwargs)
            finally:
                self._running -= 1

        execute_model.is_recorded = True  # type: ignore[attr-defined]
        wrapper.execute_model = execute_model

    def begin(self, wrapper: Any, output: Any) -> None:
        """Begin a step, and tell the recorders what the scheduler decided about it."""
        self._running += 1
        for recorder in self.recorders[:1]:
            # an error there is one of the recorder
            recorder.own(functools.partial(self._tell, wrapper, output))

    def _tell(self, wrapper: Any, output: Any) -> None:
        known = self._of_worker.get(wrapper)
        if known is None:
            known = self._of_worker[wrapper] = WorkerSchedule(wrapper)
            weakref.finalize(wrapper, self._end).atexit = False
            self._alive += 1
            # two engines of one process may give the same name to two requests
            for each in self._of_worker.values() if self._alive > 1 else ():
                each.is_alone = False
        if known.is_alone:
            # vLLM resolves other backends too when it chooses one
            known.tell([each for each in self.recorders if each.is_attached], output)

    def _end(self) -> None:
        """Let the recorders forget the caches and requests of the last worker that was freed."""
        self._alive -= 1
        for recorder in self.recorders if not self._alive else ():
            recorder.engine_ended()


STEPS = WorkerSteps()
"""The steps of the workers of this process."""
