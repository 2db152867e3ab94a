"""Latent attention of the vLLM plugin on ranks that share each sequence's latents: gloo processes.

As vLLM does, the tests gather the query heads of all ranks before a decode, and combine the results
of the ranks by their log-sum-exp afterwards, here in float64.
"""

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pagetwin.conformance.oracles.brute_force import (
    OracleRequest,
    attend_by_hand,
    judge_out,
    quantise_by_hand,
)
from pagetwin.engine.rank_group import RankGroup
from pagetwin.integrations.vllm.warm_up import StepBounds
from support.fake_vllm import VERSIONS, FakeGroup, fake_vllm, recorded
from support.rank_processes import RankProcesses
from support.vllm_steps import BLOCK_SIZE, MAX_BLOCKS, NUM_BLOCKS, vllm_config
from torch import Tensor
from vllm_errors import errors, inside

NEWEST = VERSIONS[-1]
RANK, ROPE, HEADS, SCALE = 32, 16, 4, 0.2
STEPS = [(1, 1, 1), (3, 1, 2), (1, 1, 1), (2, 2, 2)]
"""New tokens of each request. Before them the sequences have 40, 1 and no latents."""


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    """Return four processes for all tests of this file."""
    found = RankProcesses(tmp_path_factory.mktemp("ranks"), 4)
    yield found
    found.close()


def make_layer(kv_cache_dtype: str = "auto") -> Any:
    """Return a layer of the stand-in that is installed."""
    from pagetwin.integrations.vllm.latent import PagetwinLatentImpl

    sizes = dict(q_lora_rank=None, kv_lora_rank=RANK, qk_nope_head_dim=24)
    sizes |= dict(qk_rope_head_dim=ROPE, qk_head_dim=40, v_head_dim=24, kv_b_proj=None)
    impl = PagetwinLatentImpl(
        HEADS, RANK + ROPE, SCALE, 1, None, None, kv_cache_dtype, None, "decoder", None,
        **sizes,
    )  # fmt: skip
    # the constructor of the stand-in keeps its arguments alone; that of 0.25 to 0.27 sets this too
    impl.scale, impl.dcp_world_size = SCALE, -1
    return impl


