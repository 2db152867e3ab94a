"""Laws of a layer that runs as one object: builder, metadata, forward.

A layer writes its new keys and values and then attends. The expected cache is written here slot by
slot; the rest of it is NaN. The expected output is the reference's attention in float64. A backend
that rejects a layer's cache is not tested.
"""

from dataclasses import dataclass, fields, replace
from itertools import accumulate
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from ...contract.attention_options import AttentionOptions
from ...contract.metadata_classes import CommonAttentionMetadata, PagedAttentionMetadata
from ...contract.specs import CrossAttentionSpec, KVCacheSpec
from ...engine.backend_interface import AttentionBackend, AttentionMetadataBuilder
from ..candidates.candidate import OutsideSupport
from ..candidates.setting import Setting
from ..cases.batches import LAYOUTS, NAN, empty_cache
from ..cases.steps import (
    Requests,
    bare_step,
    counts,
    draw_requests,
    table_of,
    whole_step,
)
from ..checks.expect import expect_budget, expect_same
from ..checks.metadata import expect_field, expect_unchanged, remember
from .law import law

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
    kind = pick.choice(["decodes", "padded decodes", "prompts", "both"])
    new = {
        "decodes": [1] * len(step.new),
        # the last request is padding, as in a step of a captured graph
        "padded decodes": [1] * (len(step.new) - 1) + [0],
        "prompts": [max(2, count) for count in step.new],
        "both": sorted(step.new),
    }[kind]
    new = new[: len(step.new)]
    step = replace(step, new=tuple(min(count, 6) for count in new), block_size=size)
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
        needed = [-(-seq_len // size) for seq_len in step.seq_lens]
        needed_cross = [-(-encoder_len // size) for encoder_len in layer.encoders]
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
        for target, numbers in ((exact, values), (sizes, values.abs())):
            attend(
                key_cache=keys,
                value_cache=numbers,
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


@law("BACKENDS", cases=layers())
def a_layer_writes_its_keys_and_then_attends(
    setting: Setting, layer: LayerCase
) -> None:
    """A layer that shares another layer's cache only attends; a profiling run does neither."""
    for backend in that_take(setting, spec_of(layer)):
        run = Run(setting, layer)
        step, tokens = layer.step, sum(layer.step.new)
        query = run.rows_of_heads(tokens, layer.kv_heads * layer.group)
        key, value = (run.rows_of_heads(tokens, layer.kv_heads) for _ in range(2))
        given = [tensor.clone() for tensor in (query, key, value)]
        metadata = make_builder(backend, spec_of(layer), run.device).build(
            0, run.common()
        )
        out = torch.full_like(query, NAN, memory_format=torch.contiguous_format)
        impl = make_impl(backend, layer)
        owner = SimpleNamespace()
        found = impl.forward(owner, query, key, value, run.cache, None, out)
        expect_same(f"{backend.name}: the very output", found is out, True)
        run.expect_cache(f"{backend.name}, profiled")
        expect_same("profiled output", bool(out.isnan().all()), True)
        found = impl.forward(owner, query, key, value, run.cache, metadata, out)
        expect_same(f"{backend.name}: the very output", found is out, True)
        for name, tensor, before in zip("qkv", (query, key, value), given, strict=True):
            expect_same(f"{backend.name}: {name} afterwards", tensor, before)
        for req, (first, old) in enumerate(
            zip(step.starts[:-1], step.computed, strict=True)
        ):
            for token in range(step.new[req]):
                at = first + token
                run.store(run.rows[req], old + token, key[at].cpu(), value[at].cpu())
        run.expect_cache(backend.name)
        run.judge(backend.name, query, out, run.rows, step.seq_lens, True)
        shared = make_impl(
            backend, layer, kv_sharing_target_layer_name="an earlier one"
        )
        out.fill_(NAN)
        # keys and values that are passed to a sharing layer are not written
        own = key + 1 if step.seed % 2 else None
        shared.forward(owner, query, own, own, run.cache, metadata, out)
        run.expect_cache(f"{backend.name}, sharing")
        run.judge(backend.name, query, out, run.rows, step.seq_lens, True)


@law("BACKENDS", cases=layers())
def an_encoders_keys_are_written_once_and_read_by_every_later_step(
    setting: Setting, layer: LayerCase
) -> None:
    """Cross-attention: every query attends to all keys of its own request's encoder."""
    spec = spec_of(layer, CrossAttentionSpec)
    for backend in that_take(setting, spec):
        run, lens = Run(setting, layer), list(layer.encoders)
        tokens = sum(layer.step.new)
        heads = layer.kv_heads * layer.group
        own_slots = [
            slot
            for row, count in zip(run.cross_rows, lens, strict=True)
            for slot in run.slots(row, range(count))
        ]
        slots = torch.tensor(own_slots, dtype=torch.int64, device=run.device)
        reads: dict[str, Any] = {
            "encoder_seq_lens": counts(lens, run.device),
            "encoder_seq_lens_cpu": counts(lens),
            "cross_block_table_tensor": table_of(run.cross_rows, run.device),
        }
        starts = [0, *accumulate(lens)]
        writes: dict[str, Any] = {
            "encoder_query_start_loc": counts(starts, run.device),
            "encoder_query_start_loc_cpu": counts(starts),
            "cross_slot_mapping": slots,
        }
        key, value = (
            run.random(sum(lens), layer.kv_heads).to(run.device) for _ in range(2)
        )
        for row, first, count in zip(run.cross_rows, starts[:-1], lens, strict=True):
            for position in range(count):
                at = first + position
                run.store(row, position, key[at].cpu(), value[at].cpu())
        impl = make_impl(backend, layer, attn_type="encoder_decoder")
        builder = make_builder(backend, spec, run.device)
        for is_first in (True, False):
            query = run.rows_of_heads(tokens, heads)
            out = torch.full_like(query, NAN, memory_format=torch.contiguous_format)
            common = run.common().replace(**reads, **(writes if is_first else {}))
            metadata = builder.build(0, common)
            brought = (key, value) if is_first else (None, None)
            impl.forward(object(), query, *brought, run.cache, metadata, out)
            name = f"{backend.name}, {'first' if is_first else 'later'} step"
            run.expect_cache(name)
            run.judge(name, query, out, run.cross_rows, lens, False)


def ranges_of(
    step: Requests, images: dict[int, list[tuple[int, int]]]
) -> Tensor | None:
    """Return the image range of each new token, or None if no token is part of an image."""
    found: list[int] = []
    is_any = False
    for req, position in zip(step.owners(), step.positions(), strict=True):
        own = [span for span in images.get(req, []) if span[0] <= position <= span[1]]
        is_any = is_any or bool(own)
        found += own[0] if own else (-1, -1)
    return counts(found).view(-1, 2) if is_any else None


RENAMED = {"block_table": "block_table_tensor"} | {
    "cross_block_table": "cross_block_table_tensor"
}
COUNTED = ("num_decodes", "num_decode_tokens", "num_prefills", "num_prefill_tokens")


@law("BACKENDS", cases=layers())
def every_field_of_a_layers_metadata_follows_from_the_step(
    setting: Setting, layer: LayerCase
) -> None:
    """Two layer groups build their metadata from one step, which is not modified."""
    step, device = layer.step, setting.device
    # what a backend builds of them needs a block for each key
    lens = torch.tensor([70 + req for req in range(len(step.new))], dtype=torch.int32)
    whole = whole_step(step, device).replace(
        encoder_seq_lens=lens.to(device),
        encoder_seq_lens_cpu=lens,
        max_encoder_seq_len=99,
    )
    before = remember(whole)
    images = {req: list(own) for req, own in (whole.mm_req_doc_ranges or {}).items()}
    for backend in that_take(setting, spec_of(layer)):
        threshold = make_builder(
            backend, spec_of(layer), device
        ).reorder_batch_threshold
        assert threshold is not None
        decodes = 0
        while decodes < len(step.new) and step.new[decodes] <= threshold:
            decodes += 1
        reqs, tokens = len(step.new), sum(step.new)
        short = sum(step.new[:decodes])
        split = (decodes, short, reqs - decodes, tokens - short)
        for spec, counted in (
            (spec_of(layer), split),
            (None, (0, 0, reqs, tokens)),
            (spec_of(layer), split),
        ):
            builder = make_builder(backend, spec, device)
            found = builder.build(0, whole)
            right = dict(zip(COUNTED, counted, strict=True))
            right_type = backend.get_metadata_cls()
            expect_same("class", isinstance(found, right_type), True)
            for field in fields(PagedAttentionMetadata):
                name = field.name
                value: Any = right.get(name)
                if name == "query_ranges":
                    value = ranges_of(step, images)
                elif name not in COUNTED:
                    value = getattr(whole, RENAMED.get(name, name))
                what = f"{backend.name}: metadata.{name}"
                expect_field(what, getattr(found, name), value, device)
            expect_unchanged("the step", whole, before)
        bare = whole.replace(max_encoder_seq_len=None)
        found = make_builder(backend, spec_of(layer), device).build(0, bare)
        longest = max(lens.tolist(), default=0)
        expect_same("longest encoder", found.max_encoder_seq_len, longest)


def counted_by(step: Requests, threshold: int) -> list[int]:
    """Return decodes, their tokens, prefills and theirs; all of more tokens are prefills."""
    decodes = 0
    while decodes < len(step.new) and step.new[decodes] <= threshold:
        decodes += 1
    short = sum(step.new[:decodes])
    return [decodes, short, len(step.new) - decodes, sum(step.new) - short]


@law("BACKENDS", cases=[0, 1, 2, 4])
def a_step_is_split_at_the_threshold_of_its_builder(
    setting: Setting, drafts: int
) -> None:
    """The threshold of an engine that verifies drafts, on every way into the metadata."""
    device = setting.device
    step = Requests((1, 2, 1, 3, 4, 5, 6, 9), (3, 9, 1, 0, 8, 4, 5, 0), 16)
    common = bare_step(step, device)
    spec = KVCacheSpec(16, 2, 32, torch.float16)
    for backend in that_take(setting, spec):
        builder = make_builder(backend, spec, device)
        builder.init_reorder_batch_threshold(
            1, supports_spec_as_decode=True, num_speculative_tokens=drafts
        )
        right = counted_by(step, 1 + drafts)
        for way, found in (
            ("build", builder.build(0, common)),
            ("build_for_drafting", builder.build_for_drafting(common, 0)),
            (
                "build_for_cudagraph_capture",
                builder.build_for_cudagraph_capture(common),
            ),
        ):
            counted = [getattr(found, name) for name in COUNTED]
            expect_same(f"{backend.name}: {way}", counted, right)


@law("BACKENDS", cases=layers())
def encoder_attention_does_not_use_the_cache(
    setting: Setting, layer: LayerCase
) -> None:
    """Every token attends to all tokens of its prompt, or of its encoder's input."""
    heads, device = layer.kv_heads * layer.group, setting.device
    for backend in that_take(setting, spec_of(layer)):
        for kind in ("encoder_only", "encoder"):
            lens = list(layer.step.new if kind == "encoder_only" else layer.encoders)
            step = replace(layer.step, computed=(0,) * len(lens))
            run = Run(setting, replace(layer, step=step))
            tokens, starts = sum(lens), counts([0, *accumulate(lens)])
            query = run.random(tokens, heads).to(device)
            key, value = (run.random(tokens, layer.kv_heads).to(device) for _ in "kv")
            common = run.common().replace(
                encoder_query_start_loc=counts(
                    [0, *accumulate(layer.encoders)], device
                ),
                encoder_query_start_loc_cpu=counts([0, *accumulate(layer.encoders)]),
            )
            metadata = make_builder(backend, None, device).build(0, common)
            out = torch.full_like(query, NAN)
            impl = make_impl(backend, layer, attn_type=kind)
            impl.forward(object(), query, key, value, run.cache, metadata, out)
            name = f"{backend.name}, {kind}"
            run.expect_cache(name)
            given = [tensor.cpu() for tensor in (query, key, value)]
            longest = max(lens, default=0)
            rest = (starts, starts, longest, longest)
            exact, sizes = (
                torch.zeros_like(given[0], dtype=torch.float64) for _ in range(2)
            )
            attend = setting.truth.encoder_attention
            wide: dict[str, Any] = {"compute_dtype": torch.float64}
            attend(*given, *rest, out=exact, **wide)
            attend(*given[:2], given[2].abs(), *rest, out=sizes, **wide)
            same = attend(*given, *rest, compute_dtype=query.dtype)
            expect_budget(f"{name}: the output", out, exact, same, sizes)
