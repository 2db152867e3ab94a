"""The vLLM plugin on ranks that share each sequence's keys: gloo processes with a stand-in."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pagetwin.engine.rank_group import RankGroup
from pagetwin.integrations.vllm.caches import count_blocks, find_new_blocks
from pagetwin.integrations.vllm.warm_up import StepBounds
from pagetwin.reference import paged_attention
from pagetwin.reference.parallel import decode
from support.fake_vllm import VERSIONS, FakeGroup, fake_vllm, recorded
from support.plugin_engine import PluginEngine, draw_requests
from support.rank_processes import RankProcesses
from support.vllm_steps import BLOCK_SIZE, EngineSteps
from torch import Tensor
from vllm_errors import errors, inside

OLDEST, NEWEST = VERSIONS[0], VERSIONS[-1]
MIXED = [(20, 3, 1), (1, 1, 17), (1, 4, 1), (1, 1, 1), (3, 3, 3), (33, 0, 1)]
"""Prompts, chunks of prompts, decodes and drafts. Some ranks have no key of the third request."""


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    """Return four processes for all tests of this file."""
    found = RankProcesses(tmp_path_factory.mktemp("ranks"), 4)
    yield found
    found.close()


class RankSteps(EngineSteps):
    """The layer of one rank, whose block table has a block per `ranks * block_size` positions.

    Every rank draws the same keys and the queries of all ranks, and takes its own heads.
    """

    def __init__(self, version: str, group: FakeGroup, **given: Any) -> None:
        self.group = group
        super().__init__(version, **{"heads": 4, "kv_heads": 1} | given)

    def _rows(self, heads: int, count: int) -> Tensor:
        if heads != self.heads:
            return super()._rows(heads, count)
        every = super()._rows(heads * self.group.world_size, count)
        return every.chunk(self.group.world_size, 1)[self.group.rank_in_group]

    def slots(self, req: int, first: int, last: int) -> Tensor:
        ranks, run = self.group.world_size, self.group.interleave_size
        positions = torch.arange(first, last)
        blocks = self.block_table[req, positions // (BLOCK_SIZE * ranks)].long()
        within = positions % (BLOCK_SIZE * ranks)
        slots = blocks * BLOCK_SIZE + within // (run * ranks) * run + within % run
        is_own = within // run % ranks == self.group.rank_in_group
        return torch.where(is_own, slots, -1)


def serve(
    ranks: RankGroup, version: str, implementation: str, run: int, given: Any
) -> list[float]:
    """Return the error of each step on a rank, divided by its budget."""
    given = dict(given)
    if "sinks" in given:
        given["sinks"] = given["sinks"].chunk(ranks.world_size)[ranks.rank]

    def work(group: FakeGroup) -> list[float]:
        steps = RankSteps(version, group, **given)
        return [steps.step(lens) for lens in MIXED]

    found: list[float] = inside(ranks, version, work, implementation, run)
    return found


@pytest.mark.extended
@pytest.mark.parametrize(
    ("version", "implementation"),
    [(NEWEST, "reference"), *((version, "optimized") for version in VERSIONS)],
)
def test_two_ranks_compute_what_one_computes_in_each_version(
    processes: RankProcesses, version: str, implementation: str
) -> None:
    found = errors(processes.run(2, serve, version, implementation, 1, {}))
    assert len(found) == 2 * len(MIXED)
    assert max(found) <= 1


@pytest.mark.extended
@pytest.mark.parametrize(
    ("ranks", "run", "given"),
    [
        (2, 4, {}),
        (2, 16, {"dtype": torch.float16}),
        (4, 1, {"heads": 1}),
        (4, 8, {"heads": 1, "head_size": 72}),
        (2, 1, {"logits_soft_cap": 2.0}),
        (2, 2, {"sinks": torch.linspace(-1, 2, 8)}),
        (2, 1, {"kv_cache_dtype": "fp8"}),
        (2, 2, {"kv_cache_dtype": "fp8_e5m2", "dtype": torch.float16}),
        (2, 1, {"kv_cache_dtype": "int8_per_token_head"}),
        (2, 4, {"kv_cache_dtype": "fp8_per_token_head", "dtype": torch.float16}),
        (2, 2, {"kv_cache_dtype": "int4_per_token_head"}),
        (2, 1, {"kv_cache_dtype": "int4_per_token_head_vllm", "head_size": 72}),
        (2, 2, {"kv_cache_dtype": "nvfp4", "head_size": 80}),
    ],
    ids=str,
)
def test_interleave_sizes_ranks_and_options_are_exact(
    processes: RankProcesses, ranks: int, run: int, given: Any
) -> None:
    found = errors(processes.run(ranks, serve, NEWEST, "optimized", run, given))
    assert max(found) <= 1


def not_causal(ranks: RankGroup) -> list[float]:
    """Return the errors of steps of which one is not causal, as of drafts."""

    def work(group: FakeGroup) -> list[float]:
        steps = RankSteps(NEWEST, group)
        found = [steps.step((9, 18, 2)), steps.step((3, 2, 1), False)]
        with pytest.raises(NotImplementedError, match="causal is a tensor"):
            steps.step((1, 1, 1), torch.tensor([True, False, True]))
        return found

    found: list[float] = inside(ranks, NEWEST, work)
    return found


@pytest.mark.extended
def test_a_step_that_is_not_causal_is_exact(processes: RankProcesses) -> None:
    assert max(errors(processes.run(2, not_causal))) <= 1


def count_calls(ranks: RankGroup, given: Any) -> list[Any]:
    """Return error, reads of keys per call, and collectives of three chunks and a decode."""

    def work(group: FakeGroup) -> list[Any]:
        steps, found = RankSteps(NEWEST, group, **given), []
        # the layer's group is made and compared
        steps.impl.shared.allocate(steps._rows(4, 1), steps._rows(4, 1))
        for lens in ((40, 1, 2), (40, 1, 2), (0, 40, 1), (1, 1, 1)):
            reads, collectives = [], []

            def attend(*tensors: Any, _reads: Any = reads, **named: Any) -> Tensor:
                _reads.append(int(tensors[5].sum()))
                return paged_attention(*tensors, **named)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(decode, "paged_attention", attend)
                for name in ("all_gather", "all_to_all"):
                    patch.setattr(RankGroup, name, counted(name, collectives))
                # contents are not compared, as in an engine
                patch.setattr(decode, "agree_on_batch", lambda *given: None)
                error = steps.step(lens, padding=0)
            found.append((error, reads, collectives))
        return found

    found: list[Any] = inside(ranks, NEWEST, work, "reference")
    return found


def counted(name: str, calls: list[str]) -> Callable[..., Tensor]:
    """Return a collective that notes its calls."""
    run = getattr(RankGroup, name)

    def call(self: RankGroup, *given: Any) -> Tensor:
        calls.append(name)
        found: Tensor = run(self, *given)
        return found

    return call


@pytest.mark.extended
@pytest.mark.parametrize(
    "given", [{}, {"kv_cache_dtype": "fp8"}], ids=["float32", "fp8"]
)
def test_a_chunk_reads_the_earlier_keys_of_a_rank_once(
    processes: RankProcesses, given: Any
) -> None:
    """Not once per new token, and with the collectives of a decode."""
    both = processes.run(2, count_calls, given)
    for rank, found in enumerate(both):
        assert not isinstance(found, Exception), found
        assert max(error for error, _, _ in found) <= 1
        assert all(
            collectives == ["all_gather", "all_to_all"] for _, _, collectives in found
        )
        earlier = [(0, 0, 0), (40, 1, 2), (80, 2, 4)]
        shares = [sum((length + 1 - rank) // 2 for length in lens) for lens in earlier]
        decode_reads = sum((length + 1 - rank) // 2 for length in (81, 43, 6))
        assert [reads for _, reads, _ in found] == [
            *([reads] for reads in shares),
            [decode_reads],
        ]


@pytest.mark.parametrize("lens", [(20, 3), (16, 0, 1), (1, 15, 33, 16), (48,), (0, 0)])
def test_new_keys_of_requests_have_blocks_of_their_own(lens: tuple[int, ...]) -> None:
    starts = torch.tensor([0, *lens]).cumsum(0).int()
    tokens = int(starts[-1]) + 2
    metadata = SimpleNamespace(
        query_start_loc=starts, num_actual_tokens=tokens, max_query_len=max(lens)
    )
    found = find_new_blocks(metadata)
    assert found.lens.tolist() == list(lens)
    slots = [
        int(found.block_table[req, index // 16]) * 16 + index % 16
        for req, count in enumerate(lens)
        for index in range(count)
    ]
    assert found.slot_mapping.tolist() == [*slots, -1, -1]
    assert len(set(slots)) == len(slots)
    assert max(slots, default=0) < 16 * count_blocks(int(starts[-1]), len(lens))


def warm_up(ranks: RankGroup) -> list[Any]:
    """Return what holds of a layer that is warmed up, and the collectives of its warm-up."""

    def work(group: FakeGroup) -> list[Any]:
        steps, collectives = RankSteps(NEWEST, group, head_size=16), []
        assert steps.step((20, 3, 1)) <= 1
        before = steps.cache.clone()
        steps.impl.bounds = StepBounds(2, 20, 40, 2)
        query = steps._rows(4, 2)
        with pytest.MonkeyPatch.context() as patch:
            for name in ("all_gather", "all_to_all"):
                patch.setattr(RankGroup, name, counted(name, collectives))
            for cache in (torch.empty(0), steps.cache):
                out = torch.empty_like(query)
                steps.impl.forward(steps.layer, query, None, None, cache, None, out)
        assert steps.impl.bounds is None
        assert torch.equal(steps.cache.nan_to_num(7), before.nan_to_num(7))
        return [steps.step((1, 20, 1)) <= 1, steps.step((1, 1, 1)) <= 1, *collectives]

    found: list[Any] = inside(ranks, NEWEST, work)
    return found


@pytest.mark.extended
def test_a_warm_up_exchanges_nothing_and_changes_no_slot(
    processes: RankProcesses,
) -> None:
    assert errors(processes.run(2, warm_up)) == [True] * 4


def two_layers(ranks: RankGroup) -> list[bool]:
    """Return what holds of two layers of one kind, and of their steps."""

    def work(group: FakeGroup) -> list[bool]:
        one, other = RankSteps(NEWEST, group), RankSteps(NEWEST, group)
        query = one._rows(4, 2)
        # vLLM measures memory: there are neither caches nor metadata
        for steps in (one, other):
            out = torch.full_like(query, torch.nan)
            steps.impl.forward(steps.layer, query, None, None, one.cache[:0], None, out)
            assert bool((out == 0).all())
        holds = [one.impl.shared.kind is other.impl.shared.kind]
        for steps in (one, other):
            assert steps.step((40, 3, 1)) <= 1
        common = one.common((1, 1, 1), True, 0)
        metadata = one.builder.build(0, common)
        holds.append(metadata.shared_batch is None)
        query = one._rows(4, 3)
        batches = []
        for steps, lens in ((one, None), (other, None), (one, (7, 3, 1))):
            for req, count in enumerate(lens or ()):
                # vLLM writes the lengths of the next step into the same tensors
                common.seq_lens[req] = count
                steps.keys[req] = steps.keys[req][:count]
                steps.values[req] = steps.values[req][:count]
            out = torch.full_like(query, torch.nan)
            steps.impl.forward(
                steps.layer, query, None, None, steps.cache, metadata, out
            )
            holds.append(steps.judge(query, (1, 1, 1), True, out) <= 1)
            batches.append(metadata.shared_batch)
        holds.append(batches[0] is batches[1] and batches[1] is not batches[2])
        # as a connector of caches does before vLLM allocates them
        group.interleave_size = 4
        config = one.impl.shared.config.parallel_config
        config.cp_kv_cache_interleave_size = 4
        before = one.impl.shared.kind
        again = one.impl.shared.allocate(query, out)
        holds.append(again is not before and again.interleave_size == 4)
        return holds

    found: list[bool] = inside(ranks, NEWEST, work)
    return found


def two_groups(ranks: RankGroup) -> list[float]:
    """Return the errors of a step of two groups of caches, which have other blocks."""

    def work(group: FakeGroup) -> list[float]:
        one, other = RankSteps(NEWEST, group), RankSteps(NEWEST, group)
        other.block_table = other.block_table.flip(0)
        found = [steps.step((33, 3, 9)) for steps in (one, other)]
        query, builder = one._rows(4, 3), one.builder
        metadata = builder.build(0, one.common((1, 1, 1), True, 0))
        for steps in (one, other, one):
            own = steps.common((1, 1, 1), True, 0)
            metadata = builder.update_block_table(
                metadata, own.block_table_tensor, own.slot_mapping
            )
            out = torch.full_like(query, torch.nan)
            steps.impl.forward(
                steps.layer, query, None, None, steps.cache, metadata, out
            )
            found.append(steps.judge(query, (1, 1, 1), True, out))
        return found

    found: list[float] = inside(ranks, NEWEST, work)
    return found


@pytest.mark.extended
def test_another_group_of_caches_has_its_own_share_of_the_ranks(
    processes: RankProcesses,
) -> None:
    """Its metadata are those of the first group with another block table."""
    assert max(errors(processes.run(2, two_groups))) <= 1


@pytest.mark.extended
def test_layers_of_one_kind_share_buffers_and_each_step_is_prepared_once(
    processes: RankProcesses,
) -> None:
    found = errors(processes.run(2, two_layers))
    assert found == [True] * 14


def history(
    ranks: RankGroup, implementation: str, run: int, kv_cache_dtype: str
) -> list[float]:
    """Return the errors of an engine with two groups of caches, before and after new weights."""

    def work(group: FakeGroup) -> list[float]:
        engine = PluginEngine(
            NEWEST, (None, None), kv_cache_dtype, num_blocks=4, ranks=group
        )
        engine.run(draw_requests(4, seed=1))
        found = [engine.worst]
        engine.load_scales(None, 0.02)
        engine.run(draw_requests(1, seed=2))
        assert engine.preemptions
        return [*found, engine.worst]

    found: list[float] = inside(ranks, NEWEST, work, implementation, run)
    return found


@pytest.mark.extended
@pytest.mark.parametrize(
    ("implementation", "run", "kv_cache_dtype"),
    [("reference", 1, "auto"), ("optimized", 4, "fp8")],
)
def test_each_group_of_caches_is_read_at_its_own_share_of_a_rank(
    processes: RankProcesses, implementation: str, run: int, kv_cache_dtype: str
) -> None:
    """vLLM builds the metadata of equal caches once, and gives the blocks of each group."""
    found = errors(processes.run(2, history, implementation, run, kv_cache_dtype))
    assert len(found) == 4 and max(found) <= 1


@pytest.mark.parametrize(
    ("given", "changes", "reason"),
    [
        ({"sliding_window": 9}, {}, "sliding_window = 9 with .* how far apart"),
        ({"alibi_slopes": [0.5] * 4}, {}, "alibi_slopes = .* how far apart"),
        ({"attn_type": "encoder_decoder"}, {}, "attn_type = .* stored whole"),
        ({}, {"use_ubatching": True}, "enable_dbo or ubatch_size with"),
    ],
    ids=str,
)
@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_what_ranks_with_a_share_cannot_compute_is_rejected_at_the_start(
    version: str, given: Any, changes: Any, reason: str
) -> None:
    group = FakeGroup(None, 2, **changes)
    with fake_vllm(version, group=group):
        with pytest.raises(NotImplementedError, match=reason) as raised:
            RankSteps(version, group, **given)
        assert "decode_context_parallel_size = 2: expected" in str(raised.value)
        assert str(raised.value).count(". ") == 0


def test_batch_invariance_is_rejected_at_the_start() -> None:
    group = FakeGroup(None, 2)
    with fake_vllm(NEWEST, group=group):
        import vllm.envs

        vllm.envs.VLLM_BATCH_INVARIANT = True
        with pytest.raises(NotImplementedError, match="VLLM_BATCH_INVARIANT = 1 with"):
            RankSteps(NEWEST, group)


def test_an_encoder_runs_on_each_rank_by_itself() -> None:
    """Its keys are in no cache, so any option is taken and nothing is exchanged."""
    group = FakeGroup(None, 2)
    with fake_vllm(NEWEST, group=group):
        for options in ({}, {"sliding_window": 4}):
            steps = RankSteps(NEWEST, group, attn_type="encoder_only", **options)
            assert steps.step((9, 20, 1), causal=False) <= 1


@pytest.mark.sample(3)
@pytest.mark.parametrize("version", VERSIONS)
def test_vllm_finds_what_it_requires_of_a_backend_for_such_ranks(version: str) -> None:
    attributes = recorded(version)["modules"]["vllm.v1.attention.backend"]["classes"]
    known = attributes["AttentionImplBase"]["attributes"]
    group = FakeGroup(None, 2)
    with fake_vllm(version, group=group):
        steps = RankSteps(version, group)
        for name in (
            "can_return_lse_for_decode",
            "supports_mtp_with_cp_non_trivial_interleave_size",
        ):
            assert name in known
            assert getattr(type(steps.impl), name) is True
        # since 0.26 alone
        assert type(steps.impl).supports_dcp is True
        assert not steps.impl.takes_cascade
        assert not steps.impl.fused_output_quant_supported(None)
