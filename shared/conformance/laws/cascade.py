"""Laws of cascade attention: a prefix that all requests share is read once.

The result is the same as if the prefix were read with every request. The expected result is
computed key by key, without a shared prefix. Needles are on both sides of the end of the prefix.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from ..candidates.calls.calling import (
    Result,
    expect_right,
    expect_same_results,
    run_call,
)
from ..candidates.setting import Setting
from ..cases.batches import DTYPES, LAYOUTS, NAN, BatchPlan
from ..cases.options import Call, paged_call, quantised_call, slopes, tree_of
from ..cases.rearranging import as_views
from ..cases.reuse import compiled
from ..cases.steps import several
from ..checks.canaries import kept
from ..checks.expect import expect_rejection, expect_same
from .law import law

KINDS = ("plain", "cap", "sinks", "not causal", "flags", "tree", "fp8", "values")


@dataclass(frozen=True)
class SharedPrefix:
    """The parameters of a batch whose requests begin with the same blocks.

    Args:
        prefix_blocks: number of blocks that all live requests begin with; it determines
            `common_prefix_len`.
        query_lens, own_lens: new tokens of each request, and keys that only it has, without those
            of its new tokens.
        kind: the option that is set, one of KINDS.
        needle: position of the key that outweighs all others, relative to the end of the prefix.
            Optional. If None, no key outweighs the others.
    """

    prefix_blocks: int
    query_lens: tuple[int, ...]
    own_lens: tuple[int, ...]
    kind: str = "plain"
    needle: int | None = None
    block_size: int = 16
    kv_heads: int = 1
    group: int = 2
    head_size: int = 16
    dtype: torch.dtype = torch.float32
    layout: str = "separate"
    padding: int = 0
    spare_max: int = 0
    seed: int = 0

    @property
    def prefix_len(self) -> int:
        return self.prefix_blocks * self.block_size

    def call(self, device: torch.device) -> Call:
        """Return attention over the whole sequences, which begin with the same blocks."""
        key_lens = tuple(
            own + query_len + (self.prefix_len if query_len or not req else 0)
            for req, (query_len, own) in enumerate(
                zip(self.query_lens, self.own_lens, strict=True)
            )
        )
        plan = BatchPlan(
            self.query_lens,
            key_lens,
            block_size=self.block_size,
            kv_heads=self.kv_heads,
            group=self.group,
            head_size=self.head_size,
            dtype=self.dtype,
            layout=self.layout,
            padding=self.padding,
            spare_max=self.spare_max,
            seed=self.seed,
        )
        plain = paged_call(plan, device)
        # step: let all live requests begin with the blocks of the first
        rows, table = [list(row) for row in plain.rows], plain.arguments["block_table"]
        for req, query_len in enumerate(self.query_lens):
            if query_len:
                rows[req][: self.prefix_blocks] = rows[0][: self.prefix_blocks]
                table[req, : self.prefix_blocks] = table[0, : self.prefix_blocks]
        call = replace(plain, rows=rows)
        # step: write the needle at its position in each live request
        if self.needle is not None:
            generator = torch.Generator().manual_seed(self.seed)
            lean = torch.randn(self.kv_heads, self.head_size, generator=generator)
            lean = torch.nn.functional.normalize(lean, dim=1).to(device)
            live = call.query[: sum(self.query_lens)]
            leaning = 0.25 * live.float() + 2 * lean.repeat_interleave(self.group, 0)
            live.copy_(leaning.to(self.dtype))
            positions: set[tuple[int, int]] = set()
            for row, query_len, key_len in zip(
                rows, self.query_lens, key_lens, strict=True
            ):
                if query_len:
                    position = min(max(self.prefix_len + self.needle, 0), key_len - 1)
                    block_id = row[position // self.block_size]
                    positions.add((block_id, position % self.block_size))
            for at in sorted(positions):
                far_out = 12 * self.head_size**0.5 * lean
                call.arguments["key_cache"][at] = far_out.to(self.dtype)
                call.arguments["value_cache"][at] += 3
        return self.with_option(call)

    def with_option(self, call: Call) -> Call:
        """Return the call with the option of this kind."""
        heads, reqs = self.kv_heads * self.group, len(self.query_lens)
        if self.kind == "fp8":
            return quantised_call(
                call, torch.float8_e4m3fn, 0.5, slopes(self.kv_heads, 0.1)
            )
        if self.kind == "sinks":  # near the largest log-sum-exp of each head
            level = call.answer().lse.amax(1) + slopes(heads, 2.0) - 1
            return call.changed(sinks=level.clamp(min=-9.0).float())
        if self.kind == "values" and self.head_size > 3:
            values = call.arguments["value_cache"][..., : self.head_size - 3]
            return call.changed(value_cache=values)
        tree = tree_of([None, 0, 0, 1, 2], 6).repeat(reqs, 1, 1)
        options: dict[str, dict[str, Any]] = {
            "cap": {"logits_soft_cap": 1.5},
            "not causal": {"causal": False},
            "flags": {"causal": torch.tensor([req % 2 == 0 for req in range(reqs)])},
            "tree": {"tree_mask": tree},
        }
        return call.changed(**options.get(self.kind, {}))


@st.composite
def shared_prefixes(draw: st.DrawFn) -> SharedPrefix:
    """Return a ragged batch of idle and live requests, drawn from one seed."""
    pick = Random(draw(st.integers(0, 2**20)))
    kernel = compiled(pick)
    block_size = kernel.choice([1, 3, 16, 16, 24])
    reqs = pick.randint(1, 4)
    kind = kernel.choice([*KINDS, "plain"])
    news = [0, 1, 1, 1, 2, 5, 17] if kind != "tree" else [1, 2, 5]
    owns = [0, 0, 1, block_size - 1, block_size, 33]
    return SharedPrefix(
        prefix_blocks=pick.choice([0, 1, 1, 2, 3]),
        query_lens=tuple(pick.choice(news) for _ in range(reqs)),
        own_lens=tuple(pick.choice(owns) for _ in range(reqs)),
        kind=kind,
        needle=pick.choice([None, None, None, -100, -1, 0, 1, 15]),
        block_size=block_size,
        kv_heads=kernel.choice([1, 2]),
        group=kernel.choice([1, 2, 5]),
        head_size=kernel.choice([8, 16, 24]),
        dtype=kernel.choice(DTYPES),
        layout=kernel.choice(LAYOUTS),
        padding=pick.choice([0, 2]),
        spare_max=pick.choice([0, 7]),
        seed=pick.randrange(2**16),
    )


def cascade(call: Call, prefix_len: int) -> Call:
    """Return the call as cascade attention, which reads the prefix once."""
    call = call.changed(common_prefix_len=prefix_len)
    return replace(call, operation="cascade_attention")


def run_cascade(setting: Setting, call: Call, prefix_len: int) -> Result:
    return run_call(setting, cascade(call, prefix_len))


@law("cascade_attention", cases=shared_prefixes())
def cascade_attention_equals_attention_of_each_request_over_all_its_keys(
    setting: Setting, shared: SharedPrefix
) -> None:
    call = shared.call(setting.device)
    found = run_cascade(setting, call, shared.prefix_len)
    expect_right(setting, call, found, is_joined=True)


NEEDLES = [
    SharedPrefix(
        2, (3, 1, 20), (14, 15, 14), needle=needle, dtype=dtype, seed=needle + 40
    )
    for needle in (-32, -17, -16, -1, 0, 1, 13, 14, 15, 16)
    for dtype in DTYPES
    if dtype == torch.float32 or needle in (-1, 0)
]
NEEDLES.append(SharedPrefix(2, (3, 1), (6, 3), kind="fp8"))
# several requests with few keys of their own, with one query tile and with several
NEEDLES += [
    SharedPrefix(2, (1,) * 4, (6, 3, 9, 1), kind=kind, kv_heads=2)
    for kind in ("sinks", "fp8")
]
NEEDLES.append(SharedPrefix(1, (17, 5, 1), (20, 7, 9), kv_heads=2, group=5))
# and few requests, whose own keys are several tiles
NEEDLES.append(SharedPrefix(4, (1, 3), (60, 62), needle=55))


@law("cascade_attention", cases=NEEDLES)
def no_key_is_lost_at_the_end_of_the_prefix(
    setting: Setting, shared: SharedPrefix
) -> None:
    """No key is counted in both parts, or visible to new tokens at earlier positions."""
    call = shared.call(setting.device)
    found = run_cascade(setting, call, shared.prefix_len)
    expect_right(setting, call, found, is_joined=True)


@law("cascade_attention", cases=shared_prefixes())
def a_shorter_common_prefix_gives_the_same_result(
    setting: Setting, shared: SharedPrefix
) -> None:
    """Any part of the shared prefix may be read once, including none of it."""
    call = shared.call(setting.device)
    answer = call.answer()
    for blocks in {shared.prefix_blocks // 2, 0}:
        found = run_cascade(setting, call, blocks * shared.block_size)
        expect_right(setting, call, found, answer, is_joined=True)


@law(
    "cascade_attention",
    cases=[
        SharedPrefix(0, (3, 1, 0), (6, 20, 3), kind=kind, needle=needle)
        for kind in KINDS
        for needle in (None, 5)
    ],
)
def a_cascade_without_a_prefix_is_attention(
    setting: Setting, shared: SharedPrefix
) -> None:
    """Causal, not causal, or per request."""
    call = shared.call(setting.device)
    expect_right(setting, call, run_cascade(setting, call, 0), is_joined=True)


TWO = SharedPrefix(2, (3, 1), (6, 3), kv_heads=2, padding=1)


@law("cascade_attention", cases=[replace(TWO, kind=kind) for kind in KINDS])
def lengths_and_flags_of_a_cascade_may_be_views_with_any_strides(
    setting: Setting, shared: SharedPrefix
) -> None:
    """Views are starts, lengths, block tables, flags, trees and sinks."""
    call = shared.call(setting.device)
    names = (
        "query_start_loc",
        "seq_lens",
        "block_table",
        "causal",
        "tree_mask",
        "sinks",
    )
    views = as_views(call, [name for name in names if name in call.arguments])
    found = run_cascade(setting, views, shared.prefix_len)
    expect_right(setting, call, found, is_joined=True)


@law("cascade_attention", cases=[replace(TWO, kind=kind) for kind in KINDS])
def a_cascade_changes_nothing_that_it_reads(
    setting: Setting, shared: SharedPrefix
) -> None:
    """If no output is given, it allocates one."""
    call = shared.call(setting.device)
    tensors = {
        name: argument
        for name, argument in call.arguments.items()
        if isinstance(argument, Tensor)
    }
    with kept(**tensors):
        once = run_cascade(setting, call, shared.prefix_len)
    again = run_cascade(setting, call, shared.prefix_len)
    expect_same_results("once more", again, once)
    made = replace(call, out_dtype=None, wants_lse=False)
    found = run_cascade(setting, made, shared.prefix_len)
    expect_same_results("made", found, once)


Change = Callable[[Call], dict[str, Any]]
UNFIT: dict[str, Change] = {
    "a negative prefix": lambda call: {"common_prefix_len": -16},
    "a prefix of half a block": lambda call: {"common_prefix_len": 20},
    "a prefix of one key less": lambda call: {"common_prefix_len": 31},
    "a prefix longer than the rows": lambda call: {"common_prefix_len": 160},
    "a window": lambda call: {"sliding_window": 8},
    "chunks": lambda call: {"attention_chunk_size": 16},
    "slopes": lambda call: {"alibi_slopes": torch.ones(4)},
    "a bias": lambda call: {"position_bias": torch.ones(4, 3)},
    "ranges": lambda call: {"query_ranges": torch.zeros(5, 2, dtype=torch.int32)},
    "sinks for other heads": lambda call: {"sinks": torch.ones(3)},
    "an FP8 output": lambda call: {"out": torch.zeros(5, 4, 16).to(torch.float8_e5m2)},
    "an output of another shape": lambda call: {"out": torch.zeros(5, 4, 15)},
    "an output of integers": lambda call: {"out": torch.zeros(5, 4, 16).int()},
    "an expanded output": lambda call: {"out": torch.zeros(5, 1, 16).expand(5, 4, 16)},
    "an output in the key cache": lambda call: {
        "out": call.arguments["key_cache"].view(-1)[: 5 * 4 * 16].view(5, 4, 16)
    },
    "a scale of a cache that has none": lambda call: {"k_scale": 1.0},
}


def other_block(call: Call) -> dict[str, Any]:
    table = call.arguments["block_table"].clone()
    table[1, 1] = table[0, 0]
    return {"block_table": table}


CONTENTS: dict[str, Change] = {
    "rows that do not share it": other_block,
    "a prefix that reaches into the new tokens": lambda call: {
        "seq_lens": torch.tensor([34, 36], dtype=torch.int32)
    },
    "a prefix longer than a sequence": lambda call: {
        "seq_lens": torch.tensor([41, 20], dtype=torch.int32),
        "causal": False,
    },
}


def expect_rejected(setting: Setting, what: str, change: Change) -> None:
    call = cascade(TWO.call(setting.device), TWO.prefix_len)
    with setting.device:
        changes = change(call)
        out = changes.pop("out", torch.full((5, 4, 16), 7.0))
        lse = torch.full((4, 5), NAN)
    call = call.changed(**changes)
    with kept(out=out, lse=lse):
        expect_rejection(
            what,
            lambda: setting.candidate.cascade_attention(
                **call.keywords, out=out, lse=lse
            ),
        )


@law("cascade_attention", cases=[*UNFIT], claim="rejects shapes")
def an_invalid_prefix_is_rejected(setting: Setting, what: str) -> None:
    expect_rejected(setting, what, UNFIT[what])


@law("cascade_attention", cases=[*CONTENTS], claim="rejects contents")
def a_prefix_that_is_not_shared_is_rejected_if_contents_are_checked(
    setting: Setting, what: str
) -> None:
    expect_rejected(setting, what, CONTENTS[what])


@dataclass(frozen=True)
class CascadeChoice:
    """The arguments of the decision between cascade attention and ordinary attention.

    Args:
        prefix_len: keys that all requests share.
        query_lens: new tokens of each request.
        kv_heads: KV heads of the layer.
        group: query heads per KV head.
        num_sms: streaming multiprocessors.
        excluded: the option that rules the cascade out. Optional.
    """

    prefix_len: int
    query_lens: tuple[int, ...]
    kv_heads: int
    group: int
    num_sms: int
    excluded: str | None = None

    def arguments(self) -> dict[str, Any]:
        """Return the call's keyword arguments."""
        given: dict[str, Any] = {
            "common_prefix_len": self.prefix_len,
            "query_lens": list(self.query_lens),
            "num_query_heads": self.kv_heads * self.group,
            "num_kv_heads": self.kv_heads,
            "use_alibi": False,
            "use_sliding_window": False,
            "use_local_attention": False,
            "num_sms": self.num_sms,
        }
        if self.excluded == "dcp_world_size":
            return given | {"dcp_world_size": 2}
        return given | ({self.excluded: True} if self.excluded else {})

    def rounds(self) -> tuple[int, int]:
        """Return the key tiles that one SM reads: of the cascade, and of split-KV."""
        key_tiles = len(range(0, self.prefix_len, 128))
        query_tiles = len(range(0, len(self.query_lens), 128))
        programs = range(self.kv_heads * self.group * query_tiles)
        cascade = len(programs[:: self.num_sms]) * key_tiles
        group_tiles = len(range(0, self.group, 128))
        tiles = range(len(self.query_lens) * self.kv_heads * group_tiles * key_tiles)
        return cascade, len(tiles[:: self.num_sms])


