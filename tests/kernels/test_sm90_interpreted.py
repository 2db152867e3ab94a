"""The kernels for Hopper, run on the CPU role by role (gluon_interpreter).

A GPU shows whether results are right; these tests also fail where a kernel is right by luck: shared
memory that is read before it is waited for, or overwritten while a product or copy reads it. They
do not replace the tests on a GPU: registers, layouts and the compiler are not interpreted.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_faults import Fault, changed_kernels
from pagetwin.conformance.cases.batches import BatchPlan, build
from pagetwin.conformance.cases.options import paged_call
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.contract.operations import load_implementation
from pagetwin.gluon_interpreter import InterpreterError
from pagetwin.gluon_interpreter.shared_memory import Buffer, SharedView, tile_order
from pagetwin.gluon_interpreter.values import Memory, Pointer, Value, lift
from pagetwin.optimized.dispatch.choice import AttentionPlan
from pagetwin.optimized.kernels.portable.host.plans import PortableDecodePlan
from pagetwin.optimized.kernels.sm90.common.config import SWIZZLED, SWIZZLED_32_BIT
from support.hopper import CASES, check, pretend_hopper
from support.hopper_checks import FAR, check_far, check_orders
from support.twins import TWINS, Twin
from triton.experimental.gluon import language as gl

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="it is the run without a GPU that is tried"
    ),
]


@pytest.mark.parametrize("name", CASES)
def test_every_row_is_within_its_error_budget(
    name: str, reference: Twin, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pretend_hopper(monkeypatch) as launches:
        check(CASES[name], reference)
    assert launches.made


@pytest.mark.parametrize("lateness", [0.0, 1.0])
@pytest.mark.parametrize(
    "name",
    [
        "prefill, head size 64",
        "append, several segments",
        "invariant",
        "latent",
        "copied latent, blocks of 12",
    ],
)
def test_the_order_of_roles_programs_and_copies_changes_no_bit(
    name: str, lateness: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_orders(CASES[name], lateness, monkeypatch)


def test_a_call_of_the_twin_is_computed_by_the_kernel_for_hopper(
    reference: Twin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short requests by the portable decode kernel, long ones by the prefill kernel."""
    batch = build(
        BatchPlan(
            (1, 70), (50, 90), head_size=64, dtype=torch.float16, kv_heads=1, group=2
        )
    )
    with pretend_hopper(monkeypatch) as launches:
        out = TWINS["optimized"].raw.paged_attention(**batch.arguments())
    assert launches.made == ["prefill_kernel"]
    right = reference.paged_attention(**batch.arguments(), compute_dtype=torch.float64)
    torch.testing.assert_close(out.double(), right.double(), atol=2e-3, rtol=2e-3)


