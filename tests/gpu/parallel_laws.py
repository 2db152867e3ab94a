"""What must hold on several GPUs: results of the oracle, bits of one rank, captured steps.

Every batch is made for the number of ranks of the group. Whatever the ranks compare, they compare
on all of them, or at the end of a law, so that no rank leaves out a collective that others make.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from pagetwin.conformance.candidates.calls.calling import expect_right
from pagetwin.conformance.candidates.candidate import load_candidate
from pagetwin.conformance.candidates.setting import Setting
from pagetwin.conformance.laws import parallel_step, prefill_parallel, tensor_parallel
from pagetwin.conformance.laws.dcp_attention import Dealt
from pagetwin.conformance.laws.parallel_step import Shared, bits, whole_call
from pagetwin.conformance.laws.prefill_parallel import Prompts
from pagetwin.conformance.running.trial import make_setting
from pagetwin.contract.parallel import KeySplits
from pagetwin.engine.rank_group import GRACE_S, RankError, RankGroup
from pagetwin.optimized import release_workspace
from pagetwin.optimized.runtime.workspace import find_workspace
from parallel_job import DEVICE, Job, captured
from torch import Tensor

STEPS = [
    (1, "plain", torch.bfloat16, "all_to_all", 0, 0),
    (2, "sinks", torch.bfloat16, "all_to_all", 0, 0),
    (16, "plain", torch.bfloat16, "reduce_scatter", 0, 0),
    (2, "sinks", torch.bfloat16, "reduce_scatter", 0, 0),
    (2, "plain", torch.float32, "reduce_scatter", 0, 0),
    (4, "values", torch.bfloat16, "all_to_all", 8, 1),
    (2, "fp8", torch.bfloat16, "all_to_all", 4, 2),
]
"""Interleave size, option, dtype, exchange, fixed splits per rank, and positions per run."""
LONG = 9000 if DEVICE == "cuda" else 90
"""Keys of a sequence. The interpreter needs minutes for thousands of them."""
SAME_BITS = [
    Dealt((2, 1), (37, LONG), 1, 1, "plain", (20, LONG // 2), dtype=torch.bfloat16, seed=3),
    Dealt((1, 0, 1), (40, 3, 5), 1, 1, "sinks", (-1, 0, 4), dtype=torch.bfloat16, seed=3),
]  # fmt: skip
PROMPTS = [
    Prompts((300, 7), 2, "plain", (150, 4), dtype=torch.bfloat16),
    Prompts((37, 5), 2, "invariant", (20, 4), dtype=torch.bfloat16),
]

RINGS = [
    Prompts((300, 7, 1), 2, "plain", (150, 4, 0), dtype=torch.bfloat16,
            operation="RingContextParallel"),
    Prompts((37, 530), 2, "sinks", (20, 400), dtype=torch.bfloat16,
            operation="RingContextParallel"),
    Prompts((64, 5), 2, "cap", (20, 4), operation="RingContextParallel"),
]  # fmt: skip


def heads_for(world_size: int, at_least: int) -> int:
    """Return the smallest number of heads that divides among the ranks, from a number on."""
    return -(-at_least // world_size) * world_size


def steps_of(world_size: int) -> list[Shared]:
    """Return the batches of STEPS on some ranks."""
    found = []
    for seed, (in_a_row, kind, dtype, exchange, splits, run) in enumerate(STEPS):
        dealt = Dealt(
            (1, 2, 0, 1), (37, 20, 3, 1), world_size, in_a_row, kind, (36, 0, -1, 0),
            group=heads_for(world_size, 4), dtype=dtype, padding=1, seed=seed,
        )  # fmt: skip
        fixed = (splits * world_size, run) if splits else None
        found.append(Shared(dealt, exchange, fixed))
    return found


def setting_of(name: str) -> Setting:
    """Return a twin on this rank's device."""
    return make_setting(load_candidate(name), DEVICE)


def joined(job: Job, ranks: RankGroup, parts: tuple[Tensor, ...]) -> list[Any]:
    """Return the tensors of all ranks, on the host."""
    mine = tuple(part.cpu() for part in parts)
    return [mine] if ranks.world_size == 1 else job.gathered(mine)


