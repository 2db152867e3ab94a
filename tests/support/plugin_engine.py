"""A small engine in vLLM's terms: scheduler, block manager and groups of layers of the plugin.

Each output of each layer is compared with attention by hand. Caches, scales and the recorder are
those of a running engine: requests are preempted, weights are loaded again, and groups of layers
with equal caches get their metadata from one another.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from pagetwin.contract.layer_pages import measured_format
from pagetwin.contract.scheduler_classes import Request
from pagetwin.recorder import Recorder, record_backend
from pagetwin.recorder.wrappers.vllm import VllmReader
from pagetwin.recorder.wrappers.vllm_schedule import WorkerSteps
from pagetwin.reference.batch.scheduler import Scheduler
from pagetwin.reference.cache.block_manager import BlockManager
from torch import Tensor

from support.fake_vllm import FakeGroup
from support.token_rows import TokenRows, end_of
from support.vllm_outputs import WorkerOutputs
from support.vllm_steps import BLOCK_SIZE, FP8, NUM_BLOCKS, STORAGE, make_cache

HEADS, SIZE = 4, 32
MAX_BLOCKS, MAX_REQS, MAX_TOKENS = 8, 4, 40
PADDING = 2
"""Rows of a step after its last token."""


@dataclass(frozen=True)
class FullAttentionSpec:
    """Has the name of vLLM's class."""

    block_size: int = BLOCK_SIZE
    sliding_window: int | None = None
    attention_chunk_size: int | None = None


@dataclass(frozen=True)
class SlidingWindowSpec:
    """Has the name of vLLM's class."""

    sliding_window: int
    block_size: int = BLOCK_SIZE


@dataclass
class Wrapper:
    """Has the attribute of vLLM's worker wrapper that the recorder reads."""

    worker: Any
    __hash__ = object.__hash__


