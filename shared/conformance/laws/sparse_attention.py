"""Laws of sparse attention: each query attends to the slots that its row names, and to no others.

Slots that no row names hold NaN. The expected result is attention over the named keys, one by one
in float64.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from ...contract.attention_options import AttentionOptions, pack_options
from ..base.support import Support
from ..candidates.candidate import BATCH_INVARIANT
from ..candidates.setting import Setting
from ..cases.batches import NAN, empty_cache
from ..cases.latent_batches import name_of
from ..checks.canaries import kept
from ..checks.expect import Disagreement, budgets, expect_rejection, expect_same
from ..oracles.brute_force import (
    Answer,
    OracleRequest,
    attend_by_hand,
    judge_log_sum_exp,
    judge_out,
)
from .law import law

CONVERT, ATTEND = "convert_req_index_to_global_index", "sparse_attention"


@dataclass(frozen=True)
class Selection:
    """Positions that tokens select, in sequences whose blocks are anywhere.

    Args:
        tokens, selected: Rows and columns.
        reqs, max_blocks, block_size: Sizes of the block table.
        ranks, interleave: Of decode context parallelism.
        padding: Whether some tokens are padding.
    """

    tokens: int
    selected: int
    reqs: int = 3
    max_blocks: int = 4
    block_size: int = 4
    ranks: int = 1
    interleave: int = 1
    padding: bool = True
    seed: int = 0


SELECTIONS = [
    Selection(7, 9),
    Selection(5, 12, block_size=2, ranks=2, interleave=2, seed=1),
    Selection(4, 33, block_size=1, max_blocks=9, ranks=3, seed=2),
    Selection(3, 5, max_blocks=0, seed=3),
    Selection(0, 4, seed=4),
    Selection(2, 0, seed=5),
    Selection(300, 2, reqs=1, block_size=64, padding=False, seed=6),
]


@law(CONVERT, cases=SELECTIONS)
def a_selected_position_has_the_slot_that_its_row_says(
    setting: Setting, case: Selection
) -> None:
    """On the rank that stores it; -1 for negative positions, and for those past the table."""
    pick, size = Random(case.seed), case.block_size
    table = [
        [pick.randrange(1000) for _ in range(case.max_blocks)] for _ in range(case.reqs)
    ]
    reach = case.max_blocks * size
    edges = [-1, -7, 0, reach * case.ranks - 1, reach * case.ranks, reach, 2**31 - 1]
    rows = [
        [
            pick.choice([*edges, pick.randint(0, reach * case.ranks + 2)])
            for _ in range(case.selected)
        ]
        for _ in range(case.tokens)
    ]
    owners = [pick.randrange(-case.padding, case.reqs) for _ in range(case.tokens)]
    given = (
        torch.tensor(owners, dtype=torch.int32).view(case.tokens),
        torch.tensor(table, dtype=torch.int32).view(case.reqs, case.max_blocks),
        torch.tensor(rows, dtype=torch.int32).view(case.tokens, case.selected),
    )
    req_id, block_table, positions = (tensor.to(setting.device) for tensor in given)
    # the columns of a wider table: what follows a row is another row
    wide = torch.full((case.reqs, case.max_blocks + 1), 2**20, dtype=torch.int32)
    wide = wide.to(setting.device)
    wide[:, :-1] = block_table
    for rank in range(case.ranks):
        # the position in what the rank stores, one position of the sequence after the other
        turns = range(reach * case.ranks)
        own = [p for p in turns if p // case.interleave % case.ranks == rank]
        local = {position: number for number, position in enumerate(own[:reach])}
        slots = [
            [
                table[owner][local[p] // size] * size + local[p] % size
                if owner >= 0 and p in local
                else -1
                for p in row
            ]
            for owner, row in zip(owners, rows, strict=True)
        ]
        for compact in (False, True):
            right = slots
            if compact:
                named = [[slot for slot in row if slot >= 0] for row in slots]
                right = [row + [-1] * (case.selected - len(row)) for row in named]
            found, count = getattr(setting.candidate, CONVERT)(
                req_id, wide[:, :-1], positions, size, case.ranks, rank,
                case.interleave, compact,
            )  # fmt: skip
            expected = torch.tensor(right, dtype=torch.int32)
            expect_same("slots", found.cpu(), expected.view(positions.shape))
            lens = [sum(slot >= 0 for slot in row) for row in slots]
            expect_same("counts", count.cpu(), torch.tensor(lens, dtype=torch.int32))


@law(CONVERT, cases=["request", "block id", "last block id"], claim="rejects contents")
def a_selection_without_a_row_or_a_block_is_rejected(
    setting: Setting, what: str
) -> None:
    """A block id past which slots have more than 32 bits, too. Entries that are not read pass."""
    owner = 2 if what == "request" else 1
    wrong = {"request": 0, "block id": -1, "last block id": (2**31 - 1) // 4}[what]
    table = torch.tensor([[5, -9], [wrong, -9]], dtype=torch.int32)
    given = (
        torch.tensor([0, owner], dtype=torch.int32).to(setting.device),
        table.to(setting.device),
        torch.tensor([[3, -1], [0, -1]], dtype=torch.int32).to(setting.device),
    )
    convert = getattr(setting.candidate, CONVERT)
    expect_rejection(f"a wrong {what}", lambda: convert(*given, 4))
    # the first token alone is right
    slots, _ = convert(given[0][:1], given[1], given[2][:1], 4)
    expect_same("slots of the first token", slots.tolist(), [[23, -1]])


@dataclass(frozen=True)
class SparsePlan:
    """A call of sparse attention in small numbers.

    Args:
        lens: Slots that each token names.
        spare: Entries of -1 in each row, anywhere.
        value_size: Optional. If given, values are the first elements of the keys, as in latents.
        repeats: Whether each token names its first slot twice.
        needle: Whether token 0 names a key that outweighs all others; the others do not.
        options: Names of options.
    """

    lens: tuple[int, ...]
    spare: int = 2
    num_blocks: int = 9
    block_size: int = 4
    kv_heads: int = 2
    group: int = 2
    head_size: int = 16
    value_size: int | None = None
    dtype: torch.dtype = torch.float32
    layout: str = "separate"
    repeats: bool = False
    needle: bool = True
    options: tuple[str, ...] = ()
    seed: int = 0

    def within(self, support: Support) -> "SparsePlan":
        """Return the nearest plan inside of the declared support.

        Where only latents have a supported value size, the values are the first elements of the
        keys of one head.
        """

        def nearest(value: Any, taken: Collection[Any] | None) -> Any:
            ordered = list(taken or [value])
            return value if value in ordered else ordered[self.seed % len(ordered)]

        dtypes = [
            dtype
            for dtype in (torch.float32, torch.float16, torch.bfloat16)
            if support.dtypes is None or name_of(dtype) in support.dtypes
        ]
        caches = support.cache_dtypes
        names = {"fp8": "k_scale"}
        options = tuple(
            name
            for name in self.options
            if not support.why_not_options({names.get(name, name): 1.0})
            and (name != "fp8" or caches is None or "float8_e4m3fn" in caches)
        )
        head_size = nearest(self.head_size, support.head_sizes)
        kv_heads, group, value_size = self.kv_heads, self.group, self.value_size
        if head_size != self.head_size or (
            value_size is not None
            and support.why_not_options({"value_head_size": value_size})
        ):
            sizes = [size for size in _value_sizes(support) if size < head_size]
            value_size = sizes[self.seed % len(sizes)] if sizes else None
            if value_size is not None:
                kv_heads, group = 1, kv_heads * group
        block_size = nearest(self.block_size, support.block_sizes)
        return replace(
            self,
            dtype=nearest(self.dtype, dtypes),
            num_blocks=-(-self.num_blocks * self.block_size // block_size),
            block_size=block_size,
            kv_heads=kv_heads,
            group=nearest(group, support.group_sizes),
            head_size=head_size,
            value_size=value_size,
            options=options,
        )


def _value_sizes(support: Support) -> list[int]:
    """Return the sizes of values that are declared by number."""
    options = support.options
    named = options.get("value_head_size") if isinstance(options, Mapping) else None
    return [size for size in named or () if isinstance(size, int)]


PLANS = [
    SparsePlan((5, 0, 1, 20)),
    SparsePlan((17, 3), layout="interleaved hnd", repeats=True, options=("sinks",),
               dtype=torch.float16, seed=1),
    SparsePlan((4, 35, 2), kv_heads=1, group=8, head_size=24, value_size=16,
               options=("batch_invariant",), seed=2),
    SparsePlan((9, 2), layout="padded", options=("fp8", "logits_soft_cap"), seed=3),
    SparsePlan((30, 1, 0), layout="hnd", options=("batch_invariant", "sinks"), spare=0,
               seed=4),
    SparsePlan((3, 2), num_blocks=20, block_size=1, dtype=torch.bfloat16, spare=40, seed=5),
    SparsePlan((6,), num_blocks=1, block_size=32, layout="every other element", seed=6),
    SparsePlan((0, 0), needle=False, seed=7),
    SparsePlan((), needle=False, seed=8),
    SparsePlan((70, 300), num_blocks=100, block_size=16, kv_heads=1, head_size=576,
               value_size=512, dtype=torch.bfloat16, seed=9),
    SparsePlan((129, 0, 1, 64), num_blocks=3, block_size=64, kv_heads=1, group=8,
               head_size=576, value_size=512, dtype=torch.bfloat16, repeats=True, seed=10),
    SparsePlan((33, 0, 5), num_blocks=2, block_size=64, kv_heads=1, group=11,
               head_size=576, value_size=512, dtype=torch.bfloat16, spare=130,
               options=("sinks",), seed=11),
]  # fmt: skip
"""Heads and latents, layouts, rows of any length, options."""


@dataclass(frozen=True)
class SparseCall:
    """The tensors of a plan.

    Args:
        rows: The slots that each token names, on the host.
        slots: [tokens, selected] those with entries of -1 among them.
        options: Options by name.
    """

    plan: SparsePlan
    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    rows: list[list[int]]
    slots: Tensor
    options: dict[str, Any]

    @property
    def value_size(self) -> int:
        """Elements of a value."""
        return self.value_cache.shape[-1]

    def run(self, operation: Any, **changes: Any) -> tuple[Tensor, Tensor]:
        """Return an operation's output and log-sum-exp, which are full of NaN before."""
        size = (*self.query.shape[:2], self.value_size)
        out = self.query.new_full(size, NAN)
        lse = torch.full((size[1], size[0]), NAN, device=out.device)
        given = {
            name: getattr(self, name)
            for name in ("query", "key_cache", "value_cache", "slots")
        }
        given |= {"out": out, "lse": lse, **self.options, **changes}
        found = operation(**pack_options(**given))
        if found is not given["out"]:
            raise Disagreement("output", "as a whole", "another tensor", "out")
        return given["out"], given["lse"]

    def answer(self) -> Answer:
        """Return the exact result."""
        key, value = (
            cache.flatten(0, 1).cpu().double()
            for cache in (self.key_cache, self.value_cache)
        )
        query = self.query.cpu()
        requests = [
            OracleRequest(query[token : token + 1], key[row], value[row])
            for token, row in enumerate(self.rows)
        ]
        given = self.options | {"causal": False}
        return attend_by_hand(requests, given, len(self.rows))


