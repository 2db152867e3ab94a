"""Does a layer of each backend write what it was given and attend to what it should?"""

from dataclasses import dataclass, field, fields
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from conftest import Twin
from hypothesis import given, settings
from hypothesis import strategies as st
from pagetwin.conformance.generators.batches import (
    DTYPES,
    LAYOUTS,
    NAN,
    Batch,
    Plan,
    empty_cache,
)
from pagetwin.conformance.oracles.dense import judge_attention, same_bits
from pagetwin.contract.kinds import FP8_DTYPES
from pagetwin.contract.metadata_classes import (
    PART_FIELDS_PER_REQUEST,
    PagedAttentionMetadata,
)
from pagetwin.contract.specs import KVCacheSpec
from pagetwin.engine.backend_interface import AttentionBackend
from pagetwin.engine.selector import TWIN_OF_BACKEND, load_backend
from torch import Tensor

BACKENDS = sorted(TWIN_OF_BACKEND)
FEWER = settings(max_examples=settings().max_examples // 2)


@dataclass(frozen=True)
class Step:
    """One step of a layer, in small numbers: (new tokens, tokens in the cache) a request."""

    requests: tuple[tuple[int, int], ...]
    spec: KVCacheSpec
    group: int = 2
    layout: str = "separate"
    padding: int = 0
    seed: int = 0


@dataclass
class Engine:
    """A cache, its block rows, and a layer of one backend."""

    backend: type[AttentionBackend]
    step: Step
    twin: Twin
    device: torch.device
    rows: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        spec, step = self.step.spec, self.step
        generator = torch.Generator().manual_seed(step.seed)
        self.generator = generator
        counts = [-(-(new + old) // spec.block_size) for new, old in step.requests]
        num_blocks = 3 * sum(counts) + 1
        free = torch.randperm(num_blocks, generator=generator).tolist()
        self.rows = [[free.pop() for _ in range(count)] for count in counts]
        sizes = (num_blocks, spec.block_size, spec.num_kv_heads, spec.head_size)
        cache = empty_cache(step.layout, *sizes, spec.dtype)
        for row, (_, old) in zip(self.rows, step.requests, strict=True):
            for position in range(old):
                block_id = row[position // spec.block_size]
                cache[:, block_id, position % spec.block_size] = self.random(2)
        self.cache = empty_cache(step.layout, *sizes, spec.dtype, self.device)
        self.cache.copy_(cache)
        heads = step.group * spec.num_kv_heads
        self.impl = self.backend.get_impl_cls()(
            heads, spec.head_size, spec.head_size**-0.5, spec.num_kv_heads
        )
        self.builder = self.backend.get_builder_cls()(spec, ["layer.0"], self.device)

    def random(self, *shape: int) -> Tensor:
        spec = self.step.spec
        full = (*shape, spec.num_kv_heads, spec.head_size)
        return torch.randn(full, generator=self.generator).to(spec.dtype)

    def metadata(self) -> tuple[PagedAttentionMetadata, list[int]]:
        """Return the step's metadata, decodes first, and the order of its requests."""
        new = [each[0] for each in self.step.requests]
        order = self.twin.reorder_batch_to_split_decodes_and_prefills(new)
        requests = [self.step.requests[req] for req in order]
        common = self.twin.build_common_attn_metadata(
            [each[0] for each in requests],
            [each[1] for each in requests],
            [self.rows[req] for req in order],
            self.step.spec.block_size,
            self.device,
        )
        return self.builder.build(0, common), order

    def projection(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value as slices of one tensor; padding rows are NaN."""
        group = self.step.group
        fused = torch.cat([self.random(tokens) for _ in range(group + 2)], 1)
        padding = torch.full_like(fused[:1], NAN).repeat(self.step.padding, 1, 1)
        fused = torch.cat([fused, padding]).to(self.device)
        heads = self.step.spec.num_kv_heads
        query, key, value = fused.split([group * heads, heads, heads], dim=1)
        return query, key, value


def run(engine: Engine, reference: Twin) -> None:
    """Run one step and assert everything a layer promises."""
    step, spec, device = engine.step, engine.step.spec, engine.device
    metadata, order = engine.metadata()
    requests = [step.requests[req] for req in order]
    rows = [engine.rows[req] for req in order]
    tokens = sum(new for new, _ in requests)
    query, key, value = engine.projection(tokens)
    output = torch.full(query.shape, NAN, dtype=spec.dtype, device=device)
    expected = engine.cache.clone()
    token = 0
    for row, (new, old) in zip(rows, requests, strict=True):
        for position in range(old, old + new):
            place = row[position // spec.block_size], position % spec.block_size
            expected[0, place[0], place[1]] = key[token]
            expected[1, place[0], place[1]] = value[token]
            token += 1
    inputs = [each.clone() for each in (query, key, value)]
    returned = engine.impl.forward(
        object(), query, key, value, engine.cache, metadata, output
    )
    assert returned is output
    assert all(map(same_bits, inputs, (query, key, value)))
    assert same_bits(engine.cache, expected)
    assert bool(output[tokens:].isnan().all()), "padding rows are left as they are"
    new_lens = tuple(new for new, _ in requests)
    kv_lens = tuple(new + old for new, old in requests)
    batch = Batch(
        plan=Plan(new_lens, kv_lens, spec.block_size, dtype=spec.dtype),
        query=query[:tokens],
        key_cache=expected[0],
        value_cache=expected[1],
        block_table=reference.make_block_table(rows, device=device),
        query_start_loc=torch.tensor(
            [0, *accumulate(new_lens)], dtype=torch.int32, device=device
        ),
        seq_lens=torch.tensor(kv_lens, dtype=torch.int32, device=device),
        max_query_len=max(new_lens, default=0),
        max_seq_len=max(kv_lens, default=0),
        rows=rows,
    )
    verdict, _ = judge_attention(batch, output[:tokens], reference)
    assert verdict.ok, verdict


def specs_of(name: str) -> st.SearchStrategy[KVCacheSpec]:
    """Return the specs that a backend takes."""
    is_xformers = name == "XFORMERS"
    return st.builds(
        KVCacheSpec,
        block_size=st.sampled_from([16, 48] if is_xformers else [1, 3, 16]),
        num_kv_heads=st.sampled_from([1, 2]),
        head_size=st.sampled_from([32, 40, 64] if is_xformers else [8, 24, 64]),
        dtype=st.sampled_from(DTYPES[:2] if is_xformers else DTYPES),
    )


@pytest.mark.parametrize("name", BACKENDS)
@FEWER
@given(data=st.data())
def test_a_layer_writes_and_attends(
    name: str, data: st.DataObject, reference: Twin, device: torch.device
) -> None:
    """Decodes, prefills, chunks and idle requests in any order, over any layout of cache."""
    news = st.sampled_from([0, 1, 1, 1, 2, 7, 18])
    olds = st.sampled_from([0, 1, 15, 16, 17, 33])
    step = Step(
        requests=tuple(data.draw(st.lists(st.tuples(news, olds), max_size=4))),
        spec=data.draw(specs_of(name)),
        group=data.draw(st.sampled_from([1, 2, 5])),
        layout=data.draw(st.sampled_from(LAYOUTS)),
        padding=data.draw(st.sampled_from([0, 2])),
        seed=data.draw(st.integers(0, 999)),
    )
    run(Engine(load_backend(name), step, reference, device), reference)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_layer_runs_metadata_of_its_own_twin(
    name: str, twin: Twin, reference: Twin, device: torch.device
) -> None:
    spec = KVCacheSpec(16, 2, 64, torch.float16)
    step = Step(((5, 12), (1, 30), (0, 4), (1, 0)), spec, padding=1)
    run(Engine(load_backend(name), step, twin, device), reference)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_batch_of_many_kinds_keeps_its_budget(
    name: str, reference: Twin, device: torch.device
) -> None:
    """Long beside short, chunks that end inside a block, more queries than a tile holds."""
    spec = KVCacheSpec(16, 2, 64, torch.bfloat16)
    requests = ((1, 150), (40, 0), (1, 0), (3, 61), (1, 16), (17, 31))
    run(Engine(load_backend(name), Step(requests, spec), reference, device), reference)


@pytest.mark.parametrize("name", BACKENDS)
def test_only_decodes_and_only_prefills(
    name: str, reference: Twin, device: torch.device
) -> None:
    spec = KVCacheSpec(16, 1, 32, torch.float16)
    for requests in (((1, 9), (1, 40)), ((9, 0), (2, 40)), ((0, 5), (0, 0)), ()):
        engine = Engine(load_backend(name), Step(requests, spec), reference, device)
        run(engine, reference)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_profiling_run_leaves_everything_as_it_is(
    name: str, reference: Twin, device: torch.device
) -> None:
    spec = KVCacheSpec(16, 2, 64, torch.float16)
    engine = Engine(load_backend(name), Step(((3, 4),), spec), reference, device)
    query, key, value = engine.projection(3)
    output = torch.full_like(query, 7.0)
    before = engine.cache.clone()
    returned = engine.impl.forward(
        object(), query, key, value, engine.cache, None, output
    )
    assert returned is output and bool((output == 7).all())
    assert same_bits(engine.cache, before)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_sequence_served_in_steps_is_the_sequence_at_once(
    name: str, reference: Twin, device: torch.device
) -> None:
    """Two chunks and three decodes, each step reading what the earlier ones wrote."""
    spec = KVCacheSpec(16, 1, 32, torch.float16)
    whole = Engine(load_backend("REFERENCE"), Step(((38, 0),), spec), reference, device)
    query, key, value = whole.projection(38)
    output = torch.full_like(query, NAN)
    metadata, _ = whole.metadata()
    whole.impl.forward(
        object(), query, key, value, whole.cache, metadata, torch.empty_like(query)
    )
    steps = Engine(load_backend(name), Step(((38, 0),), spec), reference, device)
    edges = [0, 18, 35, 36, 37, 38]
    for begin, end in pairwise(edges):
        common = reference.build_common_attn_metadata(
            [end - begin], [begin], steps.rows, 16, device
        )
        own = slice(begin, end)
        steps.impl.forward(
            object(),
            query[own],
            key[own],
            value[own],
            steps.cache,
            steps.builder.build(0, common),
            output[own],
        )
    assert same_bits(whole.cache, steps.cache)
    batch = Batch(
        plan=Plan((38,), (38,), 16, kv_heads=1, head_size=32, dtype=spec.dtype),
        query=query,
        key_cache=whole.cache[0],
        value_cache=whole.cache[1],
        block_table=metadata.block_table,
        query_start_loc=metadata.query_start_loc,
        seq_lens=metadata.seq_lens,
        max_query_len=38,
        max_seq_len=38,
        rows=whole.rows,
    )
    verdict, _ = judge_attention(batch, output, reference)
    assert verdict.ok, verdict


@pytest.mark.parametrize("name", BACKENDS)
def test_the_metadata_names_every_field_of_the_step(
    name: str, reference: Twin, device: torch.device
) -> None:
    spec = KVCacheSpec(16, 2, 64, torch.float16)
    step = Step(((5, 12), (1, 30)), spec)
    metadata, order = Engine(load_backend(name), step, reference, device).metadata()
    assert order == [1, 0]
    expected: dict[str, Any] = {
        "causal": True,
        "num_actual_tokens": 6,
        "max_query_len": 5,
        "query_start_loc": [0, 1, 6],
        "query_start_loc_cpu": [0, 1, 6],
        "max_seq_len": 31,
        "seq_lens": [31, 17],
        "seq_lens_cpu": [31, 17],
        "num_decodes": 1,
        "num_decode_tokens": 1,
        "num_prefills": 1,
        "num_prefill_tokens": 5,
    }
    for each, value in expected.items():
        found = getattr(metadata, each)
        assert (found.tolist() if isinstance(found, Tensor) else found) == value, each
    # what a step has only if somebody sets it
    for each in fields(metadata):
        if each.name not in {*expected, "block_table", "slot_mapping", "attn_bias"}:
            assert not getattr(metadata, each.name), each.name


@pytest.mark.parametrize("name", BACKENDS)
def test_both_parts_of_a_step_keep_what_belongs_to_their_requests(
    name: str, reference: Twin, device: torch.device
) -> None:
    """Flags, trees, images and encoders of a decode, a padding request and two prefills."""
    spec = KVCacheSpec(16, 2, 64, torch.float16)
    builder = load_backend(name).get_builder_cls()(spec, ["layer"], device)
    news, rows = [1, 0, 3, 2], [[3], [], [5], [7]]
    common = reference.build_common_attn_metadata(news, [8, 0, 0, 4], rows, 16, device)

    def counts(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    lens, starts = counts(9, 0, 4, 2), counts(0, 0, 0, 4, 6)
    step = common.replace(
        causal=torch.tensor([True, True, False, True], device=device),
        tree_mask=torch.arange(4, device=device).view(4, 1, 1) % 2 == 0,
        mm_req_doc_ranges={2: [(1, 2)], 0: [(8, 9)]},
        encoder_seq_lens=lens.to(device),
        encoder_seq_lens_cpu=lens,
        encoder_query_start_loc=starts.to(device),
        encoder_query_start_loc_cpu=starts,
        cross_block_table_tensor=counts(30, 31, 32, 33)[:, None].to(device),
        cross_slot_mapping=torch.arange(500, 506, device=device),
    )
    metadata = builder.build(0, step)
    decodes, prefills = metadata.decode_metadata, metadata.prefill_metadata
    assert decodes is not None and prefills is not None
    assert metadata.max_encoder_seq_len == 9 and metadata.causal is step.causal
    expected: dict[str, tuple[Any, Any]] = {
        "causal": ([True, True], [False, True]),
        "tree_mask": ([[[True]], [[False]]], [[[True]], [[False]]]),
        "query_ranges": ([[8, 9]], [[-1, -1], [1, 2], [1, 2], [-1, -1], [-1, -1]]),
        "encoder_seq_lens": ([9, 0], [4, 2]),
        "encoder_seq_lens_cpu": ([9, 0], [4, 2]),
        "max_encoder_seq_len": (9, 4),
        "encoder_query_start_loc": ([0, 0, 0], [0, 4, 6]),
        "encoder_query_start_loc_cpu": ([0, 0, 0], [0, 4, 6]),
        "cross_block_table": ([[30], [31]], [[32], [33]]),
        "cross_slot_mapping": ([], [500, 501, 502, 503, 504, 505]),
    }
    for field_name, both in expected.items():
        for part, value in zip((decodes, prefills), both, strict=True):
            found = getattr(part, field_name)
            found = found.tolist() if isinstance(found, Tensor) else found
            assert found == value, field_name
    crossing = prefills.cross_metadata
    assert crossing.seq_lens.tolist() == [4, 2] and crossing.max_seq_len == 4
    assert crossing.block_table.tolist() == [[32], [33]]
    assert (crossing.causal, crossing.tree_mask, crossing.query_ranges) == (
        False,
        None,
        None,
    )
    assert builder.build(0, common.replace(causal=False)).causal is False


@pytest.mark.parametrize("name", BACKENDS)
def test_a_bound_on_the_encoders_is_kept_as_it_is_given(
    name: str, reference: Twin, device: torch.device
) -> None:
    """A captured step is replayed with longer encoders than it was captured with."""
    spec = KVCacheSpec(16, 2, 64, torch.float16)
    builder = load_backend(name).get_builder_cls()(spec, ["layer"], device)
    common = reference.build_common_attn_metadata([1], [8], [[3]], 16, device)
    lens = torch.tensor([5], dtype=torch.int32)
    step = common.replace(encoder_seq_lens_cpu=lens, max_encoder_seq_len=77)
    assert builder.build(0, step).max_encoder_seq_len == 77
    with pytest.raises(ValueError, match="encoder_query_start_loc = None: expected"):
        builder.build(0, common.replace(cross_slot_mapping=torch.tensor([4])))


def test_every_field_of_a_request_is_cut_in_both_parts() -> None:
    """A field that is added later must be named here, or a part would keep the whole."""
    cut_by_hand = {
        "num_actual_tokens",
        "max_query_len",
        "query_start_loc",
        "query_start_loc_cpu",
        "max_seq_len",
        "slot_mapping",
        "num_decodes",
        "num_decode_tokens",
        "num_prefills",
        "num_prefill_tokens",
        "query_ranges",
        "max_encoder_seq_len",
        "encoder_query_start_loc",
        "encoder_query_start_loc_cpu",
        "cross_slot_mapping",
    }
    names = {each.name for each in fields(PagedAttentionMetadata)}
    assert not cut_by_hand & set(PART_FIELDS_PER_REQUEST)
    assert names == cut_by_hand | set(PART_FIELDS_PER_REQUEST)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_takes_quantised_caches_and_says_once_what_it_does_not_take(
    name: str, device: torch.device
) -> None:
    backend = load_backend(name)
    for dtype in FP8_DTYPES:
        spec = KVCacheSpec(16, 2, 64, dtype)
        assert not backend.validate_configuration(spec, device)
    wrong = KVCacheSpec(16, 2, 64, torch.int8)
    (reason,) = backend.validate_configuration(wrong, device)
    assert reason.startswith("dtype = torch.int8: expected one of torch.float16")
    assert str(FP8_DTYPES[0]) in reason


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_names_its_own_classes(name: str) -> None:
    backend = load_backend(name)
    assert backend.get_name() == backend.name == name
    assert issubclass(backend.get_metadata_cls(), PagedAttentionMetadata)
    assert backend.get_kv_cache_shape(10, 16, 8, 64) == (2, 10, 16, 8, 64)
    for cls in (backend.get_impl_cls(), backend.get_builder_cls()):
        assert cls.__module__ == backend.__module__