class LatentSteps:
    """A layer of one rank, which draws the latents and the queries of all ranks."""

    def __init__(self, ranks: RankGroup, group: FakeGroup, fp8: bool) -> None:
        self.ranks, self.group, self.fp8 = ranks, group, fp8
        self.impl = make_layer("fp8" if fp8 else "auto")
        self.layer = SimpleNamespace(_k_scale=torch.tensor(0.5))
        self.random = torch.Generator().manual_seed(4)
        blocks = torch.randperm(NUM_BLOCKS, generator=self.random)
        self.table = blocks[: 3 * MAX_BLOCKS].view(3, -1).int()
        self.latents = [torch.zeros(0, RANK + ROPE) for _ in range(3)]
        shape = (NUM_BLOCKS, BLOCK_SIZE, RANK + ROPE)
        self.cache = (
            torch.full(shape, 0x7F, dtype=torch.uint8)
            if fp8
            else torch.full(shape, torch.nan)
        )

    def owns(self, positions: Tensor) -> Tensor:
        """Return whether this rank stores each position."""
        found = positions // self.group.interleave_size % self.group.world_size
        return found == self.group.rank_in_group

    def write(self, lens: Sequence[int]) -> None:
        """Append latents to the sequences, and write those of this rank."""
        for req, count in enumerate(lens):
            new = torch.randn(count, RANK + ROPE, generator=self.random)
            first = len(self.latents[req])
            self.latents[req] = torch.cat([self.latents[req], new])
            positions = torch.arange(first, first + count)
            before = torch.tensor(
                [int(self.owns(torch.arange(n)).sum()) for n in positions.tolist()],
                dtype=torch.int64,
            )
            blocks = self.table[req].long()[before // BLOCK_SIZE]
            slots = blocks * BLOCK_SIZE + before % BLOCK_SIZE
            self.impl.do_kv_cache_update(
                new[:, :RANK],
                new[:, None, RANK:],
                self.cache,
                torch.where(self.owns(positions), slots, -1),
                "fp8" if self.fp8 else "auto",
                self.layer._k_scale,
            )

    def decode(self, lens: Sequence[int]) -> float:
        """Return the error of a step, divided by its budget."""
        self.write(lens)
        tokens, world = sum(lens), self.group.world_size
        shape = (tokens, world * HEADS, RANK + ROPE)
        query = torch.randn(shape, generator=self.random)
        first = self.group.rank_in_group * HEADS
        own = slice(first, first + HEADS)
        gathered = self.ranks.all_gather(query[:, own].contiguous())
        out, lse = self.run_layer(gathered.transpose(0, 1).flatten(1, 2), lens)
        assert out.shape == (tokens, world * HEADS, RANK)
        assert lse.shape == (tokens, world * HEADS) and lse.is_contiguous()
        outs, lses = self.ranks.all_gather(out).double(), self.ranks.all_gather(lse)
        weights = lses.double().softmax(0).nan_to_num()[..., None]
        return self.judge(query[:, own], lens, (weights * outs).sum(0)[:, own].float())

    def run_layer(self, query: Tensor, lens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return rows and log-sum-exps over this rank's latents, as vLLM calls the layer.

        Args:
            query: [tokens, heads of all ranks, RANK + ROPE].
            lens: new tokens of each request.
        """
        totals = [len(latents) for latents in self.latents]
        local = [int(self.owns(torch.arange(total)).sum()) for total in totals]
        metadata = SimpleNamespace(
            query_start_loc=torch.tensor([0, *lens]).cumsum(0).int(),
            max_seq_len=MAX_BLOCKS * BLOCK_SIZE,
            decode=SimpleNamespace(
                block_table=self.table,
                seq_lens=torch.tensor(local, dtype=torch.int32),
                dcp_tot_seq_lens=torch.tensor(totals, dtype=torch.int32),
                max_query_len=max(lens),
            ),
        )
        cache = self.cache.view(torch.float8_e4m3fn) if self.fp8 else self.cache
        out, lse = self.impl.forward_mqa(query, cache, metadata, self.layer)
        assert lse is not None
        return out, lse

    def judge(self, query: Tensor, lens: Sequence[int], out: Tensor) -> float:
        """Return the error of an output, divided by its budget."""
        stored = [latents[:, None] for latents in self.latents]
        options: dict[str, Any] = {"causal": True, "scale": SCALE}
        if self.fp8:
            stored = [quantise_by_hand(x, 0.5, torch.float8_e4m3fn) for x in stored]
            options |= {"k_scale": 0.5, "v_scale": 0.5}
        parts = query.split(list(lens))
        requests = [
            OracleRequest(part, keys, keys[..., :RANK])
            for part, keys in zip(parts, stored, strict=True)
        ]
        answer = attend_by_hand(requests, options, len(query))
        verdict = judge_out(out, answer, answer.out.float(), torch.float32)
        return verdict.worst if verdict.finite else float("inf")


def serve(
    ranks: RankGroup, version: str, implementation: str, run: int, fp8: bool
) -> list[float]:
    """Return the error of each step on a rank."""

    def work(group: FakeGroup) -> list[float]:
        steps = LatentSteps(ranks, group, fp8)
        steps.write((40, 1, 0))
        return [steps.decode(lens) for lens in STEPS]

    found: list[float] = inside(ranks, version, work, implementation, run)
    return found


@pytest.mark.extended
@pytest.mark.parametrize(
    ("version", "implementation"),
    [(NEWEST, "reference"), *((version, "optimized") for version in VERSIONS)],
)
def test_latents_on_two_ranks_are_attention_over_all_of_them_in_each_version(
    processes: RankProcesses, version: str, implementation: str
) -> None:
    """One and several new tokens per request; some ranks have no latent of a request."""
    found = errors(processes.run(2, serve, version, implementation, 1, False))
    assert len(found) == 2 * len(STEPS)
    assert max(found) <= 1


@pytest.mark.extended
@pytest.mark.parametrize(
    ("ranks", "run", "fp8"), [(4, 1, False), (4, 2, True), (2, 16, True)]
)
def test_latents_of_more_ranks_interleave_sizes_and_fp8_are_exact(
    processes: RankProcesses, ranks: int, run: int, fp8: bool
) -> None:
    found = errors(processes.run(ranks, serve, NEWEST, "optimized", run, fp8))
    assert max(found) <= 1


@pytest.mark.sample(2)
@pytest.mark.parametrize("version", VERSIONS)
def test_vllm_finds_what_it_requires_of_latent_layers_for_such_ranks(
    version: str,
) -> None:
    modules = recorded(version)["modules"]
    latent = modules["vllm.model_executor.layers.attention.mla_attention"]["classes"]
    known = modules["vllm.v1.attention.backend"]["classes"]["AttentionImplBase"]
    assert "dcp_tot_seq_lens" in latent["MLACommonDecodeMetadata"]["attributes"]
    with fake_vllm(version, use_mla=True, group=FakeGroup(None, 2)):
        from pagetwin.integrations.vllm.plugin import choose_backend

        impl = make_layer()
        for name in (
            "can_return_lse_for_decode",
            "supports_mtp_with_cp_non_trivial_interleave_size",
        ):
            assert name in known["attributes"]
            assert getattr(type(impl), name) is True
        # since 0.26 alone
        assert type(impl).supports_dcp is True
        config = vllm_config({"layer": SimpleNamespace(impl=impl)})
        device = torch.device("cpu")
        builder = choose_backend().get_builder_cls()(None, ["layer"], config, device)
        # drafts stay decodes
        assert builder.supports_dcp_with_varlen is True


def test_kernels_of_a_decode_are_compiled_with_the_heads_of_all_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import pagetwin.optimized

    specs: list[Any] = []
    monkeypatch.setattr(
        pagetwin.optimized, "warm_up", lambda spec: specs.append(spec) or ("kernel",)
    )
    group = FakeGroup(None, 2)
    with fake_vllm(NEWEST, use_mla=True, group=group):
        steps = LatentSteps(RankGroup(), group, False)
        steps.impl.bounds = StepBounds(4, 48, 96, 3)
        steps.write((40, 1, 2))
        query = torch.randn(3, 2 * HEADS, RANK + ROPE)
        out, lse = steps.run_layer(query, (1, 1, 1))
    (spec,) = specs
    assert spec.num_query_heads == 2 * HEADS
    assert (spec.max_num_reqs, spec.max_query_len, spec.max_seq_len) == (12, 1, 96)
    assert spec.lse == (True,) and spec.options[0].causal is False
    # the first rank stores position 0 of each sequence
    assert out.isfinite().all() and lse.isfinite().all()


@pytest.mark.parametrize("version", [VERSIONS[0], NEWEST])
def test_latent_layers_are_rejected_with_prefill_context_parallelism(
    version: str,
) -> None:
    with fake_vllm(version, use_mla=True, group=FakeGroup(None, 2)):
        from pagetwin.integrations.vllm.latent import PagetwinLatentImpl

        PagetwinLatentImpl.pcp_world_size = 2
        with pytest.raises(NotImplementedError, match="pcp_world_size = 2: expected 1"):
            make_layer()


def test_an_implementation_without_dcp_attention_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with fake_vllm(NEWEST, use_mla=True, group=FakeGroup(None, 2)):
        from pagetwin.integrations.vllm import latent

        run = latent.load_plugin_implementation()
        others = {name: run.operations[name] for name in ("paged_attention",)}
        alone = SimpleNamespace(name="alone", operations=others)
        monkeypatch.setattr(latent, "load_plugin_implementation", lambda: alone)
        with pytest.raises(NotImplementedError, match="it has no dcp_attention"):
            make_layer()
