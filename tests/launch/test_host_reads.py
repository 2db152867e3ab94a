"""Host reads: the optimized twin plans and launches without a copy from device to host.

Tensors on the "meta" device and fake tensors hold no numbers, so that reading one raises.
"""

from collections.abc import Iterator
from importlib import import_module
from inspect import unwrap
from typing import Any

import pytest
import torch
from pagetwin.conformance.cases.batches import BatchPlan, build
from pagetwin.conformance.cases.latent_batches import LatentPlan, build_latents
from pagetwin.conformance.laws.indexer import (
    Indexed,
    arguments_of_write,
    build_indexed,
)
from pagetwin.conformance.laws.sparse_attention import SparsePlan, build_sparse
from pagetwin.conformance.laws.sparse_records import RECORD_PLANS, build_records
from pagetwin.conformance.laws.sparse_slots import arguments_for_slots
from pagetwin.contract.attention_options import pack_options
from pagetwin.contract.metadata_classes import UBatchSlice
from pagetwin.contract.specs import KVCacheSpec
from pagetwin.engine.selector import load_backend
from pagetwin.optimized.kernels.portable.host import plan as portable
from pagetwin.optimized.kernels.sm90.common.plan import Sm90Plan
from pagetwin.optimized.kernels.sm90.prefill.packed import PackedPlan
from pagetwin.optimized.runtime.launcher import Launcher
from support.twins import Twin
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

# ---- nothing is read from the device


@pytest.fixture
def optimized() -> Twin:
    return Twin("optimized", enforce=False)


def test_a_step_is_planned_without_reading_the_device(optimized: Twin) -> None:
    """On a device whose tensors hold nothing: any read of one raises."""
    with pytest.raises(RuntimeError):
        int(torch.zeros(1, device="meta").max())
    rows = [[1], [2, 3], [4]]
    table = torch.zeros(3, 4, dtype=torch.int32, device="meta")
    held = torch.zeros(3, dtype=torch.int32)
    assert optimized.append_blocks(table, held, rows).tolist() == [1, 2, 1]
    buffers = optimized.StepBuffers(4, 64, 4, 16, "meta")
    buffers.append_blocks(range(3), rows)
    lens, computed = [1, 17, 5], [3, 2, 0]
    for step in (
        optimized.build_common_attn_metadata(lens, computed, rows, 16, "meta"),
        buffers.build(lens, computed),
        buffers.build(lens, computed, [0, 1, 2], 4, 32),
    ):
        assert step.seq_lens.is_meta and step.block_table_tensor.is_meta
        assert (step.max_query_len, step.max_seq_len) == (17, 19)
        optimized.split_decodes_and_prefills(step)
        optimized.split_decodes_prefills_and_extends(step)
        step.token_to_req_indices()
        step.compute_num_computed_tokens()
        cuts = [
            UBatchSlice(slice(0, 2), slice(0, 9)),
            UBatchSlice(slice(1, 3), slice(9, 23)),
        ]
        for part in optimized.split_attn_metadata(cuts, step):
            assert part.seq_lens.is_meta and not part.seq_lens_cpu.is_meta
        builder = load_backend("TRITON").get_builder_cls()(
            KVCacheSpec(16, 2, 32, torch.float16), ["layer"], "meta"
        )
        metadata = optimized.build_attn_metadata(
            [builder],
            3,
            23,
            step.query_start_loc,
            step.query_start_loc_cpu,
            step.seq_lens,
            step.seq_lens_cpu,
            step.num_computed_tokens_cpu,
            [step.block_table_tensor],
            [step.slot_mapping],
            [["layer"]],
        )["layer"]
        assert metadata.prefill_metadata.seq_lens.is_meta


