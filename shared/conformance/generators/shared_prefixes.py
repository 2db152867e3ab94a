"""Batches whose requests share a prefix."""

from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st

from .batches import DTYPES, LAYOUTS, BatchPlan
from .options import Call, paged_call, quantised_call, slopes, tree_of

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
    block_size = pick.choice([1, 3, 16, 16, 24])
    reqs = pick.randint(1, 4)
    kind = pick.choice([*KINDS, "plain"])
    news = [0, 1, 1, 1, 2, 5, 17] if kind != "tree" else [1, 2, 5]
    owns = [0, 0, 1, block_size - 1, block_size, 33]
    return SharedPrefix(
        prefix_blocks=pick.choice([0, 1, 1, 2, 3]),
        query_lens=tuple(pick.choice(news) for _ in range(reqs)),
        own_lens=tuple(pick.choice(owns) for _ in range(reqs)),
        kind=kind,
        needle=pick.choice([None, None, None, -100, -1, 0, 1, 15]),
        block_size=block_size,
        kv_heads=pick.choice([1, 2]),
        group=pick.choice([1, 2, 5]),
        head_size=pick.choice([8, 16, 24]),
        dtype=pick.choice(DTYPES),
        layout=pick.choice(LAYOUTS),
        padding=pick.choice([0, 2]),
        spare_max=pick.choice([0, 7]),
        seed=pick.randrange(2**16),
    )
