"""Steps: the metadata of the current step, checked once they are on the host."""

from collections.abc import Hashable, Iterable, Mapping

from .findings import Corruption
from .laws.bookkeeping import check_groups, check_step
from .laws.schedule import Ledger, ScheduledGroup
from .laws.scheduled_rows import ScheduledRows
from .reports import Reports
from .samples import Samples
from .step import HostStep, StepCopy, StepTensors


class CheckedSteps:
    """The metadata of the current step and the scheduler's decisions about it.

    Args:
        reports: takes the violations.
        samples: is told which blocks each step writes.
    """

    def __init__(self, reports: Reports, samples: Samples) -> None:
        self.num_blocks: dict[str, int] = {}
        """Blocks in the caches of each group, once a cache was seen."""
        self._reports, self._samples = reports, samples
        self._copies: list[tuple[StepCopy, ScheduledRows | None]] = []
        self._current: dict[str, HostStep | StepCopy] = {}
        self._ledger: Ledger | None = None
        self._scheduled: dict[Hashable, ScheduledRows] = {}
        self._next_scheduled: dict[Hashable, ScheduledRows] = {}

    def schedule(
        self,
        groups: Mapping[Hashable, ScheduledGroup],
        freed: Iterable[Hashable],
        knows_all: bool,
    ) -> Corruption | None:
        """Note what the scheduler decided about the next step; return a violation.

        Args:
            groups, freed, knows_all: as in `Recorder.schedule_groups`.
        """
        if self._ledger is None:
            self._ledger = Ledger(knows_all)
        self._ledger.free(freed)
        finding = self._ledger.schedule(groups)
        self._next_scheduled = self._ledger.step_rows(groups, finding is None)
        return finding

    @property
    def has_begun(self) -> bool:
        """Whether a step has begun and not ended."""
        return bool(self._current)

    def is_new(self, group: str) -> bool:
        """Return whether metadata of a group begin a new step."""
        return group in self._current or not self._current

    def begin(self, tensors: StepTensors, number: int, group: str) -> None:
        """Copy the metadata of a group to the host, without waiting for the device."""
        if not self._current:
            self._scheduled, self._next_scheduled = self._next_scheduled, {}
        copy = StepCopy(tensors, number, group)
        self._current[group] = copy
        self._copies.append((copy, self._scheduled.get(tensors.scheduler_group)))

    def check_all(self) -> None:
        """Check all metadata that have not been checked, and wait for their copies."""
        while self._copies:
            self._check(*self._copies.pop(0))
        if self._ledger is not None:
            self._ledger.all_checked()

    def host_step(self, group: str) -> HostStep | None:
        """Return the current step of a group on the host, waiting for it if necessary."""
        if isinstance(self._current.get(group), StepCopy):
            self.check_all()
        step = self._current.get(group)
        return step if isinstance(step, HostStep) else None

    def end(self) -> None:
        """Forget the current step."""
        self._current.clear()

    def _check(self, copy: StepCopy, scheduled: ScheduledRows | None) -> None:
        step = copy.wait(self.num_blocks.get(copy.group))
        self._reports.ring.append(step)
        others = [step for step in self._current.values() if isinstance(step, HostStep)]
        if self._current.get(copy.group) is copy:
            self._current[copy.group] = step
        self._reports.names, stranger, has_own_rows = {}, None, False
        # kernels and scheduler may have blocks of different sizes
        is_alike = scheduled is not None and scheduled.block_size == step.block_size
        if scheduled is not None and step.num_tokens and is_alike:
            self._reports.names, stranger = scheduled.match(step)
            has_own_rows = stranger is None and scheduled.are_own(step.num_blocks)
        finding = stranger or check_step(step, has_own_rows)
        if finding is None and others:
            finding = check_groups([others[0], step])
        self._samples.note_writes(step)
        self._reports.report(finding, step, step.number)