def test_a_short_request_and_padding_in_a_batch_of_one_length_need_no_decode_launch(
    reference: Twin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests of 70 tokens were announced; a captured batch got one of 70 and one of 3."""
    batch = build(
        BatchPlan(
            (70, 3), (90, 50), head_size=64, dtype=torch.float16, kv_heads=1, group=2,
            padding=67,
        )
    )  # fmt: skip
    decodes: list[Any] = []
    monkeypatch.setattr(
        PortableDecodePlan, "launch", lambda *call: decodes.append(call)
    )
    out, lse = batch.fresh()
    with pretend_hopper(monkeypatch) as launches:
        TWINS["optimized"].raw.paged_attention(**batch.arguments(), out=out, lse=lse)
    assert launches.made == ["prefill_kernel"] and not decodes
    right, right_lse = batch.fresh()
    reference.paged_attention(**batch.arguments(), out=right, lse=right_lse)
    torch.testing.assert_close(out, right, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(lse, right_lse, atol=1e-4, rtol=1e-4)
    assert not out[73:].any() and bool((lse[:, 73:] == -torch.inf).all())


def test_each_token_attends_to_the_latents_of_its_slots_on_the_kernel_for_hopper(
    reference: Twin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots in any order, some twice, entries without a slot anywhere, and a row without slots."""
    generator = torch.Generator().manual_seed(0)
    for heads, padded in ((16, False), (8, True)):
        cache = torch.full((9, 16, 1, 640), torch.nan, dtype=torch.float16)
        # a step from block to block that no step from slot to slot divides
        latents = cache[:8, :12, :, :576] if padded else cache[:8, :, :, :576]
        slots = torch.randint(latents[..., 0].numel(), (6, 130), generator=generator)
        slots[torch.rand(slots.shape, generator=generator) < 0.3] = -1
        slots[3], slots[4, 1:] = -1, -1
        # slots to the end of the table
        slots[5] = torch.arange(130) // 2
        rows = latents.flatten(0, 1).clone()
        named = slots[slots >= 0].unique()
        rows[named] = torch.randn(
            len(named), 1, 576, generator=generator, dtype=torch.float16
        )
        latents.copy_(rows.view(latents.shape))
        query = torch.randn(6, heads, 576, generator=generator, dtype=torch.float16)
        given = {
            "query": query, "key_cache": latents, "value_cache": latents[..., :512],
            "slots": slots.int(), "scale": 0.05,
        }  # fmt: skip
        lse, right_lse = torch.full((2, heads, 6), torch.nan)
        with pretend_hopper(monkeypatch) as launches:
            out = TWINS["optimized"].raw.sparse_attention(**given, lse=lse)
        assert launches.made == ["copied_latent_decode_kernel", "latent_combine_kernel"]
        right = reference.sparse_attention(
            **given, lse=right_lse, compute_dtype=torch.float64
        )
        torch.testing.assert_close(out.double(), right.double(), atol=2e-3, rtol=2e-3)
        torch.testing.assert_close(lse, right_lse, atol=1e-4, rtol=1e-4)
        assert not out[3].any() and bool((lse[:, 3] == -torch.inf).all())


def test_an_encoder_with_a_window_to_both_sides_is_computed_by_the_kernel_for_hopper(
    reference: Twin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """12 heads of 64 and 64 keys on each side are those of ModernBERT."""
    lens = 150, 40
    starts = torch.tensor([0, 150, 190], dtype=torch.int32)
    query, key, value = torch.randn(3, 190, 12, 64).half()
    given = (query, key, value, starts, starts, max(lens), max(lens))
    options = AttentionOptions(causal=False, sliding_window=65)
    with pretend_hopper(monkeypatch) as launches:
        out = TWINS["optimized"].raw.encoder_attention(*given, options=options)
    assert launches.made == ["prefill_kernel"]
    right = reference.encoder_attention(
        *given, options=options, compute_dtype=torch.float64
    )
    torch.testing.assert_close(out.double(), right.double(), atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize(
    ("block_size", "layout"),
    [(1, "separate"), (4, "hnd"), (12, "interleaved"), (16, "padded")],
)
def test_blocks_that_tma_does_not_load_are_copied_first(
    block_size: int, layout: str, reference: Twin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of 67 elements are 134 bytes apart, which 16 does not divide."""
    batch = build(
        BatchPlan(
            (1, 70, 33), (50, 90, 300), head_size=64, dtype=torch.float16, kv_heads=2, group=2,
            block_size=block_size, layout=layout, needle="block edge",
        )
    )  # fmt: skip
    out, lse = batch.fresh()
    with pretend_hopper(monkeypatch) as launches:
        TWINS["optimized"].raw.paged_attention(**batch.arguments(), out=out, lse=lse)
    assert launches.made == ["upcast_kernel", "prefill_kernel"]
    right, right_lse = batch.fresh()
    reference.paged_attention(**batch.arguments(), out=right, lse=right_lse)
    torch.testing.assert_close(out, right, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(lse, right_lse, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("axis", "name"), FAR)
def test_offsets_of_more_than_32_bits_change_no_bit(
    axis: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_far(axis, name, monkeypatch)


FAULTS = {
    "rows are cleared without a fence": Fault(
        "sm90/common/load_kv.py",
        "            fence_async_shared()\n            shared.v_pipe",
        "            shared.v_pipe",
        "prefill, head size 128",
        "expected fence_async_shared",
    ),
    "an output tile is stored without a fence": Fault(
        "sm90/prefill/epilogue.py",
        "        fence_async_shared()\n        COLUMNS",
        "        COLUMNS",
        "prefill, float16, whole tiles",
        "expected fence_async_shared",
    ),
    "keys are released before the product is complete": Fault(
        "sm90/common/mainloop.py",
        "    qk = warpgroup_mma_wait(0, deps=[qk])\n"
        "    shared.k_pipe.consumer_release(kv_state)\n    if config.SPLIT_TILES",
        "    shared.k_pipe.consumer_release(kv_state)\n"
        "    qk = warpgroup_mma_wait(0, deps=[qk])\n    if config.SPLIT_TILES",
        "prefill, many tiles",
        "expected a barrier between",
    ),
    "a product is not waited for": Fault(
        "sm90/common/mainloop.py",
        "    qk = warpgroup_mma_wait(0, deps=[qk])\n"
        "    shared.k_pipe.consumer_release(kv_state)\n    if config.SPLIT_TILES",
        "    shared.k_pipe.consumer_release(kv_state)\n    if config.SPLIT_TILES",
        "prefill, head size 128",
        "used before warpgroup_mma_wait",
    ),
    "queries are loaded where an output is still stored from": Fault(
        "sm90/common/pipeline.py",
        "q_state.count > 0:\n        tma.store_wait(0)\n",
        "q_state.count > 0:\n",
        "prefill, many work items",
        "expected a barrier between|overwritten before it was stored",
    ),
    "keys are never released": Fault(
        "sm90/common/mainloop.py",
        "    shared.k_pipe.consumer_release(kv_state)\n    if config.SPLIT_TILES",
        "    if config.SPLIT_TILES",
        "prefill, head size 128",
        "deadlock: role",
    ),
    "fewer bytes are expected than are loaded": Fault(
        "sm90/common/load_kv.py",
        "mbarrier.expect(full, BLOCK_N * (DIM + TAIL_DIM) * 2)",
        "mbarrier.expect(full, BLOCK_N * (DIM + TAIL_DIM))",
        "prefill, head size 128",
        # a phase ends early, so the next one has too many bytes, or a tile is read too early
        "of 1 arrivals and -|overwritten before the product|expected a barrier between",
    ),
    "a table is read past its end": Fault(
        "sm90/common/load_kv.py",
        "gl.minimum(position // BLOCK_SIZE, last_entry)",
        "position // BLOCK_SIZE + 1000",
        "prefill, head size 128",
        "a load of the elements",
    ),
    "a counter is left as it is": Fault(
        "sm90/append/consumer.py",
        "        gl.store(semaphore, 0)\n",
        "        pass\n",
        "append, several segments",
        "counters are not 0",
    ),
    "two KV heads share a counter": Fault(
        "sm90/append/consumer.py",
        "gl.num_programs(0) + gl.program_id(0)) *",
        "gl.num_programs(0)) *",
        "append, several segments",
        "contains NaN or infinity|two programs store to one element|Verdict",
    ),
    "two requests share a counter": Fault(
        "sm90/append/consumer.py",
        "(first * gl.num_programs(0) + gl.program_id(0)) *",
        "gl.program_id(0) *",
        "append, two requests in several segments",
        "contains NaN or infinity|two programs store to one element",
    ),
    "two warpgroups share a counter": Fault(
        "sm90/append/consumer.py",
        "output.semaphores + CONSUMER",
        "output.semaphores",
        "append, two warpgroups, several segments",
        "contains NaN or infinity|two programs store to one element",
    ),
    "a thread arrives before the others have stored": Fault(
        "sm90/append/consumer.py",
        "    barrier()\n    thread",
        "    thread",
        "append, several segments",
        "after stores: expected a barrier between",
    ),
    "the last partial result is left out": Fault(
        "sm90/append/combine.py",
        "segment <= last",
        "segment < last",
        "append, several segments",
        "row 0: error|Verdict",
    ),
    "weights are read before they are there": Fault(
        "sm90/latent/consumer.py",
        "        p_full_wait()\n        alpha = shared.alpha.load(ACC_ROWS)\n",
        "        alpha = shared.alpha.load(ACC_ROWS)\n        p_full_wait()\n",
        "latent",
        "expected a barrier between",
    ),
    "copied latents are multiplied without a fence": Fault(
        "sm90/latent/sync.py",
        "        fence_async_shared()\n",
        "        pass\n",
        "copied latent, blocks of 3",
        "expected fence_async_shared",
    ),
    "a part counts as copied before its last copies": Fault(
        "sm90/latent/gather.py",
        "        _copy_part(half_1.index(stage), rows, is_row, HALF)\n"
        "        async_copy.mbarrier_arrive(\n"
        "            shared.pipe_1.full_barrier(kv_state), increment_count=False\n"
        "        )\n",
        "        async_copy.mbarrier_arrive(\n"
        "            shared.pipe_1.full_barrier(kv_state), increment_count=False\n"
        "        )\n"
        "        _copy_part(half_1.index(stage), rows, is_row, HALF)\n",
        "copied latent, blocks of 3",
        "expected fence_async_shared|expected a barrier between",
    ),
    "latents are copied over others that are still read": Fault(
        "sm90/latent/gather.py",
        "        shared.pipe_0.producer_acquire(kv_state)\n",
        "",
        "copied latent, blocks of 3",
        "expected a barrier between",
    ),
    "one thread arrives for all copies": Fault(
        "sm90/latent/kernel.py",
        "32 * COPY_WARPS if IS_COPIED else 1",
        "1",
        "copied latent, blocks of 3",
        "more arrivals at an mbarrier than it counts",
    ),
    "rows past the end of a sequence are copied": Fault(
        "sm90/latent/gather.py",
        "    copy_elements(part, address, mask=is_row[:, None])\n",
        "    copy_elements(part, address)\n",
        "copied latent, blocks of 3",
        "Verdict",
    ),
    "entries past the end of a sequence are read": Fault(
        "sm90/latent/gather.py",
        "        entries + position // BLOCK_SIZE, mask=position < item.seq_len, other=0\n",
        "        entries + position // BLOCK_SIZE + 1000\n",
        "copied latent, blocks of 3",
        "a load of the elements",
    ),
    "the turn of the tensor cores is not handed back": Fault(
        "sm90/common/pipeline.py",
        "        ping_pong_wait(0)\n",
        "        pass\n",
        "prefill, head size 64",
        "does not end as it began|more than 256 threads",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_reported(
    name: str, reference: Twin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one of a few orders of the roles; the kernel as it is passes in all of them."""
    fault = FAULTS[name]
    reports = []
    for seed in range(4):
        try:
            with (
                changed_kernels(tmp_path, fault.old, fault.new, fault.file),
                pretend_hopper(monkeypatch, seed, lateness=0.9, pause_rate=0.3),
            ):
                check(CASES[fault.case], reference)
        except AssertionError as error:
            reports.append(str(error))
            break
    assert reports
    assert any(report in reports[0] for report in fault.report.split("|")), reports


def test_a_tile_has_the_bytes_of_the_hardware() -> None:
    """16-byte units change places with the number of the 128-byte row; columns 64 and on follow."""
    order = tile_order((64, 128), SWIZZLED.value, 2)
    assert order[0, :8].tolist() == list(range(8))
    assert order[1, :16].tolist() == [*range(72, 80), *range(64, 72)]
    assert order[8, 0] == 8 * 64
    assert order[0, 64] == 64 * 64
    assert sorted(order.flatten().tolist()) == list(range(64 * 128))


def test_two_views_of_a_buffer_have_the_same_bytes() -> None:
    whole = SharedView(Buffer(2 * 16 * 128), gl.bfloat16, [2, 16, 64], SWIZZLED.value)
    numbers = torch.arange(2 * 16 * 64).view(2, 16, 64).bfloat16()
    whole.write(numbers, None)
    wide = whole.reinterpret(gl.bfloat16, [16, 128], SWIZZLED.value)
    assert torch.equal(wide.read(), torch.cat((numbers[0], numbers[1]), 1))
    words = whole.reinterpret(gl.int32, [4, 8, 32], SWIZZLED_32_BIT.value).index(1)
    assert torch.equal(words.read().view(torch.bfloat16), numbers[0, 8:])
    columns = wide.slice(64, 32, 1).permute((1, 0))
    assert torch.equal(columns.read(), numbers[1, :, :32].T)


def test_integers_divide_as_on_a_gpu_and_do_not_overflow() -> None:
    assert int(lift(-7) // lift(2)) == -3 and int(lift(-7) % lift(2)) == -1
    tile = Value(torch.tensor([-7, 7], dtype=torch.int32), gl.int32)
    assert (tile // 2).data.tolist() == [-3, 3] and (tile % 4).data.tolist() == [-3, 3]
    for large in (lift(2**31 - 1), tile + (2**31 - 8)):
        with pytest.raises(InterpreterError):
            large + 1


def test_an_access_outside_of_a_tensor_is_reported() -> None:
    memory = Memory(torch.arange(12).view(3, 4)[:, 1:3])
    assert len(memory.flat) == 10
    everything = Value(torch.tensor([0, 9]), gl.int64)
    pointer = Pointer(memory, 0) + everything
    memory.check(pointer.data, torch.tensor([True, True]), "a load")
    with pytest.raises(InterpreterError, match="spans 10"):
        memory.check((pointer + 1).data, torch.tensor([True, True]), "a load")
    memory.check((pointer + 1).data, torch.tensor([True, False]), "a load")


def test_many_heads_that_no_decode_tile_takes_run_on_the_prefill_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a decode launch it clears the rows of no request, too. It was left to another."""
    plan = BatchPlan(
        (20, 1, 0, 3), (90, 50, 40, 3), head_size=64, group=71, kv_heads=1,
        dtype=torch.float16, padding=3,
    )  # fmt: skip
    call = paged_call(plan, torch.device("cpu"), [(0, 89), (1, 49)])
    with pretend_hopper(monkeypatch) as launches:
        # in place of an append, whatever the estimates say
        monkeypatch.setattr(AttentionPlan, "choose", lambda *_: None)
        out, lse = call.run(load_implementation("optimized"))
    assert launches.made == ["prefill_kernel"]
    call.assert_right(out, lse, load_implementation("reference"))