class PluginEngine:
    """Runs requests on groups of layers, one layer per group.

    Args:
        version: version of the stand-in that is installed.
        windows: the window of each group; None for all keys.
        kv_cache_dtype: vLLM's name of the cache's dtype.
        num_blocks: blocks of each group, few enough for preemptions.
        recorder: Optional. Checks each step. If None, nothing is checked.
        resumes_as_new: as in `WorkerOutputs`.
        ranks: Optional. The ranks that share the keys, each of which runs an engine. If None, there
            is one.

    Attributes:
        worst: the largest error of an output so far, divided by its budget.
        preemptions: how many there were.
    """

    def __init__(
        self,
        version: str,
        windows: Sequence[int | None] = (None, 6, None, 6),
        kv_cache_dtype: str = "auto",
        num_blocks: int = 8,
        recorder: Recorder | None = None,
        resumes_as_new: bool = False,
        ranks: FakeGroup | None = None,
    ) -> None:
        from pagetwin.integrations.vllm.plugin import choose_backend

        assert num_blocks * len(windows) <= NUM_BLOCKS
        self.version, self.windows, self.num_blocks = version, windows, num_blocks
        self.fp8, self.recorder = FP8.get(kv_cache_dtype), recorder
        self.kv_cache_dtype, self.form = kv_cache_dtype, measured_format(kv_cache_dtype)
        self.ranks = ranks or FakeGroup(None, 1)
        self.preemptions, self.worst = 0, 0.0
        size = self.ranks.world_size
        # ranks have the same KV heads, as with tensor parallelism of as many ranks
        self.kv_heads = 2 if size == 1 else 1
        self.rows = [
            TokenRows(HEADS * size, self.kv_heads, SIZE, seed)
            for seed in range(len(windows))
        ]
        manager = BlockManager(num_blocks, BLOCK_SIZE * size, 0)
        self.scheduler = Scheduler(manager, MAX_TOKENS, MAX_REQS)
        self.outputs = WorkerOutputs(self.group_rows, resumes_as_new)
        self.worker_steps = WorkerSteps()
        self.plain: Any = choose_backend()
        backend = self.plain
        if recorder is not None:
            self.worker_steps.recorders.append(recorder)
            backend = record_backend(backend, recorder, VllmReader(self.worker_steps))
        self.specs: list[Any] = [
            FullAttentionSpec() if window is None else SlidingWindowSpec(window)
            for window in windows
        ]
        names = [f"layers.{index}.attn" for index in range(len(windows))]
        impl = backend.get_impl_cls()
        sizes = (HEADS, SIZE, SIZE**-0.5, self.kv_heads, None)
        self.layers = [
            SimpleNamespace(
                impl=impl(*sizes, window, kv_cache_dtype), layer_name=name, cache=None
            )
            for name, window in zip(names, windows, strict=True)
        ]
        config = vllm_config(dict(zip(names, self.layers, strict=True)))
        self.builders = [
            backend.get_builder_cls()(spec, [name], config, "cpu")
            for spec, name in zip(self.specs, names, strict=True)
        ]
        for layer in self.layers:
            layer.impl.bounds = None  # warm-up has tests of its own
        groups = [
            SimpleNamespace(kv_cache_spec=spec, layer_names=[name])
            for spec, name in zip(self.specs, names, strict=True)
        ]
        caches = SimpleNamespace(kv_cache_groups=groups)
        runner = SimpleNamespace(kv_cache_config=caches)
        self.wrapper = Wrapper(SimpleNamespace(vllm_config=config, model_runner=runner))
        self.allocate()
        self.load_scales(0.05, 0.04)

    def allocate(self) -> None:
        """Give all layers a new cache, full of NaN: one, as in vLLM, whose blocks groups divide."""
        name = self.kv_cache_dtype
        sizes = (self.kv_heads, SIZE, STORAGE.get(name, torch.uint8) or torch.float32)
        cache = make_cache(self.version, self.plain, *sizes, name)
        for layer in self.layers:
            layer.cache = cache

    def load_scales(
        self, k_scale: float | None, v_scale: float | None, in_place: bool = False
    ) -> None:
        """Give all layers new scales; None keeps one.

        Args:
            k_scale, v_scale: the numbers.
            in_place: whether the tensors are filled. If not, they are replaced.
        """
        for layer in self.layers:
            for name, scale in (("_k_scale", k_scale), ("_v_scale", v_scale)):
                if scale is None:
                    continue
                setattr(layer, f"{name}_float", scale)
                if in_place:
                    getattr(layer, name).fill_(scale)
                else:
                    setattr(layer, name, torch.tensor(scale))

    def run(self, requests: Sequence[Request]) -> None:
        """Run requests until all are finished."""
        for request in requests:
            self.scheduler.add_request(request)
        while self.scheduler.running or self.scheduler.waiting:
            self.step()

    def step(self) -> None:
        """Run one step on all layers, and compare each output."""
        output = self.scheduler.schedule()
        self.preemptions += len(output.preempted_req_ids)
        assert not output.blocks_to_copy
        self.worker_steps.begin(self.wrapper, self.outputs.tell(output))
        # decodes first
        scheduled = sorted(
            output.scheduled_requests,
            key=lambda request: request.num_scheduled_tokens > 1,
        )
        built: dict[Any, Any] = {}
        for index, (spec, builder) in enumerate(
            zip(self.specs, self.builders, strict=True)
        ):
            common = self.common(scheduled, index)
            # vLLM builds the metadata of equal caches once
            if spec in built and builder.supports_update_block_table:
                blocks = (common.block_table_tensor, common.slot_mapping)
                metadata = builder.update_block_table(built[spec], *blocks)
            else:
                metadata = built[spec] = builder.build(0, common)
            self.attend(index, scheduled, metadata)
        self.worker_steps._running -= 1
        tokens = {
            scheduled_request.request.request_id: 1
            + scheduled_request.request.num_tokens % 50
            for scheduled_request in output.scheduled_requests
            if scheduled_request.samples_token
        }
        self.scheduler.update_from_output(output, tokens)
        self.outputs.ended(output)

    def attend(self, index: int, scheduled: Sequence[Any], metadata: Any) -> None:
        """Run the layer of a group, and compare its output."""
        layer, rows = self.layers[index], self.rows[index]
        new = rows.step(scheduled, PADDING)
        heads = new.query.chunk(self.ranks.world_size, 1)[self.ranks.rank_in_group]
        new = new._replace(query=heads.contiguous())
        layer.impl.do_kv_cache_update(
            layer, new.key, new.value, layer.cache, metadata.slot_mapping
        )
        out = torch.full_like(new.query, torch.nan)
        layer.impl.forward(layer, *new, layer.cache, metadata, out)
        scales = (float(layer._k_scale), float(layer._v_scale))
        error = rows.error(
            scheduled, new, out, self.windows[index], self.fp8, *scales, self.form
        )
        self.worst = max(self.worst, error)

    def group_rows(self, row: Sequence[int]) -> tuple[list[int], ...]:
        """Return the blocks of a request in each group, which has a part of the pool."""
        count = self.num_blocks
        return tuple(
            [index * count + (block_id + index) % count for block_id in row]
            for index in range(len(self.windows))
        )

    def common(self, scheduled: Sequence[Any], index: int) -> Any:
        """Return vLLM's description of a step of a group; its tensors are longer than the step."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        new = [request.num_scheduled_tokens for request in scheduled]
        starts = torch.tensor([0, *new]).cumsum(0).int()
        lens = torch.tensor([end_of(request) for request in scheduled]).int()
        table = torch.full((len(new) + PADDING, MAX_BLOCKS), -7, dtype=torch.int32)
        slots = []
        for number, request in enumerate(scheduled):
            row = torch.tensor(self.group_rows(request.block_ids)[index])
            table[number, : len(row)] = row
            slots.append(self.slots(row, request.num_computed_tokens, end_of(request)))
        spare = torch.full((PADDING,), -7, dtype=torch.int32)
        return CommonAttentionMetadata(
            query_start_loc=torch.cat([starts, spare]),
            query_start_loc_cpu=starts,
            seq_lens=torch.cat([lens, spare]),
            num_reqs=len(new),
            num_actual_tokens=sum(new),
            max_query_len=max(new),
            max_seq_len=int(lens.max()),
            block_table_tensor=table,
            slot_mapping=torch.cat([*slots, torch.full((PADDING,), -1)]),
            causal=True,
        )

    def slots(self, row: Tensor, first: int, last: int) -> Tensor:
        """Return the slots of positions of a sequence; -1 of those that other ranks store."""
        ranks, run = self.ranks.world_size, self.ranks.interleave_size
        positions = torch.arange(first, last)
        within = positions % (BLOCK_SIZE * ranks)
        slots = row[positions // (BLOCK_SIZE * ranks)] * BLOCK_SIZE
        slots += within // (run * ranks) * run + within % run
        is_own = within // run % ranks == self.ranks.rank_in_group
        return torch.where(is_own, slots, -1)


def vllm_config(layers: dict[str, Any]) -> Any:
    """Return what the plugin and the recorder read of vLLM's configuration."""
    return SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=layers),
        scheduler_config=SimpleNamespace(
            max_num_seqs=MAX_REQS,
            max_num_batched_tokens=MAX_TOKENS + PADDING,
            async_scheduling=False,
        ),
        model_config=SimpleNamespace(max_model_len=MAX_BLOCKS * BLOCK_SIZE),
        speculative_config=None,
    )


def draw_requests(count: int, seed: int) -> list[Request]:
    """Return requests, of which some have a common prefix of two blocks."""
    draw = random.Random(seed)
    common = [draw.randrange(50) for _ in range(32)]
    made = []
    for number in range(count):
        prompt = [draw.randrange(50) for _ in range(draw.randrange(3, 50))]
        prompt = common + prompt[:9] if number % 3 == 0 else prompt
        made.append(Request(f"{seed} {number}", prompt, draw.randrange(3, 20)))
    return made
