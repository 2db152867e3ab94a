"""Laws of the options that a layer and its step pass to attention.

Options reach attention in three ways. Some belong to the layer, some come with the step through the
builder's metadata, and the FP8 scales come with the layer and the output. Any combination must give
the same result as a direct call of attention. The expected cache is written out byte by byte, also
in the formats that store a scale after the codes of each head.
"""

from dataclasses import dataclass, replace
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from ...contract.cache_formats import FORMATS, CacheFormat
from ...contract.cache_formats import PLAIN as PLAIN_FORMAT
from ...contract.kinds import PAD_SLOT_ID
from ...contract.layer_pages import split_half
from ...contract.metadata_classes import CommonAttentionMetadata
from ...contract.specs import KVCacheSpec
from ...engine.backend_interface import AttentionBackend
from ...validation.options import OPTIONS
from ..candidates.calls.calling import expect_right
from ..candidates.candidate import OutsideSupport
from ..candidates.setting import Setting
from ..cases.batches import LAYOUTS, NAN, empty_cache
from ..cases.choice_calls import build_call
from ..cases.option_pairs import PLAIN, draw_choice
from ..cases.options import Call, starts_of, stored_as
from ..cases.rearranging import only
from ..cases.steps import counts
from ..checks.expect import expect_same
from ..oracles.brute_force import column
from ..oracles.cache_formats import encode_by_hand
from .attention import Drawn
from .backends import make_builder, that_take
from .law import law

