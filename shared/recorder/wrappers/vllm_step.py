"""Steps of vLLM: how their metadata are read, and the names of backends and caches."""

import logging
from collections.abc import Sequence
from functools import cache
from typing import Any, ClassVar

from ...contract.cache_formats import CACHE_DTYPE_NAMES
from ..step import StepTensors
from .vllm_schedule import WINDOW_SPEC, WorkerSteps

LOGGER = logging.getLogger("pagetwin.recorder")
OWN_NAMES = ("CUSTOM", "PAGETWIN")
"""Names under which pagetwin's own backend is registered; its FP8 writes are compared exactly."""
PLAIN_DTYPES = ("auto", "float16", "bfloat16", *CACHE_DTYPE_NAMES)
"""vLLM's names of caches that are not quantised, or to FP8 with one scale per layer."""
PROMPT_SPEC = "RSWASpec"
"""vLLM's name of caches that give up the blocks between a prompt and a window (R-SWA)."""
SHARED = {
    "decode_context_parallel_size": (1, "ranks share the keys"),
    "prefill_context_parallel_size": (1, "ranks share the tokens"),
    "use_ubatching": (False, "steps may be divided into microbatches"),
}
"""Settings of vLLM's `ParallelConfig`, the value with which layers are checked, and why others are
not: a layer's calls are not those of one whole step then."""


def why_not_whole(parallel: Any) -> str:
    """Return why a layer's calls are not those of one whole step; empty if they are.

    Args:
        parallel: Optional. vLLM's `ParallelConfig`. If None, nothing is shared.
    """
    for name, (plain, reason) in SHARED.items():
        if getattr(parallel, name, plain) != plain:
            return f"{name} = {getattr(parallel, name)}, so {reason}"
    return ""


class VllmStepReader:
    """Reads the metadata of vLLM's steps, from 0.25 on.

    Args:
        steps: the steps of the workers.
        reads_layers: as in `StepReader`.
        reads_graphs: whether captures are read, so that their replays can be sampled.
    """

    specs: ClassVar[Sequence[str]] = ()
    """Names of vLLM's classes of the caches that are checked."""

    def __init__(
        self, steps: WorkerSteps, reads_layers: bool = True, reads_graphs: bool = False
    ) -> None:
        self._steps = steps
        self.reads_layers, self._reads_graphs = reads_layers, reads_graphs

    def why_left_alone(self, builder: Any, layer_names: Sequence[str]) -> str:
        """Return why a builder's steps are not read: ranks or microbatches share them."""
        config = getattr(builder, "vllm_config", None)
        return why_not_whole(getattr(config, "parallel_config", None))

    def step(self, builder: Any, common: Any) -> StepTensors | None:
        """Return a step's metadata, as in `read_step`; None for dummy runs too."""
        if not self._steps.is_step:
            return None
        return read_step(builder, common, self.specs, self._steps)

    def captured_step(self, builder: Any, common: Any) -> StepTensors | None:
        """Return the metadata of a graph that may be captured, as in `read_step`."""
        if not self._reads_graphs:
            return None
        return read_step(builder, common, self.specs, self._steps)

    def scheduler_group(self, builder: Any) -> int:
        """Return the index of a builder's rows in what the scheduler says; -1 if not compared."""
        return self._steps.scheduler_group(builder.recorded_layers)


@cache
def _say_skipped(kind: str) -> None:
    """Log once that the steps of a kind of cache are not checked."""
    LOGGER.warning(
        "flight recorder: %s: the blocks and the attention of its layers are not checked",
        kind,
    )


def read_step(
    builder: Any, common: Any, specs: Sequence[str], steps: WorkerSteps
) -> StepTensors | None:
    """Return a step's metadata; None for caches that are not checked.

    Args:
        builder: a recorded `AttentionMetadataBuilder` of vLLM.
        common: its `CommonAttentionMetadata`. The tensors may be longer than the step.
        specs: names of vLLM's classes of the caches that are checked.
        steps: the steps of the workers.
    """
    spec = builder.kv_cache_spec
    kind = type(spec).__name__
    if kind not in specs:
        if kind == PROMPT_SPEC:
            _say_skipped(kind)
        return None
    if getattr(spec, "attention_chunk_size", None) is not None:
        return None
    if getattr(common, "dcp_local_seq_lens", None) is not None:
        return None
    reqs = common.num_reqs
    return StepTensors(
        query_start_loc=common.query_start_loc[: reqs + 1],
        seq_lens=common.seq_lens[:reqs],
        block_table=common.block_table_tensor[:reqs],
        slot_mapping=common.slot_mapping[: common.num_actual_tokens],
        max_query_len=int(common.max_query_len),
        max_seq_len=int(common.max_seq_len),
        block_size=spec.block_size,
        # only such a cache gives up the blocks before the window
        window=spec.sliding_window if kind == WINDOW_SPEC else None,
        scheduler_group=steps.scheduler_group(builder.recorded_layers),
    )
