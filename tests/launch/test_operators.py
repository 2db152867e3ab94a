"""Is a compiled model's attention the same, and is it one graph?

Each operation that a model's forward calls is an operator of torch: torch's own check of operators
runs on drawn calls of all of them, and small functions are compiled and held against what they do
uncompiled, bit for bit, what is written included.
"""

import copy
import math
import random
import sys
from collections.abc import Callable, Iterator
from importlib.util import module_from_spec, spec_from_file_location
from inspect import signature
from typing import Any

import pytest
import torch
from pagetwin.conformance.cases import latent_batches
from pagetwin.conformance.cases.batches import BatchPlan, build
from pagetwin.conformance.cases.choice_calls import build_call
from pagetwin.conformance.cases.options import Call
from pagetwin.conformance.checks.dense import same_bits
from pagetwin.conformance.laws.attention import SMALL, SMALL_RAGGED
from pagetwin.conformance.laws.indexer import (
    Indexed,
    arguments_of_write,
    build_indexed,
)
from pagetwin.conformance.laws.sparse_attention import SparsePlan, build_sparse
from pagetwin.conformance.laws.sparse_records import RECORD_PLANS, build_records
from pagetwin.conformance.laws.sparse_slots import arguments_for_slots
from pagetwin.contract.attention_options import (
    OPTION_NAMES,
    AttentionOptions,
    pack_options,
    unpack_options,
)
from pagetwin.contract.cache_formats import TENSOR_SCALE_DTYPES
from pagetwin.contract.operations import CONCEPTS, Implementation, load_implementation
from pagetwin.contract.shapes import KVCache
from pagetwin.engine.layer import Attention
from pagetwin.engine.selector import load_backend
from pagetwin.optimized.runtime import operators as _operators
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal import optests
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.long

TWIN = load_implementation("optimized")
OPERATORS = sorted(
    name
    for concept in CONCEPTS
    for name in concept.operations
    if hasattr(torch.ops.pagetwin, name)
)
BUFFERS = ("out", "lse", "output", "output_lse")
"""Arguments that are written where they are given."""

Arguments = dict[str, Any]


@pytest.fixture(autouse=True)
def forget_what_was_compiled() -> Iterator[None]:
    """Count each test's compilations from none."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def with_buffers(call: Call) -> Arguments:
    """Return a drawn call's arguments, with the output and the log-sum-exp that it asks for."""
    tokens, heads, _ = call.query.shape
    values = call.arguments.get("value_cache", call.arguments.get("value"))
    assert values is not None
    given = call.keywords
    if call.out_dtype is not None:
        size = (tokens, heads, values.shape[-1])
        given["out"] = call.query.new_zeros(size, dtype=call.out_dtype)
    if call.wants_lse:
        given["lse"] = call.query.new_zeros(heads, tokens, dtype=torch.float32)
    return given


def buffers_of(arguments: Arguments, value_size: int | None = None) -> Arguments:
    """Return the arguments with an output and a log-sum-exp of the queries' shape."""
    query = arguments.get("query", arguments.get("q_nope"))
    assert query is not None
    tokens, heads, size = query.shape
    out = query.new_zeros(tokens, heads, value_size or size)
    lse = query.new_zeros(heads, tokens, dtype=torch.float32)
    return arguments | {"out": out, "lse": lse}


def draw_attention(name: str, device: torch.device) -> list[Arguments]:
    own = SMALL[::2] if name == "paged_attention" else SMALL_RAGGED
    return [with_buffers(build_call(*sizes, device)) for sizes in own]


def draw_batch(seed: int, device: torch.device) -> Arguments:
    """Return arguments of `paged_attention`: ragged, of scattered blocks, with poison around."""
    pick = random.Random(seed)
    new = [pick.randint(1, 5) for _ in range(pick.randint(1, 3))]
    lens = [query_len + 16 + pick.randint(0, 20) for query_len in new]
    plan = BatchPlan(tuple(new), tuple(lens), group=pick.choice([1, 3]), seed=seed)
    batch = build(plan, device)
    # every request begins with the same block, for the cascade
    batch.block_table[:, 0] = batch.block_table[0, 0].clone()
    return batch.arguments()


