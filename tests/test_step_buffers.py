"""Does a step written in place say what its requests say, wait for nothing, and cost the same?"""

import random
from collections.abc import Iterator
from dataclasses import fields
from inspect import unwrap
from typing import Any

import pytest
import torch
from conftest import Twin
from hypothesis import given
from hypothesis import strategies as st
from pagetwin.contract.kinds import PAD_SLOT_ID
from pagetwin.contract.metadata_classes import CommonAttentionMetadata, UBatchSlice
from pagetwin.contract.specs import KVCacheSpec
from pagetwin.engine.selector import load_backend
from pagetwin.optimized.kernels.sm90.family import Sm90Plan
from pagetwin.optimized.launch.portable import PortablePlan
from torch._subclasses.fake_tensor import FakeTensorMode

MAX_REQS, MAX_TOKENS, MAX_BLOCKS = 5, 60, 9


class Traffic:
    """Requests that come, grow and leave, and the rows that they own."""

    def __init__(self, seed: int, block_size: int) -> None:
        self.random = random.Random(seed)
        self.block_size = block_size
        self.rows: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}

    def step(self, buffers: Any, in_order: bool) -> dict[str, Any]:
        """Let requests leave and come, and return what the next step computes."""
        for row in [row for row in self.rows if self.random.random() < 0.2]:
            del self.rows[row], self.lengths[row]
            buffers.clear_rows([row])
        for row in range(MAX_REQS):
            if row not in self.rows and self.random.random() < 0.5:
                self.rows[row], self.lengths[row] = [], 0
        own = sorted(self.rows)
        if in_order:
            own = [row for row in range(MAX_REQS) if set(range(row + 1)) <= set(own)]
        else:
            self.random.shuffle(own)
        computed, news = [], []
        grown, blocks = [], []
        for row in own:
            room = MAX_BLOCKS * self.block_size - self.lengths[row]
            new = min(self.random.choice([0, 1, 1, 1, 5, 12]), room)
            computed.append(self.lengths[row])
            news.append(new)
            self.lengths[row] += new
            missing = -(-self.lengths[row] // self.block_size) - len(self.rows[row])
            if missing > 0:
                ids = [self.random.randrange(2**31 - 1) for _ in range(missing)]
                self.rows[row] = [*self.rows[row], *ids]
                grown.append(row)
                blocks.append(ids)
        buffers.append_blocks(grown, blocks)
        return {
            "query_lens": news,
            "num_computed_tokens": computed,
            "rows": None if in_order else own,
            "own": own,
        }


@given(
    seed=st.integers(0, 10**6),
    block_size=st.sampled_from([1, 3, 16]),
    in_order=st.booleans(),
    padded=st.booleans(),
)
def test_every_step_equals_one_built_from_nothing(
    seed: int,
    block_size: int,
    in_order: bool,
    padded: bool,
    twin: Twin,
    reference: Twin,
    device: torch.device,
) -> None:
    """Requests come, grow and leave; each step is compared with one made of plain lists."""
    buffers = twin.StepBuffers(MAX_REQS, MAX_TOKENS, MAX_BLOCKS, block_size, device)
    traffic = Traffic(seed, block_size)
    for _ in range(6):
        plan = traffic.step(buffers, in_order)
        own = plan.pop("own")
        num_reqs, num_tokens = len(own), sum(plan["query_lens"])
        reqs = MAX_REQS if padded else num_reqs
        tokens = MAX_TOKENS if padded else num_tokens
        sizes = {"num_reqs_padded": reqs, "num_tokens_padded": tokens} if padded else {}
        step = buffers.build(**plan, **sizes)
        rows = [traffic.rows[row] for row in own] + [[]] * (reqs - num_reqs)
        spare = [0] * (reqs - num_reqs)
        alone = reference.build_common_attn_metadata(
            plan["query_lens"] + spare,
            plan["num_computed_tokens"] + spare,
            rows,
            block_size,
        )
        for field in fields(CommonAttentionMetadata):
            found, expected = (getattr(each, field.name) for each in (step, alone))
            if field.name == "block_table_tensor":
                for req, row in enumerate(rows):
                    assert found[req, : len(row)].tolist() == row
            elif field.name == "slot_mapping":
                assert found[:num_tokens].cpu().equal(expected)
                assert found[num_tokens:].tolist() == [PAD_SLOT_ID] * (
                    tokens - num_tokens
                )
            elif isinstance(expected, torch.Tensor):
                assert found.dtype == expected.dtype, field.name
                assert found.cpu().equal(expected), field.name
                here = "cpu" if field.name.endswith("_cpu") else device.type
                assert found.device.type == here, field.name
            else:
                assert found == expected and type(found) is type(expected), field.name


def test_the_tensors_stay_where_they_are(twin: Twin, device: torch.device) -> None:
    """A captured graph reads the addresses of the step it was captured with."""
    buffers = twin.StepBuffers(2, 8, 4, 16, device)
    buffers.append_blocks([0, 1], [[3], [5]])
    names = ("query_start_loc", "seq_lens", "slot_mapping", "block_table_tensor")

    def places(step: CommonAttentionMetadata) -> list[int]:
        return [getattr(step, name).data_ptr() for name in names]

    for rows in (None, [0], [1]):
        first = buffers.build([1], [0], rows=rows)
        at = places(first)
        again = buffers.build([4], [1], rows=rows)
        assert places(again) == at
        assert first.seq_lens.tolist() == [5]


def test_what_lies_on_the_host_belongs_to_its_step(
    twin: Twin, device: torch.device
) -> None:
    """The scheduler may look at an earlier step while the next ones are on their way."""
    buffers = twin.StepBuffers(1, 8, 4, 16, device)
    buffers.append_blocks([0], [[3]])
    steps = [buffers.build([1], [old]) for old in range(5)]
    for old, step in enumerate(steps):
        assert step.seq_lens_cpu.tolist() == [old + 1]
        assert step.num_computed_tokens_cpu.tolist() == [old]
        assert step.query_start_loc_cpu.tolist() == [0, 1]


def test_a_row_can_be_given_to_another_request(
    twin: Twin, device: torch.device
) -> None:
    """Also when the first one's blocks were not sent yet."""
    buffers = twin.StepBuffers(1, 8, 3, 4, device)
    buffers.append_blocks([0], [[3, 8, 9]])
    buffers.clear_rows([0])
    buffers.append_blocks([0], [[6]])
    step = buffers.build([2], [1])
    assert step.slot_mapping.tolist() == [25, 26]
    assert step.block_table_tensor[0, 0].item() == 6


def test_more_new_blocks_than_the_step_itself_needs_arrive_too(
    twin: Twin, device: torch.device
) -> None:
    """A request that found its prefix in the cache brings more blocks than new tokens."""
    buffers = twin.StepBuffers(2, 4, 500, 4, device)
    ids = list(range(7, 507))
    buffers.append_blocks([1, 0], [ids, [1]])
    step = buffers.build([1, 1], [0, 1999])
    assert step.block_table_tensor[1].tolist() == ids
    assert step.slot_mapping.tolist() == [4, 506 * 4 + 3]


REFUSED = {
    "a row twice": (("append_blocks", [0, 0], [[1], [1]]), "expected each row once"),
    "a row that is not there": (
        ("append_blocks", [2], [[1]]),
        r"rows\[0\] = 2: expected",
    ),
    "a row to clear that is not there": (("clear_rows", [-1]), r"rows\[0\] = -1: exp"),
    "blocks without a row": (("append_blocks", [0], []), "new_blocks has 0 lists"),
    "a block below 0": (("append_blocks", [0], [[-2]]), "row 0 gets block -2"),
    "too many blocks": (
        ("append_blocks", [0], [[1, 2]]),
        "row 0 holds 1 blocks and gets 2",
    ),
    "counts of two lengths": (("build", [1], [0, 0]), "query_lens has 1 entries"),
    "a negative count": (
        ("build", [-1], [0]),
        r"query_lens\[0\] = -1: expected at least 0",
    ),
    "too many requests": (("build", [1] * 3, [0] * 3), "num_reqs_padded = 3 for 3"),
    "too many tokens": (
        ("build", [9], [0]),
        "num_tokens_padded = 9 for 9: expected 9 to 8",
    ),
    "a graph too small": (("build", [1], [0], None, 0), "num_reqs_padded = 0 for 1"),
    "a sequence too long": (
        ("build", [1], [4]),
        "request 0 has 4 . 1 tokens but its row",
    ),
    "an unknown row": (
        ("build", [1], [0], [7]),
        r"rows\[0\] = 7: expected 0 <= row < 2",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_step_that_does_not_fit_is_refused(name: str, twin: Twin) -> None:
    """And the buffers are as they were."""
    (method, *arguments), words = REFUSED[name]
    buffers = twin.raw.StepBuffers(2, 8, 2, 4)
    buffers.append_blocks([0], [[3]])
    with pytest.raises((ValueError, IndexError), match=words):
        getattr(buffers, method)(*arguments)
    assert buffers.build([2], [1]).slot_mapping.tolist() == [13, 14]


def test_buffers_of_no_size_are_refused(twin: Twin) -> None:
    with pytest.raises(ValueError, match="max_num_reqs = 0: expected at least 1"):
        twin.raw.StepBuffers(0, 8, 2, 4)


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
    """Return what attention launches on, grids or whole calls; no kernel runs."""
    found: list[Any] = []

    def note(_plan: Any, _launcher: Any, grid: tuple[int, int, int], *_: Any) -> None:
        found.append(grid)

    monkeypatch.setattr(PortablePlan, "_start", note)
    monkeypatch.setattr(Sm90Plan, "launch_prefill", lambda *call: found.append(call))
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
            mode.from_tensor(each)
            for each in (step.block_table_tensor, step.query_start_loc, step.seq_lens)
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


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs pinned memory")
def test_a_pinned_buffer_is_not_filled_before_its_copy_has_run() -> None:
    """The copies wait behind a long kernel; each step must still send its own numbers."""
    from pagetwin.optimized.batch.step_buffers import StepBuffers

    device = torch.device("cuda")
    buffers = StepBuffers(1, 8, 4, 16, device)
    buffers.append_blocks([0], [[3]])
    buffers.build([1], [0])
    seen = []
    torch.cuda._sleep(100_000_000)
    for old in range(8):
        seen.append(buffers.build([1], [old]).seq_lens.clone())
    assert [each.item() for each in seen] == [old + 1 for old in range(8)]