def draw_rows(plan: SparsePlan) -> tuple[list[list[int]], Tensor, int]:
    """Return the slots that tokens name, their rows with -1 among them, and the needle's slot."""
    pick, tokens = Random(plan.seed), len(plan.lens)
    size = plan.num_blocks * plan.block_size
    order = pick.sample(range(size), size)
    # the needle is the first slot of the order, and no other token names it
    rows = [order[:1] * (number == 0 and plan.needle) for number in range(tokens)]
    for row, length in zip(rows, plan.lens, strict=True):
        row += pick.sample(order[1:], length - len(row))
        pick.shuffle(row)
    if plan.repeats:
        rows = [row + row[:1] for row in rows]
    width = max(map(len, rows), default=0) + plan.spare
    slots = torch.full((tokens, width), -1, dtype=torch.int32)
    for token, row in enumerate(rows):
        columns = sorted(pick.sample(range(width), len(row)))
        slots[token, columns] = torch.tensor(row, dtype=torch.int32)
    return rows, slots, order[0]


def build_sparse(plan: SparsePlan, device: torch.device) -> SparseCall:
    """Return the tensors of a plan. Slots that no token names hold NaN."""
    generator = torch.Generator().manual_seed(plan.seed)
    rows, slots, needle = draw_rows(plan)
    heads, named = plan.kv_heads, sorted({slot for row in rows for slot in row})
    tokens = len(plan.lens)
    query = torch.randn(tokens, heads * plan.group, plan.head_size, generator=generator)
    query = query.to(plan.dtype)
    numbers = torch.randn(2, len(named), heads, plan.head_size, generator=generator)
    if plan.needle:
        numbers[0, named.index(needle)] = 4 * query[0, :: plan.group].float()
    options: dict[str, Any] = {
        name: True for name in plan.options if name == "batch_invariant"
    }
    if "sinks" in plan.options:
        # numbers that a kernel may take in bfloat16
        sinks = torch.randn(query.shape[1], generator=generator).bfloat16().float()
        options["sinks"] = sinks.to(device)
    if "logits_soft_cap" in plan.options:
        options["logits_soft_cap"] = 20.0
    dtype = plan.dtype
    if "fp8" in plan.options:
        options |= {"k_scale": 0.25, "v_scale": 0.5}
        dtype = torch.float8_e4m3fn
    sizes = (plan.num_blocks, plan.block_size, heads, plan.head_size)
    caches = empty_cache(plan.layout, *sizes, torch.float32, device).to(dtype)
    places = torch.tensor(named, dtype=torch.int64, device=device)
    blocks, offsets = places // plan.block_size, places % plan.block_size
    for cache, own in zip(caches, numbers.to(device), strict=True):
        cache[blocks, offsets] = own.to(dtype)
    key_cache, value_cache = caches
    if plan.value_size is not None:
        value_cache = key_cache[..., : plan.value_size]
    return SparseCall(
        plan, query.to(device), key_cache, value_cache, rows, slots.to(device), options
    )