def rows_of_a_step(
    job: Job, name: str, shared: Shared, ranks: RankGroup
) -> tuple[Tensor, Tensor]:
    """Return rows and log-sum-exps of all ranks' heads, on the host."""
    setting = setting_of(name)
    whole = whole_call(shared.dealt, setting.device)
    found = parallel_step.run_rank(setting, shared, whole, ranks)
    parts = joined(job, ranks, (found.out, found.lse))
    return torch.cat([out for out, _ in parts], dim=1), torch.cat(
        [lse for _, lse in parts]
    )


def hold_step(job: Job, name: str, ranks: RankGroup) -> int:
    """Compare the parallel step with the oracle."""
    setting = setting_of(name)
    steps = steps_of(ranks.world_size)
    for shared in steps:
        whole = whole_call(shared.dealt, setting.device)
        out, lse = rows_of_a_step(job, name, shared, ranks)
        expect_right(setting, whole, (out.to(DEVICE), lse.to(DEVICE)), is_joined=True)
    return len(steps)


def hold_bits(job: Job, name: str, ranks: RankGroup) -> int:
    """Compare the bits of fixed splits on all ranks with those on one."""
    count, world_size = 0, ranks.world_size
    splits = (8 * world_size, 1)
    for case in SAME_BITS:
        dealt = replace(case, group=heads_for(world_size, 8))
        one = rows_of_a_step(job, name, Shared(dealt, splits=splits), job.alone)
        for in_a_row in (1, 4):
            many = replace(dealt, ranks=world_size, in_a_row=in_a_row)
            found = rows_of_a_step(job, name, Shared(many, splits=splits), ranks)
            same = [
                torch.equal(bits(a), bits(b)) for a, b in zip(one, found, strict=True)
            ]
            assert all(same), (name, dealt, in_a_row, same)
            count += 1
    return count


def hold_prefill(job: Job, name: str, ranks: RankGroup) -> int:
    """Compare prefills with the oracle, and invariant ones with the bits of one rank."""
    setting = setting_of(name)
    for prompts in PROMPTS:
        call = prompts.call(setting.device)
        mine = prefill_parallel.run_rank(setting, prompts, call, ranks)
        found = prefill_parallel.in_order(joined(job, ranks, mine))
        out, lse = (tensor.to(DEVICE) for tensor in found)
        expect_right(setting, call, (out, lse))
        if prompts.kind == "invariant":
            right, right_lse = torch.empty_like(out), torch.empty_like(lse)
            setting.candidate.paged_attention(**call.keywords, out=right, lse=right_lse)
            assert torch.equal(bits(out), bits(right)), (name, prompts)
            assert torch.equal(bits(lse), bits(right_lse)), (name, prompts)
    return len(PROMPTS)


def hold_ring(job: Job, name: str, ranks: RankGroup) -> int:
    """Compare prefills of a ring with the oracle, and two runs of each bit by bit."""
    setting = setting_of(name)
    for prompts in RINGS:
        call = prompts.call(setting.device)
        seen = []
        for _ in range(2):
            mine = prefill_parallel.run_rank(setting, prompts, call, ranks)
            seen.append(prefill_parallel.in_order(joined(job, ranks, mine)))
        out, lse = (tensor.to(DEVICE) for tensor in seen[0])
        expect_right(setting, call, (out, lse), is_joined=True)
        for first, second in zip(*seen, strict=True):
            assert torch.equal(bits(first), bits(second)), (name, prompts)
    return len(RINGS)


def hold_heads(job: Job, name: str, ranks: RankGroup) -> int:
    """Compare heads and keys on several ranks with the oracle."""
    setting = setting_of(name)
    cases = tensor_parallel.BOTH[:2]
    for original, tp_world_size in cases:
        every = tp_world_size // original.ranks * ranks.world_size
        group_size = every // tensor_parallel.KV_HEADS
        dealt = replace(original, ranks=ranks.world_size, group=group_size)
        case = dealt, every
        rows, lses = [], []
        for group in tensor_parallel.groups_of(setting, case):
            mine = tensor_parallel.run_rank(setting, case, group, ranks)
            for out, lse in joined(job, ranks, mine):
                rows.append(out.to(DEVICE))
                lses.append(lse.to(DEVICE))
        whole = whole_call(dealt, setting.device)
        found = torch.cat(rows, dim=1), torch.cat(lses)
        expect_right(setting, whole, found, is_joined=True)
    return len(cases)