EXCLUDED = ("use_alibi", "use_sliding_window", "use_local_attention", "dcp_world_size")


@st.composite
def choices(draw: st.DrawFn) -> CascadeChoice:
    """Return decisions at the limits of 256 keys and 8 requests, and near equal costs."""
    pick = Random(draw(st.integers(0, 2**20)))
    reqs = pick.choice([0, 7, 8, 9, 64, 128, 129, 300])
    query_lens = [1] * reqs
    if reqs and pick.random() < 0.15:
        query_lens[pick.randrange(reqs)] = pick.choice([0, 2, 5])
    kv_heads, group = pick.choice([1, 2, 8]), pick.choice([1, 2, 4, 7, 129])
    # as many SMs as programs of the cascade, and as tiles of split-KV, and other numbers
    programs, requests = kv_heads * group, max(kv_heads * reqs, 1)
    sms = [1, 4, 108, 132, programs, programs - 1, 2 * programs, requests, 2 * requests]
    return CascadeChoice(
        pick.choice([0, 255, 256, 257, 384, 385, 4096, 5000]),
        tuple(query_lens),
        kv_heads,
        group,
        num_sms=max(pick.choice(sms), 1),
        excluded=pick.choice([None] * 8 + list(EXCLUDED)),
    )


@law("use_cascade_attention", cases=several(choices()))
def a_cascade_is_used_if_it_reads_fewer_key_tiles_per_sm(
    setting: Setting, choices: list[CascadeChoice]
) -> None:
    """Never for short prefixes, few requests and options that it does not take.

    Always for several new tokens or heads that are not grouped.
    """
    for choice in choices:
        cascade, split_kv = choice.rounds()
        is_plain = choice.group == 1 or any(
            query_len != 1 for query_len in choice.query_lens
        )
        is_large = choice.prefix_len >= 256 and len(choice.query_lens) >= 8
        pays = is_plain or cascade < split_kv
        found = setting.candidate.use_cascade_attention(**choice.arguments())
        right = is_large and not choice.excluded and pays
        expect_same(f"whether the cascade is used: {choice}", bool(found), right)


WRONG_NUMBERS: dict[str, dict[str, Any]] = {
    "a negative prefix": {"common_prefix_len": -1},
    "a negative query": {"query_lens": [1] * 8 + [-1]},
    "no query heads": {"num_query_heads": 0},
    "no KV heads": {"num_kv_heads": 0},
    "heads that do not divide": {"num_query_heads": 7},
    "no SMs": {"num_sms": 0},
    "no ranks": {"dcp_world_size": 0},
}


@law("use_cascade_attention", cases=[*WRONG_NUMBERS], claim="rejects shapes")
def a_decision_about_impossible_sizes_is_rejected(setting: Setting, what: str) -> None:
    given = CascadeChoice(512, (1,) * 16, 2, 4, 4).arguments() | WRONG_NUMBERS[what]
    decide = setting.candidate.use_cascade_attention
    expect_rejection(what, lambda: decide(**given))