def expect_sparse(
    setting: Setting, call: SparseCall, found: tuple[Tensor, Tensor]
) -> None:
    """Raise a Disagreement if a row exceeds its error budget."""
    out, lse = found
    answer, dtype = call.answer(), call.plan.dtype
    if not call.rows:
        return
    same, _ = call.run(getattr(setting.truth, ATTEND), compute_dtype=dtype)
    verdict = judge_out(out, answer, same, dtype)
    if not verdict.ok:
        row = verdict.row
        raise Disagreement(
            "output",
            f"of token {row}{budgets(verdict.worst)}",
            out[row].flatten()[:4].tolist(),
            answer.out[row].flatten()[:4].tolist(),
        )
    share = judge_log_sum_exp(lse, answer)
    if share > 1:
        raise Disagreement(
            "log-sum-exp", f"{budgets(share, 'a')}", lse.tolist(), answer.lse.tolist()
        )


@law(ATTEND, cases=PLANS)
def a_query_attends_to_the_slots_that_its_row_names(
    setting: Setting, plan: SparsePlan
) -> None:
    """In any order, with -1 anywhere; a slot that is named twice is two keys."""
    call = build_sparse(plan, setting.device)
    read = {"query": call.query, "key_cache": call.key_cache, "slots": call.slots}
    with kept(**read):
        found = call.run(getattr(setting.candidate, ATTEND))
    expect_sparse(setting, call, found)