class Stepping:
    """Decode steps of two requests on a rank, in tensors that stay where they are."""

    def __init__(
        self, ranks: RankGroup, exchange: str, splits: KeySplits | None
    ) -> None:
        make = torch.Generator().manual_seed(7)

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=make).to(torch.bfloat16).to(DEVICE)

        self.every = 2 * heads_for(ranks.world_size, 4)
        heads = self.every // ranks.world_size
        self.own = slice(ranks.rank * heads, (ranks.rank + 1) * heads)
        self.tokens = [randn(2, self.every + 2 + 2, 64) for _ in range(4)]
        self.caches = randn(8, 16, 2, 64), randn(8, 16, 2, 64)
        self.table = torch.arange(8, dtype=torch.int32, device=DEVICE).view(2, 4)
        self.starts = torch.arange(3, dtype=torch.int32, device=DEVICE)
        self.lens = torch.tensor([37, 60], dtype=torch.int32, device=DEVICE)
        self.token = torch.zeros_like(self.tokens[0])
        self.out = torch.zeros(2, heads, 64, dtype=torch.bfloat16, device=DEVICE)
        self.step = load_candidate("optimized").DecodeContextParallel(
            ranks, heads, 64, 2, 4, exchange, splits, dtype=torch.bfloat16,
            device=DEVICE,
        )  # fmt: skip

    def attend(self) -> None:
        """Write the tokens and attend."""
        batch = self.step.prepare(
            self.caches[0], self.table, self.starts, self.lens, 2, 64
        )
        query, key, value = torch.split(self.token, [self.every, 2, 2], dim=1)
        self.step.write(key, value, *self.caches, batch)
        self.step.attend(query[:, self.own], *self.caches, batch, out=self.out)

    def run(self, attend: Callable[[], None]) -> list[Tensor]:
        """Return the rows of some steps, then the cache."""
        found = []
        for token in self.tokens:
            self.token.copy_(token)
            self.lens += 1
            attend()
            found.append(self.out.clone())
        return [*found, *self.caches]


def hold_captured(job: Job, name: str, ranks: RankGroup) -> int:
    """Compare the replays of a captured step with steps that are not captured."""
    if DEVICE == "cpu" or name == "reference":
        return 0
    ways: list[tuple[str, KeySplits | None]] = [
        ("all_to_all", None), ("reduce_scatter", None),
        ("all_to_all", KeySplits(4 * ranks.world_size, 4)),
    ]  # fmt: skip
    differing = []
    for exchange, splits in ways:
        eager, graphed = (Stepping(ranks, exchange, splits) for _ in range(2))
        right = eager.run(eager.attend)
        lens = graphed.lens.clone()
        caches = [cache.clone() for cache in graphed.caches]
        replay = captured(graphed.attend)
        graphed.lens.copy_(lens)
        for cache, first in zip(graphed.caches, caches, strict=True):
            cache.copy_(first)
        for a, b in zip(graphed.run(replay), right, strict=True):
            if not torch.equal(bits(a), bits(b)):
                differing.append((exchange, splits))
    assert not differing, differing
    return len(ways)


class Prefilling:
    """Prefills of one length on a rank, in tensors that stay where they are."""

    def __init__(self, prefill: Any, length: int) -> None:
        make = torch.Generator().manual_seed(length)
        rows = torch.randn(length, 4 + 2 + 2, 64, generator=make)
        self.prefill, self.share = prefill, prefill.prepare([length])
        self.rows = rows.to(torch.bfloat16).to(DEVICE)[self.share.tokens]
        self.out = torch.zeros_like(self.rows[:, :4])

    def attend(self) -> None:
        """Attend to the prompt."""
        query, key, value = torch.split(self.rows, [4, 2, 2], dim=1)
        self.prefill.attend(query, key, value, self.share, out=self.out)


