"""A small engine: scheduler, block manager and attention layers, with planted bugs.

Its keys, values and queries are drawn from the token's position and request, so a request that is
computed again after a preemption gets the same ones. Each planted bug is one that has been
reported of serving engines.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from pagetwin.contract.kinds import PAD_SLOT_ID
from pagetwin.contract.metadata_classes import CommonAttentionMetadata
from pagetwin.contract.operations import load_implementation
from pagetwin.contract.scheduler_classes import Request, SchedulerOutput
from pagetwin.contract.specs import (
    CacheConfig,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)
from pagetwin.engine.layer import Attention
from pagetwin.engine.selector import load_backend
from pagetwin.recorder import Recorder, record_backend
from pagetwin.reference.batch.scheduler import Scheduler
from pagetwin.reference.cache.block_manager import BlockManager
from torch import Tensor

HEADS, KV_HEADS, SIZE = 4, 2, 16


@dataclass(frozen=True)
class EngineSettings:
    """Sizes of the engine, and the bug that is planted.

    Args:
        bug: Optional. Name of the bug. If None, the engine is right.
        bug_from: the first step in which the bug can show.
    """

    bug: str | None = None
    bug_from: int = 20
    backend: str = "REFERENCE"
    num_blocks: int = 24
    block_size: int = 4
    token_budget: int = 24
    max_running: int = 8
    layers: int = 2
    cache_dtype: str = "auto"
    window: int | None = None
    pad_to: int = 8
    seed: int = 0


class LeakyBlockManager(BlockManager):
    """Hands out the last block of a running request although the request still holds it."""

    leaks = False

    def _take_block(self) -> int:
        if self.leaks:
            for row in self._rows.values():
                if len(row) > 2:
                    self.leaks = False
                    return row[1]
        return super()._take_block()


class SmallEngine:
    """Runs requests until all are finished.

    Args:
        settings: sizes and bug.
        recorder: Optional. Checks each step. If None, nothing is checked.
    """

    def __init__(
        self, settings: EngineSettings, recorder: Recorder | None = None
    ) -> None:
        self.settings = settings
        self.recorder = recorder
        self.steps = self.preemptions = 0
        self.first_wrong: int | None = None
        """The first step in which the planted bug changed something."""
        self.run = load_implementation("reference")
        self.manager = LeakyBlockManager(settings.num_blocks, settings.block_size, 1)
        self.scheduler = Scheduler(
            self.manager, settings.token_budget, settings.max_running
        )
        self.layers: dict[str, Attention] = {}
        backend: Any = load_backend(settings.backend)
        backend = planted(backend, settings, self)
        if recorder is not None:
            backend = record_backend(backend, recorder)
        config = CacheConfig(
            block_size=settings.block_size,
            cache_dtype=settings.cache_dtype,
            sliding_window=settings.window,
        )
        for index in range(settings.layers):
            Attention(
                HEADS,
                SIZE,
                SIZE**-0.5,
                KV_HEADS,
                cache_config=config,
                prefix=f"layers.{index}.attn",
                attn_backend=backend,
                static_forward_context=self.layers,
            )
        for layer in self.layers.values():
            layer.load_kv_scales(0.02, 0.02)
        specs = self.run.get_kv_cache_spec(
            self.layers, settings.block_size, torch.float32
        )
        first = next(iter(specs.values()))
        size = settings.num_blocks * first.page_size_bytes
        caches = KVCacheConfig(
            settings.num_blocks,
            [KVCacheTensor(size, [name]) for name in specs],
            [KVCacheGroupSpec(specs, first)],
        )
        backends = {
            name: layer.get_attn_backend() for name, layer in self.layers.items()
        }
        self.run.init_kv_cache(self.layers, caches, backends, "cpu")
        self.builder = backend.get_builder_cls()(first, list(specs), "cpu")
        self.stale: dict[Any, list[int]] = {}
        generator = torch.Generator().manual_seed(settings.seed)
        self.table = torch.randn(997, HEADS + 2 * KV_HEADS, SIZE, generator=generator)

    def add(self, requests: Sequence[Request]) -> None:
        """Add requests to the scheduler."""
        for request in requests:
            self.scheduler.add_request(request)

    def step(self) -> SchedulerOutput:
        """Run one step on all layers."""
        self.steps += 1
        if self.settings.bug == "freed block" and self.steps == self.settings.bug_from:
            self.manager.leaks = True
            self.note_bug()
        output = self.scheduler.schedule()
        self.preemptions += len(output.preempted_req_ids)
        if self.recorder is not None:
            self.recorder.schedule_output(output, self.settings.block_size)
        # decodes first
        scheduled = sorted(
            output.scheduled_requests,
            key=lambda request: request.num_scheduled_tokens > 1,
        )
        common = self.run.build_common_attn_metadata(
            [request.num_scheduled_tokens for request in scheduled],
            [request.num_computed_tokens for request in scheduled],
            self.rows(scheduled, output),
            self.settings.block_size,
        )
        common = self.padded(common)
        metadata = self.builder.build(0, common)
        numbers = [
            7 * scheduled_request.request.num_prompt_tokens + position
            for scheduled_request in scheduled
            for position in range(
                scheduled_request.num_computed_tokens,
                scheduled_request.num_computed_tokens
                + scheduled_request.num_scheduled_tokens,
            )
        ]
        rows = torch.zeros(common.slot_mapping.shape[0], HEADS + 2 * KV_HEADS, SIZE)
        rows[: len(numbers)] = self.table[torch.tensor(numbers) % 997]
        for layer in self.layers.values():
            query, key, value = rows.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
            layer(query.flatten(1), key.flatten(1), value.flatten(1), metadata)
        sampled = {
            scheduled_request.request.request_id: 1 + self.steps % 50
            for scheduled_request in output.scheduled_requests
            if scheduled_request.samples_token
        }
        self.scheduler.update_from_output(output, sampled)
        return output

    def rows(
        self, scheduled: Sequence[Any], output: SchedulerOutput
    ) -> list[list[int]]:
        """Return the rows of the block table, stale after a preemption if that bug is planted."""
        rows = [list(request.block_ids) for request in scheduled]
        if self.settings.bug == "stale row" and self.steps >= self.settings.bug_from:
            for index, scheduled_request in enumerate(scheduled):
                old = self.stale.get(scheduled_request.request.request_id, [])
                stale = old[: len(rows[index])]
                if scheduled_request.request.num_preemptions and len(stale) == len(
                    rows[index]
                ):
                    if stale != rows[index]:
                        self.note_bug()
                    rows[index] = stale
        for scheduled_request in scheduled:
            if not scheduled_request.request.num_preemptions:
                self.stale[scheduled_request.request.request_id] = list(
                    scheduled_request.block_ids
                )
        return rows

    def padded(self, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """Return the step with padded rows, whose slots are wrong if that bug is planted."""
        slots = common.slot_mapping
        count = -len(slots) % self.settings.pad_to
        wrong = (
            self.settings.bug == "padded row" and self.steps >= self.settings.bug_from
        )
        if wrong and count:
            self.note_bug()
        pad = torch.full((count,), 0 if wrong else PAD_SLOT_ID, dtype=slots.dtype)
        return common.replace(slot_mapping=torch.cat([slots, pad]))

    def note_bug(self) -> None:
        """Note that the planted bug changes something in this step."""
        self.first_wrong = self.first_wrong or self.steps

    def run_to_the_end(self, limit: int = 10**9) -> None:
        """Run steps until all requests are finished, or a number of steps is reached."""
        while (self.scheduler.running or self.scheduler.waiting) and self.steps < limit:
            self.step()
        if self.recorder is not None:
            self.recorder.finish()


def planted(backend: Any, settings: EngineSettings, engine: SmallEngine) -> Any:
    """Return the backend with the bug in the operations that it calls, if it is one of those."""
    bugs: dict[str, dict[str, Callable[[dict[str, Any]], dict[str, Any]]]] = {
        "fp8 scale": {"paged_attention": _drops_scales},
        "window": {"paged_attention": _widens_window},
        "layout": {"reshape_and_cache": _takes_heads_first},
    }
    if settings.bug not in bugs:
        return backend
    module = sys.modules[backend.__module__]

    def wrong(name: str) -> Callable[..., Any]:
        right, change = getattr(module, name), bugs[str(settings.bug)][name]
        return lambda **call: right(**change(call))

    class WrongImpl(backend.get_impl_cls()):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            with ExitStack() as stack:
                if engine.steps >= settings.bug_from:
                    engine.note_bug()
                    for name in bugs[str(settings.bug)]:
                        stack.enter_context(patch.object(module, name, wrong(name)))
                result: Tensor = super().forward(*args, **kwargs)
            return result

    return type("WrongBackend", (backend,), {"impl_cls": WrongImpl})


def _drops_scales(call: dict[str, Any]) -> dict[str, Any]:
    """Read an FP8 cache without its scales, in decodes alone."""
    if call["max_query_len"] > 1:
        return call
    return {**call, "options": replace(call["options"], k_scale=1.0, v_scale=1.0)}


def _widens_window(call: dict[str, Any]) -> dict[str, Any]:
    """Attend to one key more than the window has."""
    window = call["options"].sliding_window
    return {**call, "options": replace(call["options"], sliding_window=window + 1)}


def _takes_heads_first(call: dict[str, Any]) -> dict[str, Any]:
    """Write a cache of [slots, heads, size] blocks as if they were [heads, slots, size]."""
    caches = {}
    for name in ("key_cache", "value_cache"):
        cache = call[name]
        _, slots, _, size = cache.shape
        strides = (cache.stride(0), size, slots * size, 1)
        caches[name] = cache.as_strided(cache.shape, strides, cache.storage_offset())
    return {**call, **caches}