INVARIANT = [
    replace(plan, options=(*plan.options, "batch_invariant"))
    for plan in (
        PLANS[0],
        SparsePlan((12, 5), kv_heads=1, group=3, head_size=24, value_size=16, seed=3),
        SparsePlan(
            (40, 17, 3), num_blocks=20, dtype=torch.float16, options=("sinks",), seed=4
        ),
    )
]


@law(ATTEND, cases=INVARIANT, claim=BATCH_INVARIANT)
def a_row_of_slots_has_the_same_bits_in_any_batch(
    setting: Setting, plan: SparsePlan
) -> None:
    """With other tokens, other entries of -1, and its keys in other blocks of another size.

    So chunks of a prompt, keys that an earlier request has written, and drafts change no bit.
    """
    call = build_sparse(plan, setting.device)
    operation = getattr(setting.candidate, ATTEND)
    out, lse = call.run(operation)
    pick = Random(plan.seed)
    order = pick.sample(range(len(call.rows)), len(call.rows) - 1)
    size, unit = plan.num_blocks * plan.block_size, plan.block_size + 1
    places = pick.sample(range((plan.num_blocks + 3) * unit), size)
    moved = []
    for cache in (call.key_cache, call.value_cache):
        other = cache.new_full((plan.num_blocks + 3, unit, *cache.shape[2:]), NAN)
        other.view(-1, *cache.shape[2:])[places] = cache.flatten(0, 1)
        moved.append(other)
    width = max(map(len, call.rows)) + 9
    slots = torch.full((len(order), width), -1, dtype=torch.int32)
    for token, own in enumerate(order):
        row = [places[slot] for slot in call.rows[own]]
        columns = sorted(pick.sample(range(width), len(row)))
        slots[token, columns] = torch.tensor(row, dtype=torch.int32)
    part = replace(
        call, query=call.query[order], key_cache=moved[0], value_cache=moved[1],
        slots=slots.to(setting.device),
    )  # fmt: skip
    part_out, part_lse = part.run(operation)
    expect_same("output elsewhere", part_out.cpu(), out[order].cpu())
    expect_same("log-sum-exp elsewhere", part_lse.cpu(), lse[:, order].cpu())


