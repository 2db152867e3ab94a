"""Does a layer of each backend write what it was given and attend to what it should?"""

from dataclasses import dataclass, field, fields
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from batches import DTYPES, LAYOUTS, NAN, Batch, Plan, empty_cache
from conftest import Twin
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import judge_attention, same_bits
from pagetwin.shared.backend_interface import AttentionBackend
from pagetwin.shared.metadata_classes import PagedAttentionMetadata
from pagetwin.shared.selector import TWIN_OF_BACKEND, load_backend
from pagetwin.shared.specs import KVCacheSpec
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
    outputs = torch.full_like(query, NAN), torch.full_like(query, NAN)
    metadata, _ = whole.metadata()
    whole.impl.forward(object(), query, key, value, whole.cache, metadata, outputs[0])
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
            outputs[1][own],
        )
    assert same_bits(whole.cache, steps.cache)
    assert torch.allclose(outputs[0], outputs[1], atol=2e-3)


@pytest.mark.parametrize("name", BACKENDS)
def test_the_metadata_names_every_field_of_the_step(
    name: str, reference: Twin, device: torch.device
) -> None:
    spec = KVCacheSpec(16, 2, 64, torch.float16)
    step = Step(((5, 12), (1, 30)), spec)
    metadata, order = Engine(load_backend(name), step, reference, device).metadata()
    assert order == [1, 0]
    expected: dict[str, Any] = {
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
    left = {each.name for each in fields(metadata)} - set(expected)
    assert left - {"attn_bias"} == {"block_table", "slot_mapping"}


@pytest.mark.parametrize("name", BACKENDS)
def test_a_batch_that_is_not_causal_is_refused(
    name: str, reference: Twin, device: torch.device
) -> None:
    from dataclasses import replace

    spec = KVCacheSpec(16, 2, 64, torch.float16)
    engine = Engine(load_backend(name), Step(((5, 12),), spec), reference, device)
    common = reference.build_common_attn_metadata([5], [12], engine.rows, 16, device)
    with pytest.raises(ValueError, match="causal = False: expected causal attention"):
        engine.builder.build(0, replace(common, causal=False))


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_names_its_own_classes(name: str) -> None:
    backend = load_backend(name)
    assert backend.get_name() == backend.name == name
    assert issubclass(backend.get_metadata_cls(), PagedAttentionMetadata)
    assert backend.get_kv_cache_shape(10, 16, 8, 64) == (2, 10, 16, 8, 64)
    for cls in (backend.get_impl_cls(), backend.get_builder_cls()):
        assert cls.__module__ == backend.__module__
