"""The scheduler's decisions in vLLM: what each worker is told, as rows of the recorder's ledger.

vLLM divides a model's layers into groups whose caches have the same form, and gives each request a
row of blocks in each group. A group with a sliding window gives up the blocks before the window,
which the scheduler then gives to other requests; the worker's row still names them.

A worker's wrapper gets one `SchedulerOutput` per step. Its dummy runs and captures do not pass
there, so the steps between its call and its return are the steps of requests.
"""

import functools
import importlib
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from ..laws.schedule import ScheduledGroup
from ..laws.scheduled_rows import ScheduledRow
from ..recorder import Recorder

WORKER = "vllm.v1.worker.worker_base"
WINDOW_SPEC = "SlidingWindowSpec"
"""vLLM's name of caches that give up the blocks before a window."""
KEY_VALUE_SPECS = ("FullAttentionSpec", WINDOW_SPEC)
"""vLLM's names of caches that hold keys and values."""
LATENT_SPEC = "MLAAttentionSpec"
"""vLLM's name of caches of latents, one row per token."""
PAGED_SPECS = (*KEY_VALUE_SPECS, LATENT_SPEC)
"""vLLM's names of caches whose rows are compared with the scheduler's."""


class CacheGroup(NamedTuple):
    """A group of layers whose rows are compared with the scheduler's.

    Args:
        number: index of the group's rows in what the scheduler says.
        block_size: slots per block.
        window: as in `ScheduledGroup`.
        layer_names: vLLM's names of the layers.
    """

    number: int
    block_size: int
    window: int | None
    layer_names: tuple[str, ...]


class WorkerSchedule:
    """The rows of one worker's requests, kept from step to step.

    Args:
        wrapper: vLLM's `WorkerWrapperBase`, whose worker has its caches.
    """

    def __init__(self, wrapper: Any) -> None:
        self.groups = comparable_groups(wrapper)
        self.is_alone = True
        """Whether no other worker of the process has run since this one began."""
        self._rows: dict[int, dict[str, tuple[int, ...]]] = {
            group.number: {} for group in self.groups
        }
        self._group_of = {
            layer: group.number for group in self.groups for layer in group.layer_names
        }

    def group_of(self, layer_names: Sequence[str]) -> int:
        """Return the index of the group that layers belong to; -1 if it is not compared."""
        return self._group_of.get(layer_names[0], -1) if layer_names else -1

    def tell(self, recorders: Sequence[Recorder], output: Any) -> None:
        """Tell the recorders what a `SchedulerOutput` decides about the next step.

        Beside another worker they are told of changed blocks alone.
        """
        freed = [*output.finished_req_ids, *(output.preempted_req_ids or ())]
        changed = changed_blocks(output)
        groups = self._take(output, freed) if self.groups and self.is_alone else {}
        for recorder in recorders:
            recorder.blocks_changed(changed)
            if groups:
                recorder.schedule_groups(groups, freed)

    def _take(self, output: Any, freed: list[str]) -> dict[Hashable, ScheduledGroup]:
        """Return the step's rows of each group."""
        for rows in self._rows.values():
            for request_id in freed:
                rows.pop(request_id, None)
        computed: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            computed[new.req_id] = new.num_computed_tokens
            self._extend(new.req_id, new.block_ids, is_new=True)
        cached = output.scheduled_cached_reqs
        resumed, new_block_ids = cached.resumed_req_ids, cached.new_block_ids
        for number, req_id in enumerate(cached.req_ids):
            computed[req_id] = cached.num_computed_tokens[number]
            is_new, added = req_id in resumed, new_block_ids[number]
            if is_new or added is not None:
                self._extend(req_id, added, is_new)
        scheduled = output.num_scheduled_tokens.items()
        groups: dict[Hashable, ScheduledGroup] = {}
        for index, block_size, window, _ in self.groups:
            row_of = self._rows[index]
            group_rows = [
                ScheduledRow(req_id, computed[req_id], tokens, row_of[req_id])
                for req_id, tokens in scheduled
            ]
            groups[index] = ScheduledGroup(group_rows, block_size, window)
        return groups

    def _extend(
        self, req_id: str, block_ids: tuple[list[int], ...] | None, is_new: bool
    ) -> None:
        """Extend or replace the rows of a request."""
        for index, rows in self._rows.items():
            added = [] if block_ids is None else block_ids[index]
            before = () if is_new else rows[req_id]
            if is_new or added:
                # a tuple, since the step before may not have been checked yet
                rows[req_id] = (*before, *added)