def hold_captured_prefills(job: Job, name: str, ranks: RankGroup) -> int:
    """Compare replays with prefills that are not captured, each after a larger prefill."""
    if DEVICE == "cpu" or name == "reference":
        return 0
    operations = ("PrefillContextParallel", "RingContextParallel")
    differing = []
    for operation in operations:
        prefill = getattr(load_candidate(name), operation)(ranks, device=DEVICE)
        short, long = Prefilling(prefill, 300), Prefilling(prefill, 2000)
        short.attend()
        right = short.out.clone()
        replay = captured(short.attend)
        long.attend()
        short.out.zero_()
        replay()
        if not torch.equal(bits(short.out), bits(right)):
            differing.append(operation)
    assert not differing, differing
    return len(operations)


HELD = {
    "step": (hold_step, "agree with the oracle"),
    "bits": (hold_bits, "have the bits of one rank"),
    "prefill": (hold_prefill, "prefills agree with the oracle and with one rank"),
    "ring": (hold_ring, "prefills of a ring agree with the oracle"),
    "heads": (hold_heads, "heads and keys on ranks agree with the oracle"),
    "captured": (hold_captured, "captured steps have the bits of eager ones"),
    "captured prefills": (
        hold_captured_prefills,
        "captured prefills have the bits of eager ones",
    ),
}


class RanksApart(Exception):
    """A law failed on some ranks only, which may have left out collectives of the others."""


def hold_all(job: Job, name: str, way: str, laws: str) -> None:
    """Make some comparisons of a twin through one group; say which do not hold.

    Args:
        laws: Keys of HELD, with commas. If empty, all.

    Raises:
        RanksApart: No further collective of this group can be trusted.
    """
    for law, (hold, what) in HELD.items():
        if laws and law not in laws.split(","):
            continue
        job.announce(f"law: {name} {way} {law}")
        try:
            count = hold(job, name, job.groups[way])
            job.groups[way].wait()
            answer = f"{count} batches: {what}"
        except Exception as error:
            answer = f"FAILED: {what}: {type(error).__name__}: {str(error)[:400]}"
        failed = [line for line in job.gathered(answer) if "FAILED" in line]
        # of all ranks, the one that failed
        job.say(f"law: {name} {way} {law}", failed[0] if failed else answer)
        is_apart = any(RankError.__name__ in line for line in failed)
        if failed and (is_apart or len(failed) < job.groups[way].world_size):
            raise RanksApart(f"the ranks are apart since {law!r}; nothing else is run")


def lose_a_rank(ranks: RankGroup, limit_s: float) -> str:
    """Make steps until the last rank has ended; return how this rank has found out."""
    stepping = Stepping(ranks, "all_to_all", None)
    stepping.attend()
    ranks.wait()
    if ranks.rank == ranks.world_size - 1:
        return ""
    return found_out(ranks, limit_s, stepping.attend)


def leave_out_a_step(ranks: RankGroup, limit_s: float) -> str:
    """Make a step that the last rank leaves out; return how this rank has found out.

    The others allocate a workspace meanwhile.
    """
    stepping = Stepping(ranks, "all_to_all", None)
    for _ in range(2):
        stepping.attend()
        ranks.wait()

    def attend() -> None:
        release_workspace()
        stepping.attend()
        find_workspace(torch.device(DEVICE), 1, 1)

    others = range(ranks.world_size - 1)
    if ranks.rank in others:
        answer = found_out(ranks, limit_s, attend)
        ranks.store.set(f"rank {ranks.rank} has found out", "")
        return answer
    # through the store, because the group is unusable
    ranks.store.wait([f"rank {rank} has found out" for rank in others])
    return ""


def found_out(ranks: RankGroup, limit_s: float, call: Callable[[], None]) -> str:
    """Return how a rank finds out that the last one does not take part in a call."""
    ranks.timeout = limit_s
    begin = time.monotonic()
    try:
        call()
        ranks.wait()
    except RankError as error:
        seconds = time.monotonic() - begin
        is_right = error.missing == (ranks.world_size - 1,)
        is_in_time = seconds < limit_s + GRACE_S + 1
        word = "" if is_right and is_in_time else "FAILED: "
        return (
            f"{word}RankError after {seconds:.1f} s, missing {error.missing}: {error}"
        )
    return f"FAILED: no error after {time.monotonic() - begin:.1f} s"


FAULTS = {"ended": lose_a_rank, "absent": leave_out_a_step}