def draw_paged(name: str, device: torch.device) -> list[Arguments]:
    batches = [draw_batch(seed, device) for seed in range(2)]
    extra: Arguments = {"common_prefix_len": 16}
    if name == "dcp_attention":
        extra = {"dcp_world_size": 2, "dcp_rank": 1, "dcp_kv_cache_interleave_size": 3}
    return [
        batches[0] | extra,
        buffers_of(batches[1] | extra),
        packed(batches[0] | extra, device),
    ]


def packed(arguments: Arguments, device: torch.device) -> Arguments:
    """Return the call over a cache of bytes with two codes each, and a scale per slot and head."""
    shape = arguments["key_cache"].shape
    codes = torch.zeros(*shape[:3], shape[3] // 2, dtype=torch.uint8, device=device)
    scales = torch.ones(shape[:3], device=device)
    options = AttentionOptions(k_scale=scales, v_scale=scales.clone())
    caches = {"key_cache": codes, "value_cache": codes.clone()}
    return arguments | caches | {"options": options}


def draw_latents(name: str, device: torch.device) -> list[Arguments]:
    found = []
    for seed, cache_dtype in enumerate([None, None, torch.float8_e4m3fn]):
        plan = latent_batches.LatentPlan(
            (2, 1), (8, 20), cache_dtype=cache_dtype, seed=seed
        )
        batch = latent_batches.build_latents(plan, device)
        if name == "latent_decode_attention":
            found.append(batch.decode_arguments())
        else:
            found.append(batch.prefill_arguments())
    found[1] |= {"max_context_chunk": 13} if name == "latent_prefill_attention" else {}
    found[1] = buffers_of(found[1], plan.value)
    return [pack_options(**arguments) for arguments in found]


def draw_writes(name: str, device: torch.device) -> list[Arguments]:
    slots = torch.tensor([9, -1, 4, 30], device=device)
    if name == "concat_and_cache_mla":
        given: Arguments = {
            "kv_c": torch.randn(4, 16, device=device),
            "k_pe": torch.randn(4, 8, device=device),
            "kv_cache": torch.zeros(4, 8, 24, device=device),
        }
        records: Arguments = {
            "kv_c": torch.randn(4, 512, device=device),
            "k_pe": torch.randn(4, 64, device=device),
            "kv_cache": torch.zeros(4, 8, 352, dtype=torch.uint8, device=device),
        }
        return [given | {"slot_mapping": slots}, records | {"slot_mapping": slots}]
    # both caches are views of one tensor
    key_cache, value_cache = torch.zeros(2, 4, 8, 2, 16, device=device)
    given = {
        "key": torch.randn(4, 2, 16, device=device),
        "value": torch.randn(4, 2, 16, device=device),
        "key_cache": key_cache,
        "value_cache": value_cache,
    }
    return [given | {"slot_mapping": slots}]


def draw_reads(name: str, device: torch.device) -> list[Arguments]:
    caches = torch.randn(2, 4, 8, 2, 16, device=device)
    fp8 = caches.to(torch.float8_e4m3fn)
    batch = {
        "block_table": torch.tensor([[2, 0], [3, 1]], device=device).int(),
        "seq_start_loc": torch.tensor([0, 9, 12], device=device).int(),
        "num_tokens": 14,
    }
    if name == "gather_latent_cache":
        rows = torch.zeros(batch.pop("num_tokens"), 576, device=device)
        records = torch.zeros(4, 8, 656, dtype=torch.uint8, device=device)
        return [{"kv_cache": records, "latents": rows} | batch]
    scales = {"k_scale": 0.5, "v_scale": torch.tensor([0.5, 2.0], device=device)}
    return [
        {"key_cache": caches[0], "value_cache": caches[1, ..., :11]} | batch,
        {"key_cache": fp8[0], "value_cache": fp8[1], "dtype": torch.float16}
        | batch
        | scales,
    ]


def draw_copies(name: str, device: torch.device) -> list[Arguments]:
    first, second = torch.randn(2, 2, 4, 8, 2, 16, device=device)
    pairs = torch.tensor([[0, 2], [3, 1]])
    if name == "copy_blocks":
        return [{"kv_caches": [first, second], "block_mapping": pairs}]
    return [{"source": first, "destination": second, "block_mapping": pairs}]


def draw_slots(name: str, device: torch.device) -> list[Arguments]:
    if name != "compute_slot_mapping_device":
        return [arguments_for_slots(device)[name]]
    return [
        {
            "query_start_loc": torch.tensor([0, 3, 4], device=device).int(),
            "num_computed_tokens": torch.tensor([6, 0], device=device).int(),
            "block_table": torch.tensor([[7, 2, 5], [1, 0, 0]], device=device).int(),
            "block_size": 4,
            "num_tokens": 6,
        }
    ]


def draw_selections(name: str, device: torch.device) -> list[Arguments]:
    if name == "sparse_attention":
        plans = SparsePlan((3, 0)), SparsePlan((2, 9), options=("sinks",))
        calls = [build_sparse(plan, device) for plan in plans]
        found = [
            {
                name: getattr(call, name)
                for name in ("query", "key_cache", "value_cache", "slots")
            }
            | pack_options(**call.options)
            for call in calls
        ]
        return [found[0], buffers_of(found[1])]
    if name == "index_scores":
        return [
            build_indexed(Indexed((2, 1), (5, 1), dtype=dtype), device).given
            for dtype in (torch.float32, torch.float8_e4m3fn)
        ]
    if name == "select_keys":
        return [{"scores": torch.randn(3, 9, device=device), "topk": 4}]
    if name == "indexer_k_quant_and_cache":
        return [arguments_of_write(device) | {"scale_fmt": "ue8m0"}]
    return [
        {
            "req_id": torch.tensor([1, -1], device=device).int(),
            "block_table": torch.tensor([[7, 2, 5], [1, 0, 0]], device=device).int(),
            "token_indices": torch.tensor([[3, -1, 9], [0, 1, 2]], device=device).int(),
            "block_size": 4,
            "compact_valid_to_front": True,
        }
    ]


def draw_states(name: str, device: torch.device) -> list[Arguments]:
    outputs = torch.randn(2, 5, 3, 16, device=device)
    lses = torch.randn(2, 5, 3, device=device)
    if name == "lse_weighted_combine":
        half = outputs.half()
        return [
            {"outputs": outputs, "lses": lses},
            {"outputs": half, "lses": lses, "is_lse_base_on_e": False},
        ]
    prefix, suffix = lses.transpose(1, 2).contiguous()
    states: Arguments = {
        # its heads come first: the result's strides are not the argument's
        "prefix_output": outputs[0].transpose(0, 1).contiguous().transpose(0, 1),
        "prefix_lse": prefix,
        "suffix_output": outputs[1],
        "suffix_lse": suffix,
    }
    buffers = {
        "output": torch.zeros_like(outputs[0]),
        "output_lse": torch.zeros_like(prefix),
    }
    return [states, states | buffers | {"prefix_lse_base": 2, "suffix_lse_base": 2}]


DRAWN: dict[str, Callable[[str, torch.device], list[Arguments]]] = {
    "paged_attention": draw_attention,
    "encoder_attention": draw_attention,
    "cascade_attention": draw_paged,
    "dcp_attention": draw_paged,
    "latent_decode_attention": draw_latents,
    "latent_prefill_attention": draw_latents,
    "concat_and_cache_mla": draw_writes,
    "reshape_and_cache": draw_writes,
    "gather_cache": draw_reads,
    "gather_latent_cache": draw_reads,
    "copy_blocks": draw_copies,
    "swap_blocks": draw_copies,
    "compute_slot_mapping_device": draw_slots,
    "convert_req_index_to_global_index": draw_selections,
    "index_scores": draw_selections,
    "indexer_k_quant_and_cache": draw_selections,
    "get_compressed_slot_mapping": draw_slots,
    "compute_swa_indices_and_lens": draw_slots,
    "compute_kpool_tail_slot_mapping": draw_slots,
    "select_keys": draw_selections,
    "sparse_attention": draw_selections,
    "merge_attn_states": draw_states,
    "lse_weighted_combine": draw_states,
}


def lowered(name: str, arguments: Arguments) -> tuple[Any, Arguments]:
    """Return the overload that a call means, and its arguments as the overload has them."""
    packet = getattr(torch.ops.pagetwin, name)
    overload = packet.default
    if any(arguments.get(buffer) is not None for buffer in BUFFERS):
        overload = packet.out
    names = {argument.name for argument in overload._schema.arguments}
    arguments = dict(arguments)
    if "options" in arguments:
        arguments |= unpack_options(arguments.pop("options"))
    found = {}
    for key, value in arguments.items():
        is_union = isinstance(value, Tensor) and f"{key}_tensor" in names
        found[f"{key}_tensor" if is_union else key] = value
    return overload, found


def is_fp8(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in TENSOR_SCALE_DTYPES


def with_each(change: Callable[[Tensor], Tensor], arguments: Arguments) -> Arguments:
    """Return arguments with every tensor changed, those among the options included."""
    found = dict(arguments)
    if "options" in found:
        own = unpack_options(found.pop("options"))
        found |= pack_options(**with_each(change, own))
    return torch.utils._pytree.tree_map_only(Tensor, change, found)  # type: ignore[no-any-return]


def assert_same(found: Any, expected: Any) -> None:
    """Assert that results are equal in structure and in every bit."""
    if isinstance(expected, AttentionOptions):
        found, expected = unpack_options(found), unpack_options(expected)
    if isinstance(expected, Tensor):
        assert found.shape == expected.shape and found.stride() == expected.stride()
        assert same_bits(found.flatten(), expected.flatten())
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_same(found[key], value)
    elif isinstance(expected, tuple | list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected


def test_what_a_forward_calls_is_an_operator() -> None:
    registered = {
        name.removeprefix("pagetwin::").partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("pagetwin::")
    }
    assert registered == set(OPERATORS) == set(DRAWN)


@pytest.mark.parametrize("name", OPERATORS)
def test_torch_finds_no_fault_in_an_operator(name: str, device: torch.device) -> None:
    """Its schema, its results without contents, and a graph of it with symbolic sizes."""
    graphed: set[Any] = set()
    for arguments in DRAWN[name](name, device)[:3]:
        if "lse" in arguments and "out" not in arguments:
            continue  # without such an overload: the call makes an output itself
        overload, given = lowered(name, arguments)
        checks = set(optests.generate_tests.DEFAULT_TEST_UTILS)
        if any(is_fp8(argument) for argument in given.values()):
            checks -= {"test_schema"}  # it compares tensors, which torch cannot in FP8
        if overload in graphed:
            checks -= {"test_aot_dispatch_dynamic"}  # it is a property of the overload
        graphed.add(overload)
        torch.library.opcheck(overload, (), given, test_utils=sorted(checks))


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_is_the_operation(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through torch's dispatcher every argument arrives, and the same bits come back."""
    operation = getattr(TWIN, name)
    for arguments in DRAWN[name](name, device):
        open_call = copy.deepcopy(arguments)
        expected = operation(**open_call)
        with monkeypatch.context() as patch:
            patch.setitem(operation.__globals__, "is_compiling", lambda: True)
            found = operation(**arguments)
        assert_same(found, expected)
        assert_same(arguments, open_call)
        for buffer in ("out", "output"):
            assert buffer not in arguments or found is arguments[buffer]


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_returns_none_of_its_arguments(name: str) -> None:
    packet = getattr(torch.ops.pagetwin, name)
    for overload in map(packet.__getattr__, packet.overloads()):
        schema = overload._schema
        written = [argument.name for argument in schema.arguments if argument.is_write]
        assert all(result.alias_info is None for result in schema.returns)
        assert bool(written) == (not schema.returns)


class Seen(TorchDispatchMode):
    """Collects the names of the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", OPERATORS)
def test_a_call_that_is_not_traced_takes_no_operator(
    name: str, device: torch.device
) -> None:
    """A mode that only watches gets what the function does inside."""
    with Seen() as seen:
        getattr(TWIN, name)(**DRAWN[name](name, device)[0])
    assert not [name for name in seen.names if name.startswith("pagetwin")]


@pytest.mark.parametrize("name", OPERATORS)
def test_without_contents_an_operation_says_what_it_returns(
    name: str, device: torch.device
) -> None:
    for arguments in DRAWN[name](name, device):
        with FakeTensorMode() as mode:
            fake = with_each(mode.from_tensor, arguments)
            found = getattr(TWIN, name)(**fake)
        expected = getattr(TWIN, name)(**arguments)
        leaves = torch.utils._pytree.tree_leaves
        for one, other in zip(leaves(found), leaves(expected), strict=True):
            if other is not None:
                assert (one.shape, one.stride()) == (other.shape, other.stride())
                assert (one.dtype, one.device) == (other.dtype, other.device)


def step(
    cache: Tensor,
    key: Tensor,
    value: Tensor,
    query: Tensor,
    batch: dict[str, Any],
    computed: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Write a step's keys and values and attend, as a layer of a model does."""
    slots = TWIN.compute_slot_mapping_device(
        batch["query_start_loc"], computed, batch["block_table"], 16, key.shape[0]
    )
    key_cache, value_cache = TWIN.split_kv_cache(cache)
    TWIN.reshape_and_cache(key * 2, value, key_cache, value_cache, slots)
    out = torch.empty_like(query)
    lse = query.new_empty(query.shape[1], query.shape[0])
    seen = TWIN.paged_attention(
        query, key_cache, value_cache, **batch, out=out, lse=lse
    )
    window = TWIN.paged_attention(
        query,
        key_cache,
        value_cache,
        **batch,
        lse=lse,
        options=AttentionOptions(sliding_window=9),
    )
    # a second write comes after what was read
    TWIN.reshape_and_cache(key * 3, value, key_cache, value_cache, slots)
    causal = torch.ones_like(computed, dtype=torch.bool)
    again = TWIN.paged_attention(
        query + 1,
        key_cache,
        value_cache,
        **batch,
        options=AttentionOptions(causal=causal),
    )
    return seen * 2, window + again, lse


def draw_step(
    query_lens: list[int], computed: list[int], device: torch.device
) -> tuple[Any, ...]:
    """Return the arguments of a step, whose requests own scattered blocks of 16 slots."""
    generator = torch.Generator().manual_seed(len(query_lens))

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    lens = [sum(counts) for counts in zip(query_lens, computed, strict=True)]
    table = torch.randperm(3 * len(lens), generator=generator).view(-1, 3)
    starts = torch.tensor([0, *query_lens]).cumsum(0)
    batch = {
        "block_table": table.int().to(device),
        "query_start_loc": starts.int().to(device),
        "seq_lens": torch.tensor(lens, device=device).int(),
        "max_query_len": max(query_lens),
        "max_seq_len": max(lens),
    }
    tokens = sum(query_lens)
    vectors = (draw(tokens, 2, 16), draw(tokens, 2, 16), draw(tokens, 6, 16))
    known = torch.tensor(computed, device=device).int()
    return draw(2, 3 * len(lens), 16, 2, 16), *vectors, batch, known


STEPS = (([3, 1], [4, 20]), ([2, 1, 5], [18, 0, 7]), ([1, 1, 1, 1], [9, 30, 2, 40]))


def test_a_compiled_step_is_one_graph_and_the_same_in_every_bit(
    device: torch.device,
) -> None:
    arguments = draw_step(*STEPS[0], device)
    uncompiled = copy.deepcopy(arguments)
    expected = step(*uncompiled)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert_same(compiled(*arguments), expected)
    assert_same(arguments, uncompiled)
    explained = torch._dynamo.explain(step)(*arguments)
    assert explained.graph_break_count == 0
    assert explained.graph_count == 1


def test_the_two_caches_may_be_arguments_of_their_own(device: torch.device) -> None:
    """They are in one tensor; torch is told of the writes through both."""

    def write(
        key: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
    ) -> Tensor:
        TWIN.reshape_and_cache(key, key + 1, key_cache, value_cache, slots)
        return key_cache.sum() + value_cache.sum()

    key = torch.randn(3, 2, 16, device=device)
    slots = torch.tensor([5, -1, 12], device=device)
    caches = [torch.zeros(2, 4, 4, 2, 16, device=device) for _ in range(2)]
    expected = write(key, *caches[0], slots)
    compiled = torch.compile(write, fullgraph=True, backend="aot_eager")
    assert_same(compiled(key, *caches[1], slots), expected)
    assert_same(caches[1], caches[0])


def test_a_compiled_call_over_records_returns_the_elements_of_latents(
    device: torch.device,
) -> None:
    """The last axis of records counts bytes, and two codes per byte in another format."""
    call = build_records("nvfp4_ds_mla", RECORD_PLANS[0], device)

    def attend(query: Tensor, records: Tensor, slots: Tensor) -> Tensor:
        cache = records[:, :, None]
        return TWIN.sparse_attention(query, cache, cache, slots) + 1

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    given = call.query, call.key_cache[:, :, 0], call.slots
    found = compiled(*given)
    assert found.shape == (*call.query.shape[:2], 512)
    assert torch.equal(found, attend(*given))


def test_another_batch_size_compiles_at_most_once_more(device: torch.device) -> None:
    """Sizes are marked as changing; the two maxima are numbers, found to change by themselves."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for lens in STEPS:
        arguments = draw_step(*lens, device)
        uncompiled = copy.deepcopy(arguments)
        cache, key, value, query, batch, computed = arguments
        torch._dynamo.mark_dynamic(cache, 1)
        for argument in (key, value, query, *batch.values(), computed):
            if isinstance(argument, Tensor):
                torch._dynamo.mark_dynamic(argument, 0)
        assert_same(compiled(*arguments), step(*uncompiled))
        assert_same(cache, uncompiled[0])
    assert counter.frame_count <= 2


@pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])
def test_a_graph_recorded_by_make_fx_has_the_operators(
    tracing_mode: str, device: torch.device
) -> None:
    cache, key, value, query, batch, computed = draw_step(*STEPS[1], device)
    numbers = {
        name: number for name, number in batch.items() if isinstance(number, int)
    }
    tensors = [tensor for tensor in batch.values() if isinstance(tensor, Tensor)]

    def flat(*given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        names = (name for name in batch if name not in numbers)
        named = dict(zip(names, given[5:], strict=True)) | numbers
        return step(*given[:4], named, given[4])

    given = [cache, key, value, query, computed, *tensors]
    graph = make_fx(flat, tracing_mode=tracing_mode)(*copy.deepcopy(given))
    called = {str(node.target) for node in graph.graph.nodes}
    assert "pagetwin.paged_attention.out" in called
    assert "pagetwin.reshape_and_cache.default" in called
    uncompiled = copy.deepcopy(given)
    assert_same(graph(*given), flat(*uncompiled))
    assert_same(given, uncompiled)


class Step(torch.nn.Module):
    """`step`, as a module with the maxima as constants."""

    def forward(
        self,
        cache: Tensor,
        key: Tensor,
        query: Tensor,
        batch: dict[str, Any],
        computed: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return step(cache, key, key + 1, query, batch, computed)


@pytest.mark.parametrize("strict", [False, True])
def test_a_step_can_be_exported(strict: bool, device: torch.device) -> None:
    cache, key, _, query, batch, computed = draw_step(*STEPS[0], device)
    given = (cache, key, query, batch, computed)
    exported = torch.export.export(Step(), copy.deepcopy(given), strict=strict)
    called = {str(node.target) for node in exported.graph.nodes}
    assert "pagetwin.paged_attention.out" in called
    uncompiled = copy.deepcopy(given)
    assert_same(exported.module()(*given), Step()(*uncompiled))
    assert_same(cache, uncompiled[0])


AS_THEY_ARE: dict[str, Callable[[Implementation, Tensor], Any]] = {
    "get_dcp_ranks": lambda twin, x: twin.get_dcp_ranks(x.long().abs().view(-1), 2),
    "get_dcp_local_seq_lens": lambda twin, x: twin.get_dcp_local_seq_lens(
        x.int().abs().view(-1), 2, 1
    ),
    "log2_lse_to_ln": lambda twin, x: twin.log2_lse_to_ln(x),
    "reshape_query_for_spec_decode": lambda twin, x: twin.reshape_query_for_spec_decode(
        x, 3
    ),
    "reshape_attn_output_for_spec_decode": lambda twin, x: (
        twin.reshape_attn_output_for_spec_decode(x.view(3, 2, 2, 4))
    ),
    "split_kv_cache": lambda twin, x: twin.split_kv_cache(x.view(2, 3, 1, 2, 4)),
}


@pytest.mark.parametrize("name", AS_THEY_ARE)
def test_views_and_sums_are_compiled_as_they_are(
    name: str, device: torch.device
) -> None:
    """No operator may return a view, and a compiler joins these with what is around them."""
    tensor = 7 * torch.randn(6, 2, 4, device=device)
    compiled = torch.compile(AS_THEY_ARE[name], fullgraph=True, backend="aot_eager")
    assert_same(compiled(TWIN, tensor), AS_THEY_ARE[name](TWIN, tensor))
    assert name not in OPERATORS


def attention_layer(device: torch.device, **options: Any) -> tuple[Attention, Any]:
    """Return a layer on the kernels, and a function that makes a step's metadata."""
    layer = Attention(
        num_heads=4,
        head_size=16,
        scale=0.25,
        num_kv_heads=2,
        prefix="layer",
        attn_backend=load_backend("TRITON"),
        **options,
    )
    layer.to(device)
    backend = layer.get_attn_backend()
    shape = backend.get_kv_cache_shape(16, 16, 2, 16)
    layer.kv_cache = torch.zeros(shape, device=device)
    spec = layer.get_kv_cache_spec(block_size=16, dtype=torch.float32)
    builder = backend.get_builder_cls()(spec, ["layer"], device)

    def metadata(*batch: Any) -> Any:
        common = TWIN.build_common_attn_metadata(*batch, block_size=16, device=device)
        return builder.build(0, common)

    return layer, metadata


def test_a_layer_is_compiled_without_a_break(device: torch.device) -> None:
    """Metadata is an argument like any other: new numbers in it compile nothing in the end."""
    layer, metadata = attention_layer(device, per_layer_sliding_window=5)
    counter = CompileCounterWithBackend("aot_eager")

    def model(query: Tensor, key: Tensor, value: Tensor, attn_metadata: Any) -> Tensor:
        attended: Tensor = layer(query * 2, key, value, {"layer": attn_metadata})
        return attended + 1

    compiled = torch.compile(model, fullgraph=True, backend=counter)
    batches = [
        ([5, 3], [0, 0], [[3, 1], [2, 4]]),
        ([1, 1], [5, 3], [[3, 1], [2, 4]]),
        ([1, 1, 4], [6, 4, 0], [[3, 1], [2, 4], [5, 6]]),
        ([1, 1, 1], [7, 5, 4], [[3, 1], [2, 4], [5, 6]]),
        ([1, 1, 1], [8, 6, 5], [[3, 1], [2, 4], [5, 6]]),
        ([1, 1, 1, 7], [9, 7, 6, 3], [[3, 1], [2, 4], [5, 6], [9, 8]]),
    ]
    for number, batch in enumerate(batches):
        tokens = sum(batch[0])
        query = torch.randn(tokens, 64, device=device)
        key, value = torch.randn(2, tokens, 32, device=device)
        step_metadata = metadata(*batch)
        before = layer.kv_cache.clone()
        expected = model(query, key, value, step_metadata)
        after, layer.kv_cache = layer.kv_cache, before
        assert_same(compiled(query, key, value, step_metadata), expected)
        assert_same(layer.kv_cache, after)
        if number == 3:
            counted = counter.frame_count
    assert counted <= 3
    assert counter.frame_count == counted


def compiled_write(**changes: Any) -> None:
    """Write two tokens to a cache of 8 slots, compiled, with some arguments changed."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    (given,) = draw_writes("reshape_and_cache", torch.device(device))
    compiled = torch.compile(
        TWIN.reshape_and_cache, fullgraph=True, backend="aot_eager"
    )
    compiled(**(given | changes))


def test_compiled_code_rejects_in_the_same_words(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    slots = torch.tensor([9, -1, 4, 99], device=device)
    with pytest.raises(TypeError, match=r"slot_mapping is torch\.int32: expected"):
        compiled_write(slot_mapping=slots.int())
    monkeypatch.setenv("PAGETWIN_CHECK_VALUES", "1")
    with pytest.raises(
        IndexError, match=r"slot_mapping\[3\] = 99 is outside the cache"
    ):
        compiled_write(slot_mapping=slots)


def test_an_argument_without_its_axes_is_rejected_while_a_graph_is_made(
    device: torch.device,
) -> None:
    given = draw_batch(0, device)
    given["query"] = given["query"].flatten(1)
    compiled = torch.compile(TWIN.paged_attention, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"expected \[tokens, query_heads, head_size\]"):
        compiled(**given)
    with FakeTensorMode() as mode:
        fake = {
            name: mode.from_tensor(argument)
            if isinstance(argument, Tensor)
            else argument
            for name, argument in given.items()
        }
        with pytest.raises(ValueError, match=r"query has shape \[\d+, \d+\]: expected"):
            TWIN.paged_attention(**fake)
        with pytest.raises(TypeError, match="unexpected keyword argument 'window'"):
            TWIN.paged_attention(**fake, window=3)


def test_numbers_arrive_as_they_were_written() -> None:
    default = torch.ops.pagetwin.merge_attn_states.default
    bases = {
        argument.name: argument.default_value for argument in default._schema.arguments
    }
    assert bases["prefix_lse_base"] == math.e
    attention = torch.ops.pagetwin.paged_attention.default
    names = [argument.name for argument in attention._schema.arguments]
    for name in signature(TWIN.paged_attention).parameters:
        assert (name in names) == (name not in (*BUFFERS, "options"))
    assert set(OPTION_NAMES) < set(names)


def test_a_copy_of_the_package_has_operators_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Mutants are imported as a second copy of the package, beside the first one."""
    for name in (
        "contract.argument_types",
        "contract.attention_options",
        "optimized.runtime.operator_signature",
    ):
        monkeypatch.setitem(
            sys.modules, f"copied.{name}", sys.modules[f"pagetwin.{name}"]
        )
    spec = spec_from_file_location(
        "copied.optimized.runtime.operators", _operators.__file__
    )
    assert spec is not None and spec.loader is not None
    copied = module_from_spec(spec)
    spec.loader.exec_module(copied)

    @copied.operator()
    def copy_blocks(kv_cache: KVCache, block_size: int = 2) -> KVCache:
        return kv_cache.clone() * block_size

    cache = torch.randn(2, 1, 2, 1, 4)
    assert_same(copy_blocks(cache), torch.ops.copied.copy_blocks(cache))
    assert list(signature(copy_blocks).parameters) == ["kv_cache", "block_size"]
    assert_same(copy_blocks(cache, block_size=3), 3 * cache)