OF_LAYERS = (
    "sliding_window",
    "attention_chunk_size",
    "logits_soft_cap",
    "alibi_slopes",
    "position_bias",
    "sinks",
)
"""Options of a layer's constructor, with the names that attention uses."""
OF_STEPS = ("causal", "tree_mask", "query_ranges", "batch_invariant")
"""Options of a layer's step. Options of neither kind stay off: a layer does not take them."""
CACHE_DTYPES = {torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2"}
SCALE_OF_NAN = 0xFF
"""A byte that is NaN as a scale in FP8, and four of which are NaN in float32."""
OF_STORED_SCALES = ("separate", "interleaved", "hnd", "interleaved hnd")
"""Layouts in which a scale begins at a multiple of 4 bytes."""
Images = dict[int, list[tuple[int, int]]]


@st.composite
def layer_cases(draw: st.DrawFn, fixed: tuple[tuple[str, str], ...] = ()) -> Drawn:
    """Return a choice of options for a layer and its step, and a seed."""
    seed = draw(st.integers(0, 2**20))
    pick = Random(seed)
    start = {
        "operation": "paged_attention",
        "query_ranges": "none",
        "lse": "none",
        "value_head_size": "as the keys",
        "causal": pick.choice(["yes", "yes", "no", "each request"]),
        "group": pick.choice(["1", "2"]),
        **{
            name: option.values[0]
            for name, option in OPTIONS.items()
            if name not in (*OF_LAYERS, *OF_STEPS)
        },
    } | dict(fixed)
    if pick.random() < 0.6:  # whole prompts are slow in an interpreter
        start["batch"] = pick.choice(["decode", "verification"])
    if pick.random() < 0.3:  # sizes and dtypes that restrictive backends support
        start |= {"head_size": "80", "block_size": "16"}
        start["dtype"] = pick.choice(["float16", "bfloat16"])
    return draw_choice(pick, start.items()), seed


@dataclass(frozen=True)
class LayerStep:
    """A step of a layer, and the equivalent call of attention.

    Args:
        call: The call of attention over the cache after the step's writes. Requests with the
            fewest new tokens come first.
        images: Image spans of each request. Tokens of a span attend to each other in both
            directions.
        before, after: [2, num_blocks, block_size, kv_heads, stored_head_size] The cache on the host
            before and after the step.
        key, value: [tokens, kv_heads, head_size] and [..., value_head_size] New keys and values.
        slots: The slots of the new tokens. PAD_SLOT_ID if an earlier token of the step has the same
            slot.
        form: The format of the cache, if it stores its scales.
        global_scales: What block scales of keys and of values are multiplied by. None if there are
            none.
    """

    call: Call
    images: Images
    before: Tensor
    after: Tensor
    key: Tensor
    value: Tensor
    slots: list[int]
    form: CacheFormat = PLAIN_FORMAT
    global_scales: tuple[float | None, float | None] = (None, None)


def build_step(
    case: Drawn, device: torch.device, has_images: bool, multiple: int = 1
) -> LayerStep:
    """Return the step of a choice; the last keys of each request are its new tokens.

    Args:
        multiple: What the elements of a value are a multiple of, if those of a key are.
    """
    call = build_call(*case, device)
    pick = Random(f"layer {case[1]}")
    # two requests are enough to detect mixed-up requests, and they run fast
    count = 2 if case[1] % 3 else 1
    reqs = pick.sample(range(len(call.query_lens)), 2)[:count]
    call = only(call, sorted(reqs, key=lambda req: call.query_lens[req]))
    images = draw_images(pick, call) if has_images else {}
    ranges = ranges_of(call, images)
    if ranges is not None:
        call = call.changed(query_ranges=ranges)
    size = call.query.shape[2]
    fewer = max(1, size - 3)
    value_size = pick.choice([size, size, fewer - fewer % multiple])
    scales = [call.arguments.get(name, 1.0) for name in ("k_scale", "v_scale")]
    after = torch.stack(
        [call.arguments[name].cpu() for name in ("key_cache", "value_cache")]
    )
    after[1, ..., value_size:] = torch.tensor(NAN).to(after.dtype)
    block_size, kv_heads = after.shape[2:4]
    slots = [
        row[position // block_size] * block_size + position % block_size
        for row, new, total in zip(
            call.rows, call.query_lens, call.key_lens, strict=True
        )
        for position in range(total - new, total)
    ]
    flat, before = after.flatten(1, 2), after.clone()
    brought = []
    for side, scale in enumerate(scales):
        width = value_size if side else size
        stored = flat[side, slots][..., :width]
        numbers = (stored.double() * column(_on_host(scale), kv_heads)).to(call.dtype)
        flat[side, slots, :, :width] = stored_as(numbers, scale, after.dtype)
        brought.append(numbers.to(device))
    before.flatten(1, 2)[:, slots] = torch.tensor(NAN).to(after.dtype)
    # a slot that two requests share is written once
    slots = [
        PAD_SLOT_ID if slot in slots[:token] else slot
        for token, slot in enumerate(slots)
    ]
    call = call.changed(key_cache=after[0], value_cache=after[1][..., :value_size])
    key, value = brought
    return LayerStep(call, images, before, after, key, value, slots)


def in_format(step: LayerStep, form: CacheFormat, device: torch.device) -> LayerStep:
    """Return the step over a cache that stores codes, each head's with its scales after them.

    Slots without numbers have codes of 170 and a scale of NaN. The first element of the values of a
    head is large, so formats of four bits that are read alike are written otherwise.

    Args:
        step: A step whose cache holds the numbers.
        form: A format whose scales are measured.
        device: The device of attention.
    """
    assert form.dtype is not None
    size, value_size = step.call.query.shape[2], step.value.shape[2]
    step = replace(step, value=step.value.clone(), after=step.after.clone())
    for values in (step.value, step.before[1], step.after[1]):
        values[..., :1, 0] += LARGE
    codes, factors = form.elements(size), step.global_scales
    if form.has_global_scale:
        factors = (0.05, 3.7)
    shape = (*step.after.shape[:-1], form.row_bytes(size))
    before, after = (torch.full(shape, 170, dtype=torch.uint8) for _ in range(2))
    halves = [*zip((size, value_size), factors, strict=True)]
    for coded, plain in ((before, step.before), (after, step.after)):
        for half, numbers, (width, factor) in zip(coded, plain, halves, strict=True):
            half[..., codes:] = SCALE_OF_NAN
            used = ~numbers[..., :width].isnan().flatten(2).any(2)
            made, measured = encode_by_hand(form, numbers[used][..., :width], factor)
            assert measured is not None
            scales = measured if form.channels_per_scale else measured[..., None]
            for first, part in ((0, made), (codes, scales)):
                stored = part.view(torch.uint8)
                last = first + stored.shape[-1]
                block = half[..., first:last].clone()
                block[used] = stored
                half[..., first:last] = block
    before, after = before.view(form.dtype), after.view(form.dtype)
    arguments: dict[str, Any] = {}
    for name, half, (width, factor) in zip("kv", after.to(device), halves, strict=True):
        cache = "key_cache" if name == "k" else "value_cache"
        part, arguments[f"{name}_scale"] = split_half(half, size, width, form)
        arguments[cache] = part
        if factor is not None:
            arguments[f"{name}_global_scale"] = factor
    call = step.call.changed(**arguments)
    return replace(
        step, call=call, before=before, after=after, form=form, global_scales=factors
    )


def _on_host(scale: Any) -> Any:
    return scale.cpu() if isinstance(scale, Tensor) else scale


def draw_images(pick: Random, call: Call) -> Images:
    """Return disjoint image spans; the last one of a request contains some of its new tokens.

    In a span with two new tokens, the first attends to the second. A span also makes keys of the
    context visible that a window or a chunk would mask.
    """
    images: Images = {}
    for req, (new, total) in enumerate(
        zip(call.query_lens, call.key_lens, strict=True)
    ):
        if total < 2 or not new or pick.random() < 0.2:
            continue
        last = pick.randrange(max(1, total - new), total)
        first = pick.randrange(last)
        images[req] = [(first, last)]
        if first > 2:
            before = sorted(pick.sample(range(first), 2))
            images[req].insert(0, (before[0], before[1]))
    return images


def ranges_of(call: Call, images: Images) -> Tensor | None:
    """Return [tokens, 2] image spans of the new tokens, or None if no token is in an image."""
    found = []
    for req, (new, total) in enumerate(
        zip(call.query_lens, call.key_lens, strict=True)
    ):
        for position in range(total - new, total):
            own = [
                span for span in images.get(req, []) if span[0] <= position <= span[1]
            ]
            found.append(own[0] if own else (-1, -1))
    if all(span == (-1, -1) for span in found):
        return None
    return torch.tensor(found, dtype=torch.int32)


def metadata_of(step: LayerStep, device: torch.device) -> CommonAttentionMetadata:
    """Return the engine's metadata of the step."""
    call, given = step.call, step.call.arguments
    computed = [
        total - new for new, total in zip(call.query_lens, call.key_lens, strict=True)
    ]
    host = torch.device("cpu")
    return CommonAttentionMetadata(
        query_start_loc=given["query_start_loc"],
        query_start_loc_cpu=starts_of(call.query_lens, host),
        seq_lens=given["seq_lens"],
        seq_lens_cpu=counts(call.key_lens),
        num_computed_tokens_cpu=counts(computed),
        num_reqs=len(call.query_lens),
        num_actual_tokens=len(step.slots),
        max_query_len=given["max_query_len"],
        max_seq_len=given["max_seq_len"],
        block_table_tensor=given["block_table"],
        slot_mapping=torch.tensor(step.slots, dtype=torch.int64, device=device),
        causal=given["causal"],
        tree_mask=given.get("tree_mask"),
        mm_req_doc_ranges=step.images or None,
    )


def layer_options(call: Call) -> dict[str, Any]:
    """Return the arguments of the layer's constructor other than its sizes."""
    given = call.arguments
    made = {name: given[name] for name in OF_LAYERS if name in given}
    if "alibi_slopes" in made:
        made["alibi_slopes"] = made["alibi_slopes"].tolist()
    size, value_size = call.query.shape[2], given["value_cache"].shape[3]
    if value_size != size:
        made["head_size_v"] = value_size
    stored = given["key_cache"].dtype
    if stored in CACHE_DTYPES:
        made["kv_cache_dtype"] = CACHE_DTYPES[stored]
    return made


def expect_right_layer(
    setting: Setting,
    case: Drawn,
    has_images: bool = False,
    form: CacheFormat = PLAIN_FORMAT,
) -> None:
    """Raise if a layer of any backend is wrong.

    Args:
        form: The format of its cache, if it stores its scales.
    """
    step = build_step(case, setting.device, has_images, form.head_size_step)
    options, size = layer_options(step.call), step.call.query.shape[2]
    of_spec: dict[str, Any] = {}
    if form.is_measured:
        step = in_format(step, form, setting.device)
        of_spec["kv_cache_dtype"] = options["kv_cache_dtype"] = form.name
    block_size, kv_heads = step.after.shape[2:4]
    spec = KVCacheSpec(block_size, kv_heads, size, step.after.dtype, **of_spec)
    able = [
        backend
        for backend in that_take(setting, spec)
        if all(backend.supports_option(name) for name in options)
    ]
    if not able:
        raise OutsideSupport(f"no backend takes {', '.join(options)}")
    for backend in able:
        run_layer(setting, step, backend, spec, options, case[1])


def run_layer(
    setting: Setting,
    step: LayerStep,
    backend: type[AttentionBackend],
    spec: KVCacheSpec,
    options: dict[str, Any],
    seed: int,
) -> None:
    """Raise if a layer of one backend returns or writes wrong values."""
    call, device = step.call, setting.device
    given, (tokens, heads, size) = call.arguments, call.query.shape
    num_blocks, block_size, kv_heads = step.after.shape[1:4]
    layouts = OF_STORED_SCALES if step.form.is_measured else LAYOUTS
    layout, stored = layouts[seed % len(layouts)], step.after.dtype
    cache = empty_cache(
        layout, num_blocks, block_size, kv_heads, step.after.shape[4], stored, device,
        NAN if stored.is_floating_point else 0,
    )  # fmt: skip
    cache.copy_(step.before)
    padding = seed % 3
    query, key, value = (
        torch.cat([tensor, tensor.new_full((padding, *tensor.shape[1:]), NAN)])
        for tensor in (call.query, step.key, step.value)
    )
    value_size = value.shape[2]
    out = query.new_full((tokens + padding, heads, value_size), NAN)
    out = out.to(call.out_dtype or call.dtype)
    out_scale = given.get("out_scale")
    if out_scale is not None:
        out_scale = torch.as_tensor(out_scale, dtype=torch.float32, device=device)
    scale = given.get("scale", size**-0.5)
    impl = backend.get_impl_cls()(heads, size, scale, spec.num_kv_heads, **options)
    builder = make_builder(backend, spec, device)
    metadata = builder.build(0, metadata_of(step, device))
    k_number, v_number = step.global_scales
    owner = SimpleNamespace(
        _k_scale=given.get("k_scale"),
        _v_scale=given.get("v_scale"),
        _k_scale_float=k_number,
        _v_scale_float=v_number,
    )
    found = impl.forward(owner, query, key, value, cache, metadata, out, out_scale)
    expect_same(f"{backend.name}: identity of the output", found is out, True)
    expect_same(f"{backend.name}: the cache", cache, step.after)
    expect_right(setting, call, (out[:tokens], None))
    is_nan = out[tokens:].float().isnan().all()
    expect_same(f"{backend.name}: padding rows, still NaN", bool(is_nan), True)


@law("BACKENDS", cases=layer_cases())
def a_layer_applies_its_options_and_those_of_its_step(
    setting: Setting, case: Drawn
) -> None:
    """Options are windows, chunks, caps, biases, sinks, flags, trees and FP8 outputs."""
    expect_right_layer(setting, case)


LARGE = 64.0
"""More than the sum of the other numbers of a head may be. It is exact in every dtype."""
STORED = tuple(form for form in FORMATS.values() if form.is_measured)
"""Formats whose scales are stored with the codes."""
OF_PAGES = (("cache", "as the query"), ("scales", "none"))
SIZES = ("32", "80")
"""Head sizes whose codes and scales a page holds in every format."""


@law(
    "BACKENDS",
    cases=st.one_of(
        *(
            st.tuples(st.just(form.name), layer_cases((*OF_PAGES, ("head_size", size))))
            for form in STORED
            for size in SIZES
        )
    ),
)
def a_layer_stores_codes_and_their_scales(
    setting: Setting, case: tuple[str, Drawn]
) -> None:
    """The scales of a head are stored after its codes. Unwritten slots have scales of NaN."""
    name, drawn = case
    expect_right_layer(setting, drawn, form=FORMATS[name])


PLAIN_DECODES = (
    *((name, PLAIN[name]) for name in (*OF_LAYERS, "tree_mask", "cache", "scales")),
    ("batch", "decode"),
    ("head_size", "32"),
    ("block_size", "16"),
    ("dtype", "float16"),
)
"""Decodes that every operator of a backend computes."""


@law(
    "BACKENDS",
    cases=st.one_of(
        *(layer_cases((*PLAIN_DECODES, ("out", kind))) for kind in ("e4m3", "e5m2"))
    ),
)
def a_layer_without_options_scales_its_fp8_output(
    setting: Setting, case: Drawn
) -> None:
    """Applies to every operator that a backend runs its decodes in."""
    expect_right_layer(setting, case)


@law("BACKENDS", cases=layer_cases())
def a_layer_applies_the_images_of_its_step(setting: Setting, case: Drawn) -> None:
    """Holds with any other options; tokens outside all images keep their visible range."""
    expect_right_layer(setting, case, has_images=True)


@law("BACKENDS", cases=layer_cases((("tree_mask", "tree"), ("causal", "yes"))))
def a_layer_applies_the_trees_of_its_step(setting: Setting, case: Drawn) -> None:
    """Applies to decodes and prefills; trees of prefills come after those of decodes."""
    expect_right_layer(setting, case)


@law(
    "BACKENDS",
    cases=st.one_of(*(layer_cases((("cache", c),)) for c in ("e4m3", "e5m2"))),
)
def a_layer_keeps_its_cache_in_fp8_under_its_scales(
    setting: Setting, case: Drawn
) -> None:
    """One scale for all heads or one per head; writes and reads use the same scales."""
    expect_right_layer(setting, case)