def changed_blocks(output: Any) -> list[int]:
    """Return the blocks that a step gives to requests, and those that the worker itself copies to.

    The worker fills new blocks with zeros in some models.
    """
    given = [new_request.block_ids for new_request in output.scheduled_new_reqs]
    given += [ids for ids in output.scheduled_cached_reqs.new_block_ids if ids]
    copies = getattr(output, "kv_cache_block_copies", None) or ()
    changed = [block_id for row in given for ids in row for block_id in ids]
    return [*changed, *(copy.dst_block_id for copy in copies)]


def comparable_groups(wrapper: Any) -> tuple[CacheGroup, ...]:
    """Return the groups of layers whose rows in a step are those of the scheduler.

    There are none if a step is scheduled before the drafts of the one before it are verified, since
    only the device knows the lengths then. Groups of cross-attention, of chunked attention and of
    state-space layers are left out.
    """
    worker = wrapper.worker
    config = worker.vllm_config
    has_drafts = config.speculative_config is not None
    if has_drafts and config.scheduler_config.async_scheduling:
        return ()
    groups = []
    for index, group in enumerate(worker.model_runner.kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        # a group of layers with different sizes has one specification per layer
        layer_spec = next(iter(getattr(spec, "kv_cache_specs", {}).values()), spec)
        kind = type(layer_spec).__name__
        if kind in PAGED_SPECS:
            window = layer_spec.sliding_window if kind == WINDOW_SPEC else None
            size, names = int(spec.block_size), tuple(group.layer_names)
            groups.append(CacheGroup(index, size, window, names))
    return tuple(groups)


class WorkerSteps:
    """The steps of this process's workers, and the recorders that are told of them."""

    def __init__(self) -> None:
        self.recorders: list[Recorder] = []
        self.is_watched = False
        """Whether workers report their steps here."""
        self._running = 0
        self._alive = 0
        self._latest: WorkerSchedule | None = None
        """That of the worker whose step began last."""
        self._of_worker: WeakKeyDictionary[Any, WorkerSchedule] = WeakKeyDictionary()

    @property
    def is_step(self) -> bool:
        """Whether metadata that are built now are those of requests, not of a dummy run."""
        return not self.is_watched or self._running > 0

    def scheduler_group(self, layer_names: Sequence[str]) -> int:
        """Return the index of the layers' rows in what the scheduler says; -1 if not compared.

        Args:
            layer_names: vLLM's names of layers of one group.
        """
        latest = self._latest
        if latest is None or not latest.is_alone:
            return -1
        return latest.group_of(layer_names)

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
            for schedule in self._of_worker.values() if self._alive > 1 else ():
                schedule.is_alone = False
        # vLLM resolves other backends too when it chooses one
        recorders = [recorder for recorder in self.recorders if recorder.is_attached]
        if self._latest is not known:
            # a step has the groups of layers of one worker
            for recorder in recorders:
                recorder.finish()
            self._latest = known
        known.tell(recorders, output)

    def _end(self) -> None:
        """Let the recorders forget the caches and requests of the last worker that was freed."""
        self._alive -= 1
        for recorder in self.recorders if not self._alive else ():
            recorder.engine_ended()


STEPS = WorkerSteps()
"""The steps of the workers of this process."""