@law(
    ATTEND, CONVERT, "paged_attention",
    cases=[(1, 16), (4, 3), (5, 1)],
    claim=BATCH_INVARIANT,
)  # fmt: skip
def a_token_that_selects_all_keys_has_the_bits_of_dense_attention(
    setting: Setting, case: tuple[int, int]
) -> None:
    """If its row has the order of positions. The requests have several tokens, all causal."""
    new, block_size = case
    lens = [23, new]
    max_blocks = -(-lens[0] // block_size)
    generator = torch.Generator().manual_seed(new)
    order = torch.randperm(2 * max_blocks, generator=generator).int()
    table = order.view(2, max_blocks).to(setting.device)
    sizes = (2 * max_blocks, block_size, 2, 16)
    caches = torch.randn(2, *sizes, generator=generator).to(setting.device)
    query = torch.randn(2 * new, 4, 16, generator=generator).to(setting.device)
    options = AttentionOptions(batch_invariant=True)
    starts = torch.tensor([0, new, 2 * new], dtype=torch.int32, device=setting.device)
    dense_lse = torch.empty(4, 2 * new, device=setting.device)
    dense = setting.candidate.paged_attention(
        query, *caches, table, starts,
        torch.tensor(lens, dtype=torch.int32, device=setting.device), new, lens[0],
        lse=dense_lse, options=options,
    )  # fmt: skip
    ends = [length - new + token + 1 for length in lens for token in range(new)]
    positions = torch.tensor(
        [[p if p < end else -1 for p in range(lens[0])] for end in ends],
        dtype=torch.int32,
    )
    owners = torch.arange(2, dtype=torch.int32).repeat_interleave(new)
    owners = owners.to(setting.device)
    slots, _ = getattr(setting.candidate, CONVERT)(
        owners, table, positions.to(setting.device), block_size
    )
    lse = torch.empty_like(dense_lse)
    found = getattr(setting.candidate, ATTEND)(
        query,
        *caches,
        slots,
        lse=lse,
        options=options,
        req_id=owners,
        block_table=table,
    )
    expect_same("output", found.cpu(), dense.cpu())
    expect_same("log-sum-exp", lse.cpu(), dense_lse.cpu())


@law(ATTEND, cases=PLANS[:1])
def sparse_attention_writes_its_output_alone(
    setting: Setting, plan: SparsePlan
) -> None:
    call = build_sparse(plan, setting.device)
    (tokens, heads), size = call.query.shape[:2], call.value_cache.shape[3]
    wide = torch.full((tokens + 2, 2 * heads, size + 3), 7.0, device=setting.device)
    tall = torch.full((heads + 1, 2 * tokens), 7.0, device=setting.device)
    out, lse = wide[1:-1, ::2, 1:-2], tall[1:, ::2]
    found = call.run(getattr(setting.candidate, ATTEND), out=out, lse=lse)
    expect_sparse(setting, call, found)
    out.fill_(7.0)
    lse.fill_(7.0)
    expect_same("around the output", wide.cpu(), torch.full(wide.shape, 7.0))
    expect_same("around the log-sum-exp", tall.cpu(), torch.full(tall.shape, 7.0))


BAD_SLOTS = {
    "a slot past the cache": 36,
    "another negative number": -2,
    "a slot of another request": 12,
    "the first slot of a page-aligned table": 20,
}
"""Blocks 1 and 2 of 4 slots belong to the request, so slots 4 to 11 do."""


@law(ATTEND, cases=sorted(BAD_SLOTS), claim="rejects contents")
def a_slot_that_is_not_of_the_request_is_rejected(setting: Setting, what: str) -> None:
    call = build_sparse(PLANS[0], setting.device)
    table = torch.tensor([[1, 2], [3, 0]], dtype=torch.int32, device=setting.device)
    owners = torch.tensor([0, 1], dtype=torch.int32, device=setting.device)
    slots = torch.tensor([[4, -1, 11], [3, 12, -1]], dtype=torch.int32)
    slots = slots.to(setting.device)
    part = replace(call, query=call.query[:2], slots=slots)
    given = {"req_id": owners, "block_table": table}
    operation = getattr(setting.candidate, ATTEND)
    part.run(operation, **given)
    slots[0, 1] = BAD_SLOTS[what]
    expect_rejection(what, lambda: part.run(operation, **given))
    owners[0] = -1
    slots[0] = torch.tensor([-1, -1, 4], dtype=torch.int32, device=setting.device)
    expect_rejection("a slot of padding", lambda: part.run(operation, **given))


BAD_CALLS: dict[str, dict[str, Any]] = {
    "a row too few": {"slots": (3, 7)},
    "slots of one axis": {"slots": (4,)},
    "a request without a table": {"req_id": (4,)},
    "a table without requests": {"block_table": (2, 2)},
    "causal": {"causal": True},
    "a window": {"sliding_window": 3},
    "slots in 64 bits": {"slots": torch.zeros(4, 7, dtype=torch.int64)},
    "an output of integers": {"out": torch.int32},
    "a log-sum-exp of 16 bits": {"lse": torch.float16},
    "queries as output": {},
}


@law(ATTEND, cases=sorted(BAD_CALLS), claim="rejects shapes")
def impossible_calls_of_sparse_attention_are_rejected(
    setting: Setting, what: str
) -> None:
    call = build_sparse(PLANS[0], setting.device)
    changes = {
        name: torch.zeros(value, dtype=torch.int32) if type(value) is tuple else value
        for name, value in BAD_CALLS[what].items()
    }
    changes = {
        name: value.to(setting.device) if isinstance(value, Tensor) else value
        for name, value in changes.items()
    }
    shape = call.query.shape
    out = torch.full(shape, 7.0, device=setting.device)
    out = (
        call.query
        if what == "queries as output"
        else out.to(changes.pop("out", call.query.dtype))
    )
    lse = torch.full((shape[1], shape[0]), 7.0, device=setting.device)
    lse = lse.to(changes.pop("lse", torch.float32))
    operation = getattr(setting.candidate, ATTEND)
    expect_rejection(
        what,
        lambda: call.run(operation, out=out, lse=lse, **changes),
        {"the output": out, "the log-sum-exp": lse},
    )
