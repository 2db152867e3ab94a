"""Bugs of serving engines, planted in vLLM's own code. For tests only.

Each bug replaces one method of vLLM (0.25.1) while it is planted. The recorder is not told.
"""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch


class Plant:
    """One bug in one engine.

    Args:
        llm: vLLM's `LLM`, whose engine core is in this process.
        step: gives the number of steps that the recorder has begun in this run.
        due_from: the first step in which the bug may act.
    """

    def __init__(self, llm: Any, step: Callable[[], int], due_from: int) -> None:
        core = llm.llm_engine.engine_core.engine_core
        self.scheduler = core.scheduler
        self.runner = core.model_executor.driver_worker.worker.model_runner
        self._step, self._due_from = step, due_from
        self.effects: list[int] = []
        """The steps in which the bug has changed something."""

    def is_due(self, ahead: int = 1) -> bool:
        """Return whether the bug may act now.

        Args:
            ahead: 1 in code that prepares a step before the recorder counts it, otherwise 0.
        """
        return self._step() + ahead >= self._due_from

    def acted(self, ahead: int = 1) -> None:
        """Note that the bug has changed something."""
        self.effects.append(self._step() + ahead)


def padded_slot(plant: Plant) -> Any:
    """Padded rows of a graph get slot 0, so a replay writes there."""
    from vllm.v1.worker.gpu.block_table import BlockTables

    plain = BlockTables.compute_slot_mappings

    def compute(
        self: Any, idx_mapping: Any, starts: Any, positions: Any, **kw: Any
    ) -> Any:
        slots = plain(self, idx_mapping, starts, positions, **kw)
        tokens = int(starts[idx_mapping.shape[0]])
        if plant.is_due() and tokens < slots.shape[1]:
            slots[:, tokens:] = 0
            plant.acted()
        return slots

    return patch.object(BlockTables, "compute_slot_mappings", compute)


def stale_row(plant: Plant) -> Any:
    """A request that was preempted keeps the blocks that its row had before."""
    if hasattr(plant.runner, "_update_states"):
        return _stale_row_v1(plant)
    from vllm.v1.worker.gpu.block_table import BlockTables

    runner, plain = plant.runner, BlockTables.append_block_ids
    plain_add = type(runner).add_requests
    resumed: set[str] = set()

    def add_requests(self: Any, output: Any) -> None:
        for request in output.scheduled_new_reqs:
            # only a resumed request has tokens besides its prompt
            if len(request.prefill_token_ids) > len(request.prompt_token_ids):
                resumed.add(request.req_id)
        plain_add(self, output)
        resumed.clear()

    def append(self: Any, req_index: int, block_ids: Any, overwrite: bool) -> None:
        rows = [runner.req_states.req_id_to_index.get(req_id) for req_id in resumed]
        if plant.is_due() and overwrite and req_index in rows:
            for group, ids in enumerate(block_ids):
                self.num_blocks.np[group, req_index] = len(ids)
            plant.acted()
            return
        plain(self, req_index, block_ids, overwrite)

    patches = ExitStack()
    patches.enter_context(patch.object(type(runner), "add_requests", add_requests))
    patches.enter_context(patch.object(BlockTables, "append_block_ids", append))
    return patches


def _stale_row_v1(plant: Plant) -> Any:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    plain = GPUModelRunner._update_states

    def update(self: Any, output: Any) -> Any:
        cached = output.scheduled_cached_reqs
        if plant.is_due() and cached.resumed_req_ids:
            # the new blocks are then appended to the old row
            cached = dataclasses.replace(cached, resumed_req_ids=set())
            output = dataclasses.replace(output, scheduled_cached_reqs=cached)
            plant.acted()
        return plain(self, output)

    return patch.object(GPUModelRunner, "_update_states", update)