@pytest.fixture
def grids(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Return the grids that attention launches; no kernel runs."""
    found: list[Any] = []

    def note(_plan: Any, _launcher: Any, grid: tuple[int, int, int], *_: Any) -> None:
        found.append(grid)

    monkeypatch.setattr(portable.PortablePlan, "start", note)
    for plan_class in (Sm90Plan, PackedPlan):
        monkeypatch.setattr(
            plan_class,
            "launch_with_maps",
            lambda _, call, grid, *rest: found.append(grid),
        )
    yield found


@pytest.mark.parametrize("query_len", [1, 40])
def test_attention_is_launched_without_reading_the_device(
    query_len: int, grids: list[Any], optimized: Twin, device: torch.device
) -> None:
    """On fake tensors, of which int(seq_lens.max()) cannot be taken."""
    step = optimized.build_common_attn_metadata(
        [1, query_len], [700, 9], [list(range(44)), list(range(4))], 16, device
    )
    with FakeTensorMode(allow_non_fake_inputs=False) as mode, device:
        query = torch.empty(step.num_actual_tokens, 4, 64, dtype=torch.float16)
        cache = torch.empty(2, 50, 16, 2, 64, dtype=torch.float16)
        table, starts, lens = (
            mode.from_tensor(tensor)
            for tensor in (step.block_table_tensor, step.query_start_loc, step.seq_lens)
        )
        with pytest.raises(Exception, match=r"item|data-dependent|[Ss]calar"):
            int(lens.max())
        # as an operator it would not be looked into
        unwrap(optimized.paged_attention)(
            query,
            cache[0],
            cache[1],
            table,
            starts,
            lens,
            step.max_query_len,
            step.max_seq_len,
        )
    assert grids, "no kernel was launched"


def test_planning_touches_the_same_bytes_at_any_context(optimized: Twin) -> None:
    """What is sent is counted in bytes: as many after 100 tokens as after 100,000."""
    sent = []
    for context in (100, 100_000):
        buffers = optimized.StepBuffers(4, 8, 8192, 16)
        row = list(range(-(-(context + 2) // 16)))
        buffers.append_blocks(range(4), [row] * 4)
        buffers.build([1] * 4, [context] * 4)
        ends: list[int] = []
        for pinned in buffers._pinned:
            pinned.send = lambda target, num_bytes, ends=ends: ends.append(num_bytes)
        buffers.build([1] * 4, [context + 1] * 4)
        sent.append(ends)
    assert sent[0] == sent[1]
    assert len(sent[0]) == 1, "more than one copy"


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_cascade_attention_reads_nothing_on_the_host(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """On tensors without contents, which cannot be read: two launches, and no other operation."""
    module = import_module("pagetwin.optimized.attention.cascade")
    grids: list[Any] = []
    monkeypatch.setattr(Launcher, "__call__", lambda _, grid, *rest: grids.append(grid))
    batch = build(BatchPlan((1, 3, 1), (40, 50, 33)), device)
    with FakeTensorMode() as mode:
        fake = {
            name: mode.from_tensor(value) if isinstance(value, Tensor) else value
            for name, value in batch.arguments().items()
        }
        out = unwrap(module.cascade_attention)(**fake, common_prefix_len=32)
    assert out.shape == batch.query.shape
    kv_heads = batch.plan.kv_heads
    assert len(grids) == 2 and all(grid[0] == kv_heads for grid in grids)


def test_attention_of_a_rank_reads_nothing_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its own lines run on tensors without contents, which cannot be read."""
    module = import_module("pagetwin.optimized.attention.context_parallel")
    monkeypatch.setattr(module, "paged_attention", lambda *a, **k: (a, k))
    batch = build(BatchPlan((3, 1), (40, 9), padding=2))
    with FakeTensorMode() as mode:
        fake = {
            name: mode.from_tensor(value) if isinstance(value, Tensor) else value
            for name, value in batch.arguments().items()
        }
        attention = unwrap(module.dcp_attention)
        given_on, named = attention(**fake, dcp_world_size=2, dcp_rank=1)
    query, _, _, table, starts, lens = given_on
    assert [len(tensor) for tensor in (query, table, starts, lens)] == [6, 6, 7, 6]
    assert named["max_seq_len"] == 20 and named["max_query_len"] == 1


class NoHostReads(TorchDispatchMode):
    """Fail at a copy of a number from the device to the host."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        assert "_local_scalar_dense" not in str(func), "the host waits for a number"
        return func(*args, **(kwargs or {}))


def test_latent_attention_reads_nothing_on_the_host(
    optimized: Twin, device: torch.device, unchecked_values: None
) -> None:
    plan = LatentPlan((3, 1), (20, 9), cache_dtype=torch.float8_e4m3fn)
    batch = build_latents(plan, device)
    scale = {"k_scale": torch.tensor(0.5, device=device)}
    slots = torch.full((4,), -1, dtype=torch.int64, device=device)
    with NoHostReads():
        optimized.latent_decode_attention(
            **pack_options(**batch.decode_arguments() | scale)
        )
        optimized.latent_prefill_attention(
            **pack_options(**batch.prefill_arguments() | scale)
        )
        optimized.concat_and_cache_mla(
            batch.kv_c, batch.k_pe, batch.kv_cache, slots, scale["k_scale"]
        )


def test_sparse_attention_reads_nothing_on_the_host(
    optimized: Twin, device: torch.device, unchecked_values: None
) -> None:
    call = build_sparse(SparsePlan((5, 0, 2), options=("sinks",)), device)
    table = torch.tensor([[3, 1]], dtype=torch.int32, device=device)
    owners = torch.zeros(3, dtype=torch.int32, device=device)
    over_records = build_records("fp8_ds_mla", RECORD_PLANS[0], device)
    with NoHostReads():
        call.run(optimized.sparse_attention)
        over_records.run(optimized.sparse_attention)
        optimized.convert_req_index_to_global_index(
            owners, table, call.slots, 4, compact_valid_to_front=True
        )
        optimized.indexer_k_quant_and_cache(**arguments_of_write(device))
        scores = optimized.index_scores(
            **build_indexed(Indexed((2,), (9,)), device).given
        )
        optimized.select_keys(scores, 3)
        optimized.prepare_uniform_decode(owners, table.repeat(3, 1), 2)
        for name, given in arguments_for_slots(device).items():
            getattr(optimized, name)(**given)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs pinned memory")
def test_a_pinned_buffer_is_not_filled_before_its_copy_has_run() -> None:
    """The copies wait for a long kernel; each step must still send its own numbers."""
    from pagetwin.optimized.batch.step_buffers import StepBuffers

    device = torch.device("cuda")
    buffers = StepBuffers(1, 8, 4, 16, device)
    buffers.append_blocks([0], [[3]])
    buffers.build([1], [0])
    seen = []
    torch.cuda._sleep(100_000_000)
    for old in range(8):
        seen.append(buffers.build([1], [old]).seq_lens.clone())
    assert [length.item() for length in seen] == [old + 1 for old in range(8)]
