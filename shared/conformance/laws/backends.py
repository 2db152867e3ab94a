"""Laws of a layer that runs as one object: builder, metadata, forward.

A layer writes its new keys and values and then attends. The expected cache is written here slot by
slot; the rest of it is NaN. The expected output is the reference's attention in float64. A backend
that rejects a layer's cache is not tested.
"""

from dataclasses import fields, replace
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ...contract.metadata_classes import PagedAttentionMetadata
from ...contract.specs import CrossAttentionSpec, KVCacheSpec
from ..generators.batches import NAN
from ..generators.layer_runs import (
    LayerCase,
    Run,
    layers,
    make_builder,
    make_impl,
    spec_of,
    that_take,
)
from ..generators.steps import (
    Requests,
    bare_step,
    counts,
    expect_field,
    expect_unchanged,
    remember,
    table_of,
    whole_step,
)
from ..harness.expect import expect_budget, expect_same
from ..harness.law import Setting, law


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
        given = [each.clone() for each in (query, key, value)]
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
        for name, each, before in zip("qkv", (query, key, value), given, strict=True):
            expect_same(f"{backend.name}: {name} afterwards", each, before)
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
        own = [each for each in images.get(req, []) if each[0] <= position <= each[1]]
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
    whole = whole_step(step, device)
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
            for each in fields(PagedAttentionMetadata):
                name = each.name
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
        longest = max((70 + req for req in range(reqs)), default=0)
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
            given = [each.cpu() for each in (query, key, value)]
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
