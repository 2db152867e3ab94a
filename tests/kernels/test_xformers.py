"""Does xFormers' own paged operator run here, and does it read what our metadata says?

Without a GPU the operator runs in Triton's interpreter, so that it is run everywhere and not only
on a machine with the hardware.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pagetwin.conformance.cases.batches import BatchPlan, build
from pagetwin.conformance.checks.dense import judge_attention
from pagetwin.contract.specs import CrossAttentionSpec, KVCacheSpec
from pagetwin.engine.selector import load_backend
from support.twins import Twin

pytestmark = pytest.mark.usefixtures("xformers")


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Record each call of xFormers' operator, whichever subclass makes it."""
    from xformers.ops.fmha import triton_splitk

    calls: list[Any] = []
    apply = triton_splitk.FwOp.apply.__func__

    def recorded(cls: type, inputs: Any, needs_gradient: bool) -> Any:
        calls.append((cls, inputs))
        return apply(cls, inputs, needs_gradient)

    monkeypatch.setattr(triton_splitk.FwOp, "apply", classmethod(recorded))
    yield calls


def decodes(device: torch.device, **changes: Any) -> tuple[Any, Any, Any]:
    """Return a batch of decodes, the layer's own tokens and its metadata."""
    numbers = {"kv_heads": 2, "group": 4, "head_size": 64, "dtype": torch.float16}
    plan = BatchPlan((1, 1, 1), (33, 1, 16), **(numbers | changes))
    batch = build(plan, device)
    spec = KVCacheSpec(plan.block_size, plan.kv_heads, plan.head_size, plan.dtype)
    return batch, plan, spec


def forward(batch: Any, spec: KVCacheSpec, twin: Twin) -> Any:
    """Run the batch through a layer whose new keys are those that the cache holds already."""
    plan = batch.plan
    backend = load_backend("XFORMERS")
    device = batch.query.device
    common = twin.build_common_attn_metadata(
        list(plan.query_lens),
        [kv - new for kv, new in zip(plan.kv_lens, plan.query_lens, strict=True)],
        batch.rows,
        plan.block_size,
        device,
    )
    slots = common.slot_mapping
    places = slots // plan.block_size, slots % plan.block_size
    key, value = batch.key_cache[places], batch.value_cache[places]
    impl = backend.get_impl_cls()(
        plan.kv_heads * plan.group,
        plan.head_size,
        plan.head_size**-0.5,
        plan.kv_heads,
    )
    metadata = backend.get_builder_cls()(spec, ["layer"], device).build(0, common)
    cache = torch.stack([batch.key_cache, batch.value_cache])
    output = torch.full_like(batch.query, float("nan"))
    impl.forward(object(), batch.query, key, value, cache, metadata, output)
    return output, metadata, impl


@pytest.mark.sample(3)
@pytest.mark.parametrize("head_size", [32, 64, 128])
@pytest.mark.parametrize("block_size", [16, 32, 48])
def test_its_operator_really_runs_and_keeps_the_budget(
    head_size: int,
    block_size: int,
    launches: list[Any],
    reference: Twin,
    device: torch.device,
) -> None:
    batch, _, spec = decodes(
        device, head_size=head_size, block_size=block_size, needle="last"
    )
    output, _, impl = forward(batch, spec, reference)
    assert impl.decode_op == "xformers"
    ((operator, _),) = launches
    # a tile that does not divide the page reads its neighbour's keys, without a word
    assert block_size % operator.BLOCK_N == 0
    assert judge_attention(batch, output, reference)[0].ok


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("needle", ["none", "first", "last", "block edge"])
def test_it_finds_the_key_that_outweighs_all_others(
    dtype: torch.dtype,
    needle: str,
    launches: list[Any],
    reference: Twin,
    device: torch.device,
) -> None:
    batch, _, spec = decodes(device, dtype=dtype, needle=needle)
    output, _, _ = forward(batch, spec, reference)
    assert len(launches) == 1
    verdict, _ = judge_attention(batch, output, reference)
    assert verdict.ok, verdict


def test_a_head_size_that_its_kernel_lacks_runs_in_triton(
    launches: list[Any], reference: Twin, device: torch.device
) -> None:
    """Which operator runs is fixed when the layer is made, and can be read from it."""
    batch, _, spec = decodes(device, head_size=80)
    output, _, impl = forward(batch, spec, reference)
    assert impl.decode_op == "triton" and not launches
    assert judge_attention(batch, output, reference)[0].ok