def early_reuse(plant: Plant) -> Any:
    """A block is handed out although a running request holds it, as if it had been freed."""
    from vllm.v1.core.block_pool import BlockPool

    plain = BlockPool.get_new_blocks
    size = plant.scheduler.block_size

    def get_new_blocks(self: Any, num_blocks: int) -> Any:
        blocks = plain(self, num_blocks)
        if not plant.is_due() or plant.effects or not blocks:
            return blocks
        manager = plant.scheduler.kv_cache_manager
        for request in plant.scheduler.running:
            held = manager.get_blocks(request.request_id).blocks[0]
            # a request with room in its last block does not allocate in this step
            if held and 0 < request.num_computed_tokens % size < size - 4:
                blocks[0].ref_cnt -= 1
                self.free_block_queue.append(blocks[0])
                held[-1].ref_cnt += 1
                plant.acted()
                return [held[-1], *blocks[1:]]
        return blocks

    return patch.object(BlockPool, "get_new_blocks", get_new_blocks)


def early_given_up(plant: Plant) -> Any:
    """A request gives up blocks that its window still needs."""
    from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager

    plain = SlidingWindowManager.get_num_skipped_tokens

    def skipped(self: Any, num_computed_tokens: int) -> int:
        count: int = plain(self, num_computed_tokens)
        early = plain(self, num_computed_tokens + self.block_size)
        if plant.is_due() and early // self.block_size > count // self.block_size:
            plant.acted()
            return early
        return count

    return patch.object(SlidingWindowManager, "get_num_skipped_tokens", skipped)


def moved_replay(plant: Plant) -> Any:
    """A replay of a graph writes each key and value to the slot beside its own, in the same block.

    The metadata are right: the slots change after the recorder has copied them.
    """
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    plain = CudaGraphManager.run_fullgraph
    slots = plant.runner.block_tables.slot_mappings

    def run_fullgraph(self: Any, desc: Any) -> Any:
        if not plant.is_due(0):
            return plain(self, desc)
        right = slots.clone()
        slots.copy_(torch.where(right >= 0, right ^ 1, right))
        plant.acted(0)
        try:
            return plain(self, desc)
        finally:
            slots.copy_(right)

    return patch.object(CudaGraphManager, "run_fullgraph", run_fullgraph)


def _impl(plant: Plant) -> Any:
    """Return the implementation of the model's first attention layer."""
    return next(
        module.impl
        for module in plant.runner.model.modules()
        if hasattr(module, "impl")
    )


