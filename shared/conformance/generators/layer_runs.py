"""Layers of attention in front of a backend: their caches, steps and expected results."""

from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from ...contract.attention_options import AttentionOptions
from ...contract.metadata_classes import CommonAttentionMetadata
from ...contract.specs import KVCacheSpec
from ...engine.backend_interface import AttentionBackend, AttentionMetadataBuilder
from ..harness.candidate import OutsideSupport
from ..harness.expect import expect_budget, expect_same
from ..harness.law import Setting
from .batches import LAYOUTS, NAN, empty_cache
from .steps import Requests, bare_step, counts, draw_requests, table_of

PROFILES = (
    (8, torch.float32, (1, 3, 4, 16)),
    (32, torch.float16, (16,)),
    (64, torch.bfloat16, (16,)),
)
"""Head size, dtype and block sizes: of plain kernels, and of one that supports few sizes."""


@dataclass(frozen=True)
class LayerCase:
    """A step of one layer.

    Args:
        step: the requests. The decodes come first.
        profile: index into PROFILES.
        kv_heads, group: number of KV heads, and of query heads per KV head.
        layout: memory layout of the cache.
        padding: query rows after the last request.
        encoders: encoder tokens of each request.
    """

    step: Requests
    profile: int
    kv_heads: int
    group: int
    layout: str
    padding: int
    encoders: tuple[int, ...] = ()

    @property
    def sizes(self) -> tuple[int, torch.dtype]:
        """Head size and dtype."""
        return PROFILES[self.profile][:2]


@st.composite
def layers(draw: st.DrawFn) -> LayerCase:
    """Return steps of decodes, of prefills and of both, over any cache layout."""
    pick = Random(draw(st.integers(0, 2**20)))
    profile = pick.choice([0, 0, 1, 2])
    step = draw_requests(pick, most=pick.choice([1, 2, 2, 3]))
    size = pick.choice(PROFILES[profile][2])
    kind = pick.choice(["decodes", "prompts", "both"])
    new = {
        "decodes": [1] * len(step.new),
        "prompts": [max(2, each) for each in step.new],
        "both": sorted(step.new),
    }[kind]
    step = replace(step, new=tuple(min(each, 6) for each in new), block_size=size)
    return LayerCase(
        step,
        profile,
        pick.choice([1, 2]),
        pick.choice([1, 2]),
        pick.choice(LAYOUTS),
        pick.choice([0, 2]),
        tuple(pick.choice([0, 1, size, size + 1]) for _ in step.new),
    )


def that_take(setting: Setting, spec: KVCacheSpec) -> list[type[AttentionBackend]]:
    """Return the candidate's backends that support such a cache.

    Raises:
        OutsideSupport: no backend supports it, so the case cannot be tested.
    """
    backends = setting.candidate.BACKENDS
    taken = [
        backend
        for backend in backends
        if not backend.validate_configuration(spec, setting.device)
    ]
    if not taken:
        raise OutsideSupport(
            f"no backend for heads of {spec.head_size} in {spec.dtype}, blocks of"
            f" {spec.block_size}"
        )
    return taken