@settings(max_examples=30)
@given(
    kv_lens=st.lists(st.sampled_from([1, 2, 15, 16, 17, 40]), min_size=1, max_size=4),
    idle=st.sets(st.integers(0, 3)),
    seed=st.integers(0, 99),
)
def test_its_mask_shows_each_decode_the_slots_of_its_row(
    kv_lens: list[int], idle: set[int], seed: int, reference: Twin
) -> None:
    """The mask over all slots of the cache, against positions looked up one by one."""
    news = [0 if req in idle else 1 for req in range(len(kv_lens))]
    plan = BatchPlan(tuple(news), tuple(kv_lens), seed=seed, head_size=32)
    rows = build(plan).rows
    common = reference.build_common_attn_metadata(
        news, [kv - new for kv, new in zip(kv_lens, news, strict=True)], rows, 16
    )
    spec = KVCacheSpec(16, 2, 32, torch.float16)
    builder = load_backend("XFORMERS").get_builder_cls()(spec, ["layer"], "cpu")
    bias = builder.build(0, common).attn_bias
    if not any(news):
        assert bias is None
        return
    live = [req for req, new in enumerate(news) if new]
    width = common.block_table_tensor.shape[1] * 16
    mask = bias.materialize((len(live), len(live) * width))
    # a table's padding is block 0, which a row that owns it would then show twice
    for place, req in enumerate(live):
        slots = {
            rows[req][position // 16] * 16 + position % 16
            for position in range(kv_lens[req])
        }
        used = -(-kv_lens[req] // 16)
        if 0 in rows[req][:used] and used < common.block_table_tensor.shape[1]:
            continue
        seen = set(torch.isfinite(mask[place]).nonzero().flatten().tolist())
        assert seen == slots
    assert bias.page_size == 16
    assert bias.k_seqinfo.seqlen_py == [kv_lens[req] for req in live]


def test_it_is_asked_for_nothing_where_nothing_decodes(
    launches: list[Any], reference: Twin, device: torch.device
) -> None:
    plan = BatchPlan((3, 17), (20, 17), head_size=64, dtype=torch.float16)
    batch = build(plan, device)
    spec = KVCacheSpec(16, 2, 64, torch.float16)
    output, metadata, _ = forward(batch, spec, reference)
    assert metadata.attn_bias is None and not launches
    assert judge_attention(batch, output, reference)[0].ok


# ---- cross-attention, and steps that ask for more than the operator has


def cross_step(
    news: list[int], encoders: list[int], twin: Twin, device: torch.device
) -> tuple[Any, Any]:
    """Return encoders' keys in a cache, and the metadata of a step that reads them."""
    plan = BatchPlan(tuple(news), tuple(encoders), head_size=64, dtype=torch.float16)
    batch = build(plan, device)
    lens = torch.tensor(encoders, dtype=torch.int32)
    common = twin.build_common_attn_metadata(
        news, [0] * len(news), [[req] for req in range(len(news))], 16, device
    ).replace(
        encoder_seq_lens=lens.to(device),
        encoder_seq_lens_cpu=lens,
        cross_block_table_tensor=batch.block_table,
    )
    spec = CrossAttentionSpec(16, plan.kv_heads, 64, torch.float16)
    builder = load_backend("XFORMERS").get_builder_cls()(spec, ["layer"], device)
    return batch, builder.build(0, common)


def cross_forward(batch: Any, metadata: Any) -> Any:
    plan = batch.plan
    impl = load_backend("XFORMERS").get_impl_cls()(
        plan.kv_heads * plan.group,
        64,
        64**-0.5,
        plan.kv_heads,
        attn_type="encoder_decoder",
    )
    assert impl.decode_op == "xformers"
    cache = torch.stack([batch.key_cache, batch.value_cache])
    output = torch.full_like(batch.query, float("nan"))
    impl.forward(object(), batch.query, None, None, cache, metadata, output)
    return output


def test_decodes_of_cross_attention_run_in_it(
    launches: list[Any], reference: Twin, device: torch.device
) -> None:
    """A padding request between them brings no query and is left out of the mask."""
    batch, metadata = cross_step([1, 0, 1], [33, 5, 16], reference, device)
    output = cross_forward(batch, metadata)
    assert len(launches) == 1
    assert metadata.attn_bias is None, (
        "the operator does not read the sequence's own keys"
    )
    # one query attends to all keys, whether it counts as the last of them or not
    assert judge_attention(batch, output, reference)[0].ok


@pytest.mark.parametrize("encoders", [[33, 0, 7], [0, 0]])
def test_a_decode_of_a_request_without_encoder_gets_zeros_from_it(
    encoders: list[int], launches: list[Any], reference: Twin, device: torch.device
) -> None:
    """Its kernel says so itself: no weight at all, and no division by it."""
    news = [1] * len(encoders)
    batch, metadata = cross_step(news, encoders, reference, device)
    output = cross_forward(batch, metadata)
    assert len(launches) == 1
    for row, length in zip(output, encoders, strict=True):
        assert bool(row.isfinite().all()) and bool(row.any()) == bool(length)


def test_a_step_says_why_its_decodes_run_in_triton(
    launches: list[Any], reference: Twin, device: torch.device
) -> None:
    batch, _, spec = decodes(device)
    builder = load_backend("XFORMERS").get_builder_cls()(spec, ["layer"], device)
    common = reference.build_common_attn_metadata(
        [1, 1, 1], [32, 0, 15], batch.rows, 16, device
    )
    tree = torch.ones(3, 1, 1, dtype=torch.bool, device=device)
    for changes, reason in (
        ({"tree_mask": tree}, "tree_mask is given"),
        ({"mm_req_doc_ranges": {0: [(30, 34)]}}, "query_ranges is given"),
    ):
        metadata = builder.build(0, common.replace(**changes))
        assert metadata.attn_bias is None
        assert metadata.attn_bias_reason.startswith(reason)
    for causal in (True, False, torch.tensor([True, False, True])):
        metadata = builder.build(0, common.replace(causal=causal))
        assert metadata.attn_bias is not None and not metadata.attn_bias_reason
    builder.init_reorder_batch_threshold(3)
    common = reference.build_common_attn_metadata([3], [7], [[1]], 16, device)
    metadata = builder.build(0, common)
    assert metadata.num_decodes == 1 and metadata.attn_bias is None
    assert metadata.attn_bias_reason.startswith("a decode brings 3 tokens")


def test_a_mask_for_blocks_of_another_size_is_rejected(
    reference: Twin, device: torch.device
) -> None:
    """Its rows would be read as if they counted other blocks."""
    batch, _, spec = decodes(device)
    wrong = replace(spec, block_size=32)
    with pytest.raises(ValueError, match="built for blocks of 32: expected 16"):
        forward(batch, wrong, reference)