class _UnitScales:
    """A layer whose scales are 1."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self._k_scale = self._v_scale = torch.ones_like(layer._k_scale)
        self._k_scale_float = self._v_scale_float = 1.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)


def dropped_scale(plant: Plant) -> Any:
    """The cache is written without the scales with which it is read."""
    owner = type(_impl(plant)).__mro__[1]
    plain = owner.do_kv_cache_update

    def update(self: Any, layer: Any, *args: Any) -> None:
        if plant.is_due(0):
            layer = _UnitScales(layer)
            plant.acted(0)
        plain(self, layer, *args)

    return patch.object(owner, "do_kv_cache_update", update)


def unscaled_read(plant: Plant) -> Any:
    """Attention reads an FP8 cache without its scales."""

    def change(given: dict[str, Any]) -> None:
        for name in ("k_descale", "v_descale"):
            given[name] = torch.ones_like(given[name])

    return _attending(plant, change, lambda options: {"k_scale": 1.0, "v_scale": 1.0})


def wide_window(plant: Plant) -> Any:
    """The kernel's window is one key wider than the model's."""

    def change(given: dict[str, Any]) -> None:
        left, right = given["window_size"]
        given["window_size"] = [left + 1, right]

    return _attending(
        plant,
        change,
        lambda options: {"sliding_window": options.sliding_window + 1},
    )


def _attending(
    plant: Plant,
    change: Callable[[dict[str, Any]], None],
    changed: Callable[[Any], dict[str, Any]],
) -> Any:
    """Return a patch of the calls of the attention kernel.

    Args:
        plant: the bug.
        change: modifies the arguments of FLASH_ATTN's kernel by name.
        changed: returns the options of this project's kernel that change.
    """
    impl = _impl(plant)
    if not hasattr(impl, "_attend"):
        from vllm.v1.attention.backends import flash_attn

        kernel = flash_attn.flash_attn_varlen_func

        def attend(*args: Any, **kw: Any) -> Any:
            if plant.is_due(0):
                change(kw)
                plant.acted(0)
            return kernel(*args, **kw)

        return patch.object(flash_attn, "flash_attn_varlen_func", attend)
    patches = ExitStack()
    for module in plant.runner.model.modules():
        layer = getattr(module, "impl", None)
        if layer is not None:
            patches.enter_context(
                patch.object(layer, "_attend", _with(plant, layer._attend, changed))
            )
    return patches


def _with(
    plant: Plant, kernel: Any, changed: Callable[[Any], dict[str, Any]]
) -> Callable[..., Any]:
    def attend(*args: Any, options: Any, **kw: Any) -> Any:
        if plant.is_due(0):
            options = dataclasses.replace(options, **changed(options))
            plant.acted(0)
        return kernel(*args, options=options, **kw)

    return attend


def with_slots_and_heads_swapped(cache: Any) -> Any:
    """Return a cache of the same shape, as if its memory had slots and heads in the other order."""
    if cache.dim() == 5:  # [num_blocks, 2, block_size, kv_heads, head_size], in 0.25
        blocks, halves, size, heads, width = cache.shape
        return cache.view(blocks, halves, heads, size, width).transpose(2, 3)
    blocks, heads, size, width = cache.shape
    if cache.is_contiguous():
        return cache.view(blocks, size, heads, width).transpose(1, 2)
    return cache.transpose(1, 2).view(blocks, heads, size, width)


def other_layout(plant: Plant) -> Any:
    """The cache is written as if slots and heads of a block were stored in the other order."""
    owner = type(_impl(plant)).__mro__[1]
    plain = owner.do_kv_cache_update

    def update(
        self: Any, layer: Any, key: Any, value: Any, cache: Any, slots: Any
    ) -> None:
        if plant.is_due(0):
            cache = with_slots_and_heads_swapped(cache)
            plant.acted(0)
        plain(self, layer, key, value, cache, slots)

    return patch.object(owner, "do_kv_cache_update", update)


def unmoved_row(plant: Plant) -> Any:
    """A request moves to another row of the batch, and its blocks do not."""
    from vllm.v1.worker.block_table import MultiGroupBlockTable

    plain = MultiGroupBlockTable.move_row

    def move_row(self: Any, src: int, tgt: int) -> None:
        if plant.is_due():
            plant.acted()
            return
        plain(self, src, tgt)

    return patch.object(MultiGroupBlockTable, "move_row", move_row)


def stale_slots(plant: Plant) -> Any:
    """One step writes to the slots of the step before."""
    from vllm.v1.worker.block_table import MultiGroupBlockTable

    plain = MultiGroupBlockTable.compute_slot_mapping

    def compute(self: Any, *args: Any) -> None:
        if plant.is_due() and not plant.effects:
            plant.acted()
            return
        plain(self, *args)

    return patch.object(MultiGroupBlockTable, "compute_slot_mapping", compute)


BUGS: dict[str, Callable[[Plant], Any]] = {
    "wrong slot for a padded row": padded_slot,
    "stale block-table row after a preemption": stale_row,
    "a block is handed out while a request holds it": early_reuse,
    "the cache is written without its FP8 scales": dropped_scale,
    "sliding window one key too wide": wide_window,
    "the cache is written in another layout": other_layout,
    "attention reads an FP8 cache without its scales": unscaled_read,
    "a block is given up while the window needs it": early_given_up,
    "the slots are those of the step before": stale_slots,
    "a request moves to another row without its blocks": unmoved_row,
    "a replay writes to other slots than those of the step": moved_replay,
}


@contextmanager
def planted(name: str, plant: Plant) -> Iterator[None]:
    """Plant a bug for the duration of a block."""
    with BUGS[name](plant):
        yield