class Run:
    """A cache that holds the context, and the inputs of one step.

    Args:
        setting: the device of the tensors, and the implementation of the expected results.
        layer: the step.
    """

    def __init__(self, setting: Setting, layer: LayerCase) -> None:
        self.setting, self.layer, self.device = setting, layer, setting.device
        self.generator = torch.Generator().manual_seed(layer.step.seed)
        # small scattered ids: the cache has three times as many blocks as are needed
        step, size = layer.step, layer.step.block_size
        needed = [-(-each // size) for each in step.seq_lens]
        needed_cross = [-(-each // size) for each in layer.encoders]
        blocks = 3 * (sum(needed) + sum(needed_cross)) + 1
        free = torch.randperm(blocks, generator=self.generator).tolist()
        self.rows = [[free.pop() for _ in range(count)] for count in needed]
        self.cross_rows = [[free.pop() for _ in range(count)] for count in needed_cross]
        head_size, dtype = layer.sizes
        shape = (blocks, size, layer.kv_heads, head_size)
        self.expected = empty_cache("separate", *shape, dtype)
        for req, old in enumerate(step.computed):
            for position in range(old):
                self.store(self.rows[req], position, *self.random(2, layer.kv_heads))
        self.cache = empty_cache(layer.layout, *shape, dtype, self.device)
        self.cache.copy_(self.expected)

    def random(self, *shape: int) -> Tensor:
        """Return random numbers in the layer's dtype, on the host."""
        head_size, dtype = self.layer.sizes
        numbers = torch.randn((*shape, head_size), generator=self.generator)
        return numbers.to(dtype)

    def store(self, row: list[int], position: int, key: Tensor, value: Tensor) -> None:
        """Write a key and its value into the expected cache."""
        size = self.layer.step.block_size
        self.expected[0, row[position // size], position % size] = key
        self.expected[1, row[position // size], position % size] = value

    def slots(self, row: list[int], positions: range) -> list[int]:
        """Return the slots of some positions."""
        size = self.layer.step.block_size
        return [
            row[position // size] * size + position % size for position in positions
        ]

    def rows_of_heads(self, tokens: int, heads: int) -> Tensor:
        """Return a view [tokens + padding, heads, head_size], with NaN in the padding."""
        numbers = self.random(tokens, heads + 1)
        padding = torch.full_like(numbers[:1], NAN).repeat(self.layer.padding, 1, 1)
        if not tokens:
            shape = (self.layer.padding, *numbers.shape[1:])
            padding = torch.full(shape, NAN, dtype=numbers.dtype)
        return torch.cat([numbers, padding]).to(self.device)[:, :heads]

    def common(self) -> CommonAttentionMetadata:
        """Return the metadata of the step, with the block table of this cache."""
        step = self.layer.step
        slots = [
            slot
            for row, new, old in zip(self.rows, step.new, step.computed, strict=True)
            for slot in self.slots(row, range(old, old + new))
        ]
        return bare_step(step, self.device).replace(
            block_table_tensor=table_of(self.rows, self.device),
            slot_mapping=torch.tensor(slots, dtype=torch.int64, device=self.device),
        )

    def judge(
        self,
        name: str,
        query: Tensor,
        out: Tensor,
        rows: list[list[int]],
        lens: list[int],
        causal: bool,
    ) -> None:
        """Raise Disagreement if the output is not attention over the expected cache."""
        step, tokens = self.layer.step, sum(self.layer.step.new)
        arguments: dict[str, Any] = {
            "query": query[:tokens].cpu(),
            "block_table": table_of(rows, torch.device("cpu")),
            "query_start_loc": counts(step.starts),
            "seq_lens": counts(lens),
            "max_query_len": max(step.new, default=0),
            "max_seq_len": max(lens, default=0),
            "options": AttentionOptions(causal=causal),
        }
        keys, values = self.expected
        attend = self.setting.truth.paged_attention
        exact, sizes = (
            torch.zeros_like(arguments["query"], dtype=torch.float64) for _ in range(2)
        )
        for target, each in ((exact, values), (sizes, values.abs())):
            attend(
                key_cache=keys,
                value_cache=each,
                out=target,
                compute_dtype=torch.float64,
                **arguments,
            )
        same = attend(
            key_cache=keys, value_cache=values, compute_dtype=query.dtype, **arguments
        )
        expect_budget(f"{name}: the output", out[:tokens], exact, same, sizes)
        if not bool(out[tokens:].isnan().all()):
            expect_same(
                f"{name}: padding rows", out[tokens:].tolist(), "left as they are"
            )

    def expect_cache(self, name: str) -> None:
        """Raise Disagreement if the cache differs from the expected one."""
        expect_same(f"{name}: the cache", self.cache, self.expected)


def make_impl(backend: type[AttentionBackend], layer: LayerCase, **options: Any) -> Any:
    """Return the attention implementation of one layer of a backend."""
    head_size, _ = layer.sizes
    return backend.get_impl_cls()(
        layer.kv_heads * layer.group,
        head_size,
        head_size**-0.5,
        layer.kv_heads,
        **options,
    )


def make_builder(
    backend: type[AttentionBackend], spec: KVCacheSpec | None, device: torch.device
) -> AttentionMetadataBuilder:
    """Return a backend's metadata builder."""
    return backend.get_builder_cls()(spec, ["layer"], device)


def spec_of(layer: LayerCase, kind: type[KVCacheSpec] = KVCacheSpec) -> KVCacheSpec:
    """Return the KV cache spec of a layer."""
    head_size, dtype = layer.sizes
    return kind(layer.step.block_size, layer.kv_heads, head_size, dtype)
