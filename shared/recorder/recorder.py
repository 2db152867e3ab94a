"""Recorder: checks each step of an engine, and stores the first violation of each law.

An engine, or a wrapper in `wrappers/`, calls `begin_step` with the step's metadata, `wrote` after
each layer's cache write and `attended` after its attention. It may tell what its scheduler decided
(`schedule`) and which blocks it changed itself (`blocks_changed`).

An error of the recorder itself is logged once, and the recorder is off from then on.
"""

import threading
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..contract.attention_options import AttentionOptions
from ..contract.scheduler_classes import Request, SchedulerOutput
from .findings import Corruption
from .graphs import GraphSamples
from .guard import guarded
from .laws.attention import RecordedCall
from .laws.cache import RecordedWrite
from .laws.schedule import ScheduledGroup
from .laws.scheduled_rows import ScheduledRow
from .laws.selection import SelectedKeys
from .reports import Reports
from .samples import Samples
from .settings import RecorderSettings, prepare_folder
from .step import StepTensors
from .steps import CheckedSteps

Result = TypeVar("Result")


class Recorder:
    """Checks the steps of one engine.

    Args:
        settings: what is checked and stored.
        implementation: name of what computes attention, for the messages and for `reproduce`.
        fp8_steps: as in `RecordedWrite`.

    Raises:
        OSError: the folder cannot be written, or its file system is full.
    """

    def __init__(
        self,
        settings: RecorderSettings,
        implementation: str = "",
        fp8_steps: int = 0,
    ) -> None:
        prepare_folder(settings)
        self.settings = settings
        self.implementation = implementation
        self.is_on = True
        """False after an error of the recorder itself."""
        self.is_attached = False
        """Whether an engine has it."""
        self.wants_layers = True
        """Whether `wrote` and `attended` do anything now. Wrappers read it before each call."""
        self.step = 0
        """Number of the current step, from 1."""
        self.checked: dict[str, int] = dict.fromkeys(
            ("steps", "sampled_steps", "writes", "rows", "blocks", "selections"), 0
        )
        """How much was checked so far."""
        self._fp8_steps = fp8_steps
        self._lock = threading.RLock()
        self._depth = 0
        self._engine_ended = False
        self._reports = Reports(settings)
        self._forget_engine()

    def _forget_engine(self) -> None:
        """Begin anew, without the caches and requests of an engine; what was found stays."""
        self._engine_ended = False
        self._samples = Samples(self.settings, self._reports, self.checked)
        self._steps = CheckedSteps(self._reports, self._samples)
        self._running: list[Request] = []
        self._graphs = GraphSamples(self.settings.rows)

    # --- what an engine tells ---

    def attach(self) -> None:
        """Tell that an engine has the recorder, which may be one of several backends' recorders."""
        if not self.is_attached:
            self._reports.log_start()
        self.is_attached = True

    def schedule(
        self,
        rows: Sequence[ScheduledRow],
        block_size: int,
        freed: Iterable[Hashable] = (),
        knows_all: bool = True,
    ) -> None:
        """Tell what the scheduler decided about the next step, if all layers are one group.

        Args:
            rows: the requests of the step.
            block_size: slots per block.
            freed, knows_all: as in `schedule_groups`.
        """
        groups: dict[Hashable, ScheduledGroup] = {0: ScheduledGroup(rows, block_size)}
        self.schedule_groups(groups, freed, knows_all)

    @guarded
    def schedule_groups(
        self,
        groups: Mapping[Hashable, ScheduledGroup],
        freed: Iterable[Hashable] = (),
        knows_all: bool = True,
    ) -> None:
        """Tell what the scheduler decided about the next step, before `begin_step`.

        Args:
            groups: the rows of each group of layers, by the name that `StepTensors` has for it.
            freed: requests that finished or were preempted since the last step.
            knows_all: as in `Ledger`.
        """
        finding = self._steps.schedule(groups, freed, knows_all)
        self._reports.report(finding, None, self.step + 1)

    @guarded
    def schedule_output(self, output: SchedulerOutput, block_size: int) -> None:
        """Tell the result of `Scheduler.schedule`, before the step's blocks are copied.

        Args:
            output: the result.
            block_size: slots per block.
        """
        finished = [request for request in self._running if request.is_finished]
        self._running = [scheduled.request for scheduled in output.scheduled_requests]
        rows = [
            ScheduledRow(
                scheduled.request.request_id,
                scheduled.num_computed_tokens,
                scheduled.num_scheduled_tokens,
                scheduled.block_ids,
            )
            for scheduled in output.scheduled_requests
        ]
        copied = [destination for _, destination in output.blocks_to_copy]
        self.blocks_changed([*output.new_block_ids, *copied])
        freed = [
            *output.preempted_req_ids,
            *(request.request_id for request in finished),
        ]
        self.schedule(rows, block_size, freed)

    @guarded
    def blocks_changed(self, block_ids: Iterable[int]) -> None:
        """Tell that the engine copied to blocks, filled or swapped them in by itself."""
        self._samples.note_changes(map(int, block_ids), self.step)

    @guarded
    def begin_capture(self, tensors: StepTensors, group: str = "layers") -> object:
        """Tell that a CUDA graph is about to be captured.

        Args:
            tensors: the metadata that the graph will read. The slot mapping has the length of the
                graph, padding included.
            group: name of the layers that share them.

        Returns:
            What holds the buffers that each replay reads and writes. Keep it as long as the graph.
        """
        if self._engine_ended:
            self._forget_engine()
        self.wants_layers = True
        return self._graphs.prepare(tensors, group)

    @guarded
    def begin_step(
        self,
        tensors: StepTensors,
        group: str = "layers",
        replays_graph: bool = False,
    ) -> None:
        """Check the metadata of a step. A group that begins again begins a new step.

        On CUDA the metadata are copied without waiting, and checked in the next step. Nothing is
        read while a CUDA graph is captured.

        Args:
            tensors: the metadata.
            group: name of the layers that share them.
            replays_graph: whether the step is known to replay a captured graph. The addresses of
                the metadata are then compared with those of the capture.
        """
        if self.is_capturing:
            return
        if self._engine_ended:
            self._forget_engine()
        if self._steps.is_new(group):
            self._finish_step()
            self.step += 1
            self.checked["steps"] += 1
            self.wants_layers = self.is_sampled or not self._samples.layers
            if self.is_sampled:
                self.checked["sampled_steps"] += 1
        self._steps.begin(tensors, self.step, group)
        if self.is_sampled:
            self._graphs.begin_replay(tensors.slot_mapping.shape[0], self.step)
        if not tensors.seq_lens.is_cuda:
            self._steps.check_all()
        if replays_graph and (finding := self._graphs.check_buffers(tensors, group)):
            self._reports.report(finding, None, self.step)

    @property
    def is_sampled(self) -> bool:
        """Whether cache and attention are compared in the current step."""
        return self._samples.is_sampled(self.step)

    @property
    def findings(self) -> list[Corruption]:
        """The first violation of each law."""
        return self._reports.findings

    @property
    def is_capturing(self) -> bool:
        """Whether a CUDA graph is being captured on the current stream."""
        # unlike `is_available`, `is_initialized` does not ask the driver
        is_used: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return is_used and torch.cuda.is_current_stream_capturing()

    @guarded
    def own(self, read: Callable[[], Result]) -> Result:
        """Return what a function returns; an error in it is one of the recorder."""
        return read()

    def wrote(
        self,
        layer: str,
        key: Tensor | None,
        value: Tensor | None,
        key_cache: Tensor,
        value_cache: Tensor,
        scales: dict[str, Any] | None = None,
        group: str = "layers",
        names: tuple[str, str] = ("key", "value"),
        format_name: str | None = None,
    ) -> None:
        """Compare what a layer has written to its cache, in sampled steps.

        Call it before `attended` of the layer. A graph that is captured copies some rows of key and
        value, which are compared after its replays.

        Args:
            layer: name of the layer, unique in the engine.
            key, value: [tokens, kv_heads, head_size]; None if the layer writes nothing.
            key_cache, value_cache: [num_blocks, block_size, kv_heads, head_size].
            scales: Optional. As in `RecordedWrite`. If None, no scales.
            group: the layers whose metadata the layer uses.
            names, format_name: as in `RecordedWrite`.
        """
        if self.wants_layers:
            caches = (key_cache, value_cache)
            self._wrote(
                layer, key, value, *caches, scales or {}, group, names, format_name
            )

    def attended(
        self,
        layer: str,
        query: Tensor,
        output: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scale: float | None,
        options: AttentionOptions,
        group: str = "layers",
        query_scale: Tensor | None = None,
        query_rope: Tensor | None = None,
        selection: SelectedKeys | None = None,
    ) -> None:
        """Recompute some rows of a layer's attention, in sampled steps and one layer per step.

        Args:
            layer, key_cache, value_cache, group: as in `wrote`.
            query: [tokens, query_heads, head_size], of the step's first tokens or of all.
            output: [tokens, query_heads, value_head_size].
            scale, options: as in `paged_attention`.
            query_scale, query_rope, selection: as in `RecordedCall`.
        """
        if self.wants_layers:
            call = RecordedCall(
                layer,
                query,
                output,
                key_cache,
                value_cache,
                scale,
                options,
                self.implementation,
                query_scale,
                query_rope,
                selection,
            )
            self._attended(call, group)

    def engine_ended(self) -> None:
        """Forget the caches and requests of an engine that was closed, so that they are freed.

        The garbage collector may call this at any time. If the recorder is at work, it forgets
        them at the next capture or step.
        """
        if not self._lock.acquire(blocking=False):
            self._engine_ended = True
            return
        try:
            self._engine_ended = True
            if not self._depth:
                self._forget_engine()
        finally:
            self._lock.release()

    @guarded
    def finish(self) -> None:
        """Check what is still to be checked of the last step."""
        self._finish_step()

    # --- checks ---

    @guarded
    def _wrote(
        self,
        layer: str,
        key: Tensor | None,
        value: Tensor | None,
        key_cache: Tensor,
        value_cache: Tensor,
        scales: dict[str, Any],
        group: str,
        names: tuple[str, str],
        format_name: str | None,
    ) -> None:
        self._steps.num_blocks[group] = key_cache.shape[0]
        if key is None or value is None:
            return
        caches = (key_cache, value_cache)
        write = RecordedWrite(
            layer, key, value, *caches, scales, self._fp8_steps, names, format_name
        )
        if self.is_capturing:
            self._graphs.capture_write(write)
            return
        if not self._samples.is_turn(layer, self.step):
            return
        step = self._steps.host_step(group)
        if step is None or not step.num_tokens:
            return
        self._samples.compare_write(write, step)

    @guarded
    def _attended(self, call: RecordedCall, group: str) -> None:
        if self.is_capturing:
            self._graphs.capture(call, group)
            return
        self._steps.num_blocks[group] = call.key_cache.shape[0]
        if not self._samples.is_turn(call.layer, self.step):
            return
        step = self._steps.host_step(group)
        if step is None or not step.num_tokens:
            return
        self._samples.compare_attention(call, step)

    def _finish_step(self) -> None:
        """Wait for the metadata of the current step, and check what a graph has computed."""
        if not self._steps.has_begun:
            return
        self._steps.check_all()
        if self.is_sampled:
            for replay in self._graphs.replayed():
                step = self._steps.host_step(replay.group)
                if step is not None and step.num_tokens:
                    self._samples.compare_replay(replay, step)
            self._samples.compare_watched(self._steps.host_step, self.step)
            self._reports.log_progress(self.checked)
        self._steps.end()
