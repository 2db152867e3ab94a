"""Layers of each backend on every kind of attention, with every option.

Requests are served in steps: prompts, a chunk beside decodes, decodes alone. The keys that each
query attends to are kept on the host and evaluated one by one (`brute_force`). Slots that were not
written, rows of padding and block ids past a row's end are poisoned.
"""

from collections.abc import Callable
from itertools import accumulate
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pagetwin.conformance.cases.batches import GARBAGE, LAYOUTS, NAN, empty_cache
from pagetwin.conformance.cases.rearranging import rows_of_answer
from pagetwin.conformance.checks.dense import same_bits
from pagetwin.conformance.oracles.brute_force import (
    OracleRequest,
    attend_by_hand,
    judge_out,
    quantise_by_hand,
)
from pagetwin.contract.attention_options import pack_options
from pagetwin.contract.budgets import Verdict
from pagetwin.contract.cache_formats import TENSOR_SCALE_DTYPES, cache_dtype_of
from pagetwin.contract.kinds import HOST
from pagetwin.contract.metadata_classes import CommonAttentionMetadata
from pagetwin.contract.specs import CrossAttentionSpec, KVCacheSpec
from pagetwin.engine.selector import backend_names, load_backend
from support.twins import Twin
from torch import Tensor

BACKENDS = sorted(backend_names())

pytestmark = pytest.mark.usefixtures("installed")

KV_HEADS, GROUP, SIZE, BLOCK, MAX_BLOCKS = 2, 2, 32, 16, 3
HEADS = KV_HEADS * GROUP
KINDS = ("decoder", "encoder", "encoder_only", "encoder_decoder")
Pair = tuple[Tensor, Tensor]
Judge = Callable[[dict[str, Any], slice], Verdict]


def counts(values: list[int], device: torch.device = HOST) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def starts_of(lens: list[int]) -> list[int]:
    return [0, *accumulate(lens)]


class Served:
    """Requests that one layer serves in steps, and what it ought to remember of them.

    Args:
        name: the backend.
        reqs: requests; each has a row of blocks of its own.
        kind: of attention.
        cache: name of the cache's dtype.
        k_scale, v_scale: of a quantised cache.
        options: of the layer beyond that.
    """

    def __init__(
        self,
        name: str,
        reqs: int,
        device: torch.device,
        reference: Twin,
        kind: str = "decoder",
        cache: str = "auto",
        k_scale: Any = 1.0,
        v_scale: Any = 1.0,
        dtype: torch.dtype = torch.float16,
        layout: str = "interleaved",
        **options: Any,
    ) -> None:
        self.device, self.reference, self.kind, self.dtype = (
            device,
            reference,
            kind,
            dtype,
        )
        self.generator = torch.Generator().manual_seed(len(name) + reqs)
        self.options = options
        self.value_size = options.get("head_size_v") or SIZE
        backend = load_backend(name)
        self.impl = backend.get_impl_cls()(
            HEADS,
            SIZE,
            SIZE**-0.5,
            KV_HEADS,
            kv_cache_dtype=cache,
            attn_type=kind,
            **options,
        )
        self.cache_dtype = cache_dtype_of(cache, dtype)
        is_uncached = kind in ("encoder", "encoder_only")
        page = CrossAttentionSpec if kind == "encoder_decoder" else KVCacheSpec
        spec = page(BLOCK, KV_HEADS, SIZE, self.cache_dtype)
        builder = backend.get_builder_cls()
        self.builder = builder(None if is_uncached else spec, ["layer"], device)
        num_blocks = 3 * reqs * MAX_BLOCKS + 1
        free = torch.randperm(num_blocks, generator=self.generator).tolist()
        self.rows = [[free.pop() for _ in range(MAX_BLOCKS)] for _ in range(reqs)]
        sizes = (layout, num_blocks, BLOCK, KV_HEADS, SIZE, self.cache_dtype)
        self.cache = empty_cache(*sizes, device)
        self.expected = empty_cache(*sizes)
        self.scales = {}
        if self.cache_dtype in TENSOR_SCALE_DTYPES:
            self.scales = {"k_scale": k_scale, "v_scale": v_scale}
        self.layer = SimpleNamespace(_k_scale=k_scale, _v_scale=v_scale)
        # by request: tokens of its sequence, and all keys and values that it can see, as stored
        self.computed = [0] * reqs
        self.stored: list[Pair] = [(self.random(0), self.random_values(0))] * reqs
        if self.scales:
            self.stored = [
                (key.to(self.cache_dtype), value.to(self.cache_dtype))
                for key, value in self.stored
            ]

    def random(self, tokens: int, heads: int = KV_HEADS, size: int = SIZE) -> Tensor:
        shape = tokens, heads, size
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def random_values(self, tokens: int) -> Tensor:
        return self.random(tokens, size=self.value_size)

    def padded(self, tensor: Tensor) -> Tensor:
        """Return a tensor on the device, two rows of NaN after it."""
        padding = torch.full((2, *tensor.shape[1:]), NAN, dtype=tensor.dtype)
        return torch.cat([tensor, padding]).to(self.device)

    def table(self) -> Tensor:
        """Return the requests' rows; past what they hold is garbage."""
        table = counts(list(GARBAGE)).repeat(len(self.rows), MAX_BLOCKS)
        table = table[:, : MAX_BLOCKS + 1]
        for req, row in enumerate(self.rows):
            used = -(-len(self.stored[req][0]) // BLOCK)
            table[req, :used] = counts(row[:used])
        return table.to(self.device)

    def remember(self, news: list[int], key: Tensor, value: Tensor) -> list[int]:
        """Keep the new keys as they must be stored, and return their slots."""
        slots = []
        for req, own in enumerate(torch.arange(len(key)).split(news)):
            pair = key[own], value[own]
            if self.scales:
                pair = (
                    quantise_by_hand(pair[0], self.scales["k_scale"], self.cache_dtype),
                    quantise_by_hand(pair[1], self.scales["v_scale"], self.cache_dtype),
                )
            old = self.stored[req]
            for i in range(len(own)):
                position = len(old[0]) + i
                block, offset = self.rows[req][position // BLOCK], position % BLOCK
                self.expected[0, block, offset] = pair[0][i]
                self.expected[1, block, offset, :, : self.value_size] = pair[1][i]
                slots.append(block * BLOCK + offset)
            both = zip(old, pair, strict=True)
            first, second = (joined(*pair) for pair in both)
            self.stored[req] = first, second
        return slots

    def step(
        self,
        news: list[int],
        brings: list[int] | None = None,
        output_dtype: torch.dtype | None = None,
        output_scale: Tensor | None = None,
        **carried: Any,
    ) -> Judge:
        """Run a step, assert that it writes what it should, and return a judge of its rows.

        Args:
            news: new tokens of each request.
            brings: tokens that each request's encoder computes in the step.
            output_dtype, output_scale: of a quantised output.
            carried: fields of the step's metadata.
        """
        brings = brings or [0] * len(news)
        asking = brings if self.kind == "encoder" else news
        giving = news if self.kind in ("decoder", "encoder_only") else brings
        query = self.random(sum(asking), HEADS)
        key, value = self.random(sum(giving)), self.random_values(sum(giving))
        if self.kind in ("encoder", "encoder_only"):
            self.stored = list(zip(key.split(giving), value.split(giving), strict=True))
            slots = [10**6] * sum(giving)
        else:
            slots = self.remember(giving, key, value)
        common = self.common(news, brings, slots, carried)
        output = torch.full(
            (len(query) + 2, HEADS, self.value_size),
            NAN,
            dtype=output_dtype or self.dtype,
            device=self.device,
        )
        given = [None, None] if not sum(giving) else [*map(self.padded, (key, value))]
        returned = self.impl.forward(
            self.layer,
            self.padded(query),
            *given,
            self.cache,
            self.builder.build(0, common),
            output,
            output_scale,
        )
        self.computed = [a + b for a, b in zip(self.computed, news, strict=True)]
        assert returned is output
        assert bool(output[len(query) :].float().isnan().all()), "padding stays"
        assert same_bits(self.cache, self.expected)
        stored = list(self.stored)

        def judge(changes: dict[str, Any], rows: slice) -> Verdict:
            """Judge some rows, as if the layer had been asked for other options."""
            options = {"causal": self.kind == "decoder", "scale": SIZE**-0.5}
            options |= self.options | self.scales | changes
            options.pop("head_size_v", None)
            requests = [
                OracleRequest(own, *pair)
                for own, pair in zip(query.split(asking), stored, strict=True)
            ]
            answer = attend_by_hand(requests, options, len(query))
            same = self.same_dtype(query, asking, stored, options)
            kept = rows_of_answer(answer, rows)
            mine = output[: len(query)][rows]
            return judge_out(mine, kept, same[rows], self.dtype, output_scale)

        return judge

    def common(
        self,
        news: list[int],
        brings: list[int],
        slots: list[int],
        carried: dict[str, Any],
    ) -> CommonAttentionMetadata:
        crosses = self.kind == "encoder_decoder"
        own_lens = [a + b for a, b in zip(self.computed, news, strict=True)]
        fields: dict[str, Any] = {}
        if crosses or self.kind == "encoder":
            starts = counts(starts_of(brings))
            fields |= {
                "encoder_query_start_loc": starts.to(self.device),
                "encoder_query_start_loc_cpu": starts,
            }
        if crosses:
            lens = counts([len(key) for key, _ in self.stored])
            fields |= {
                "encoder_seq_lens": lens.to(self.device),
                "encoder_seq_lens_cpu": lens,
                "cross_block_table_tensor": self.table(),
                "cross_slot_mapping": torch.tensor(
                    slots, dtype=torch.int64, device=self.device
                ),
            }
        starts = counts(starts_of(news))
        return CommonAttentionMetadata(
            query_start_loc=starts.to(self.device),
            query_start_loc_cpu=starts,
            seq_lens=counts(own_lens, self.device),
            seq_lens_cpu=counts(own_lens),
            num_computed_tokens_cpu=counts(self.computed),
            num_reqs=len(news),
            num_actual_tokens=sum(news),
            max_query_len=max(news),
            max_seq_len=max(own_lens),
            # a layer that does not read the sequence's own keys must not look for them
            block_table_tensor=self.table()
            if self.kind == "decoder"
            else counts([[10**6]] * len(news), self.device),
            slot_mapping=torch.tensor(
                [10**6] * sum(news) if crosses else slots,
                dtype=torch.int64,
                device=self.device,
            ),
            **(fields | carried),
        )

    def same_dtype(
        self,
        query: Tensor,
        asking: list[int],
        stored: list[Pair],
        options: dict[str, Any],
    ) -> Tensor:
        """Return what plain torch makes of the same, in the layer's own dtype."""
        lens = [len(key) for key, _ in stored]
        begins = starts_of(lens)
        table = torch.arange(max(*lens, 1), dtype=torch.int32).repeat(len(lens), 1)
        keys, values = (
            joined(*tensors_of)[:, None] for tensors_of in zip(*stored, strict=True)
        )
        result: Tensor = self.reference.paged_attention(
            query,
            keys,
            values,
            table + counts(begins[:-1])[:, None],
            counts(starts_of(asking)),
            counts(lens),
            max(asking),
            max(lens),
            compute_dtype=self.dtype,
            **pack_options(
                **{
                    name: option.cpu() if isinstance(option, Tensor) else option
                    for name, option in options.items()
                }
            ),
        )
        return result


def joined(*parts: Tensor) -> Tensor:
    """Return tensors one after the other; torch joins no FP8 ones."""
    whole = torch.cat([part.float() for part in parts])
    return whole.to(parts[0].dtype)


ALL = slice(None)


def assert_right(judge: Judge, **changes: Any) -> None:
    verdict = judge(changes, ALL)
    assert verdict.ok, verdict


SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
OPTIONS: dict[str, dict[str, Any]] = {
    "sliding_window": {"sliding_window": 3},
    "logits_soft_cap": {"logits_soft_cap": 0.5},
    "alibi_slopes": {"alibi_slopes": SLOPES},
    "sinks": {"sinks": torch.tensor([1.0, -1.0, 0.0, 3.0])},
    "attention_chunk_size": {"attention_chunk_size": 4},
    "position_bias": {
        "position_bias": torch.linspace(-2, 2, 4 * 7).view(4, 7).contiguous()
    },
    "a window and a cap": {"sliding_window": 17, "logits_soft_cap": 0.5},
}


COUNTS_POSITIONS = {
    "sliding_window": 4,
    "alibi_slopes": [0.5] * HEADS,
    "attention_chunk_size": 4,
    "position_bias": torch.zeros(HEADS, 3),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("option", ["logits_soft_cap", "sinks"])
@pytest.mark.parametrize("name", BACKENDS)
def test_cross_attention_takes_what_counts_no_positions(
    name: str, option: str, reference: Twin, device: torch.device
) -> None:
    served = Served(
        name, 2, device, reference, kind="encoder_decoder", **OPTIONS[option]
    )
    assert_right(served.step([3, 9], brings=[18, 0]))
    judge = served.step([1, 4], brings=[0, 7])
    assert_right(judge)
    for half in (slice(0, 1), slice(1, 5)):
        assert not judge(dict.fromkeys(OPTIONS[option]), half).ok


SCALES = {
    "fp8": (0.02, 0.5),
    "fp8_e5m2": (torch.tensor(0.25), torch.tensor([2.0])),
    "fp8_e4m3": (torch.tensor([0.01, 0.03]), torch.tensor([0.5, 0.125])),
}


Steps = list[tuple[list[int], list[int]]]


@st.composite
def asked(draw: st.DrawFn) -> tuple[dict[str, Any], Steps]:
    """Draw a layer that has a meaning, and the steps it serves: new tokens, encoders' tokens.

    Everything comes from one seed, as in `batches.plans`.
    """
    pick = Random(draw(st.integers(0, 2**20)))
    kind = pick.choice(KINDS)
    layer: dict[str, Any] = {
        "kind": kind,
        "dtype": pick.choice([torch.float16, torch.bfloat16]),
        "layout": pick.choice(LAYOUTS),
        "head_size_v": pick.choice([None, None, 8]),
    }
    is_cached = kind in ("decoder", "encoder_decoder")
    if is_cached and pick.random() < 0.5:
        cache = pick.choice(sorted(SCALES))
        layer |= {"cache": cache}
        layer["k_scale"], layer["v_scale"] = SCALES[cache]
    names = sorted(set(OPTIONS) - {"a window and a cap"})
    for name in pick.sample(names, pick.choice([0, 1, 2, 3])):
        if kind != "encoder_decoder" or name not in COUNTS_POSITIONS:
            layer |= OPTIONS[name]
    reqs = pick.choice([1, 2, 3, 4])
    first = sorted(pick.choice([0, 1, 2, 7, 12]) for _ in range(reqs))
    encoders = [pick.choice([0, 1, 5, 16, 17]) for _ in first]
    none = [0] * reqs
    if kind == "encoder_only":
        pick.shuffle(first)
        return layer, [(first, none)]
    if kind == "encoder":
        return layer, [(first, encoders), (first, encoders[::-1])]
    chunk = [1] * (reqs - 1) + [pick.choice([1, 5, 9])]
    return layer, [(first, encoders), (chunk, none), ([1] * reqs, none)]


@pytest.mark.extended
@pytest.mark.parametrize("name", BACKENDS)
@settings(max_examples=max(settings().max_examples // 4, 3))
@given(asking=asked())
def test_any_layer_serves_its_steps(
    name: str, asking: Any, reference: Twin, device: torch.device
) -> None:
    """Kinds, options, caches and layouts in any combination."""
    layer, steps = asking
    served = Served(name, len(steps[0][0]), device, reference, **layer)
    for news, brings in steps:
        asks = brings if layer["kind"] == "encoder" else news
        if sum(asks):
            assert_right(served.step(news, brings))


# ---- which operator of the xFormers backend runs what


REASONS = {
    "": {},
    "sliding_window is given, which its kernel lacks": {"sliding_window": 3},
    "logits_soft_cap is given": {"logits_soft_cap": 2.0},
    "alibi_slopes is given": {"alibi_slopes": [0.5] * HEADS},
    "sinks is given": {"sinks": torch.zeros(HEADS)},
    "attention_chunk_size is given": {"attention_chunk_size": 4},
    "position_bias is given": {"position_bias": torch.zeros(HEADS, 3)},
    "kv_cache_dtype = 'fp8': its kernel has no scales": {"kv_cache_dtype": "fp8"},
    "head_size_v = 16: its kernel takes values": {"head_size_v": 16},
    "head_size = 40: its kernel takes 32, 64, 128, 256": {"head_size": 40},
    "attn_type = 'encoder': nothing is cached": {"attn_type": "encoder"},
    "attn_type = 'encoder_only'": {"attn_type": "encoder_only"},
}


@pytest.mark.parametrize("reason", REASONS)
def test_a_layer_says_why_its_decodes_do_not_run_in_xformers(reason: str) -> None:
    options = {"head_size": SIZE, **REASONS[reason]}
    cls = load_backend("XFORMERS").get_impl_cls()
    impl = cls(num_heads=HEADS, scale=1.0, num_kv_heads=KV_HEADS, **options)
    assert impl.decode_op == ("triton" if reason else "xformers")
    assert impl.decode_op_reason.startswith(reason)
    assert bool(impl.decode_op_reason) == bool(reason)


def test_shared_caches_and_cross_attention_run_in_xformers() -> None:
    cls = load_backend("XFORMERS").get_impl_cls()
    for options in (
        {"kv_sharing_target_layer_name": "layers.0"},
        {"attn_type": "encoder_decoder"},
        {"logits_soft_cap": 0},
    ):
        assert cls(HEADS, SIZE, 1.0, KV_HEADS, **options).decode_op == "xformers"


# ---- what is rejected


def impl_of(name: str, **options: Any) -> Any:
    numbers = {"num_heads": HEADS, "head_size": SIZE, "scale": 1.0}
    numbers["num_kv_heads"] = KV_HEADS
    return load_backend(name).get_impl_cls()(**(numbers | options))


@pytest.mark.parametrize("name", BACKENDS)
def test_cross_attention_counts_no_positions(name: str) -> None:
    for option, value in COUNTS_POSITIONS.items():
        words = f"{option} is given and attn_type = 'encoder_decoder': expected None"
        with pytest.raises(ValueError, match=words):
            impl_of(name, attn_type="encoder_decoder", **{option: value})


REJECTED_LAYERS: dict[str, dict[str, Any]] = {
    "attn_type = 'sideways': expected one of decoder": {"attn_type": "sideways"},
    "kv_cache_dtype = 'int4': expected auto": {"kv_cache_dtype": "int4"},
    "and attn_type = 'encoder': expected None": {
        "attn_type": "encoder",
        "kv_sharing_target_layer_name": "layers.0",
    },
    "'layers.0' and attn_type = 'encoder_only'": {
        "attn_type": "encoder_only",
        "kv_sharing_target_layer_name": "layers.0",
    },
    "head_size_v = 40: expected at most head_size = 32": {"head_size_v": 40},
    "head_size_v = 0: expected at least 1": {"head_size_v": 0},
    "attention_chunk_size = 0: expected at least 1": {"attention_chunk_size": 0},
    r"position_bias has shape \[4, 4\]: expected \[4, 2 \* reach": {
        "position_bias": torch.zeros(HEADS, 4)
    },
    "num_heads = 3 is not a multiple of num_kv_heads = 2": {"num_heads": 3},
    "sliding_window = 0: expected at least 1": {"sliding_window": 0},
    "logits_soft_cap = -1.0: expected a number above 0": {"logits_soft_cap": -1.0},
    "alibi_slopes has 0 entries: expected 4": {"alibi_slopes": []},
    "sinks has 3 entries: expected 4": {"sinks": torch.zeros(3)},
}


@pytest.mark.parametrize("words", REJECTED_LAYERS)
@pytest.mark.parametrize("name", BACKENDS)
def test_a_layer_without_meaning_is_rejected(name: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        impl_of(name, **REJECTED_LAYERS[words])


@pytest.mark.parametrize("name", BACKENDS)
def test_values_of_an_encoder_may_be_longer_than_keys(name: str) -> None:
    assert impl_of(name, head_size_v=40, attn_type="encoder").head_size_v == 40


def forward(served: Served, common: CommonAttentionMetadata, **changes: Any) -> None:
    tokens = 3
    keys = served.random(tokens).to(served.device)
    given: dict[str, Any] = {
        "layer": served.layer,
        "query": served.random(tokens, HEADS).to(served.device),
        "key": keys,
        "value": keys,
        "kv_cache": served.cache,
        "output": torch.zeros(
            tokens, HEADS, SIZE, dtype=torch.float16, device=served.device
        ),
    }
    metadata = served.builder.build(0, common)
    served.impl.forward(attn_metadata=metadata, **(given | changes))


@pytest.mark.parametrize("name", BACKENDS)
def test_a_step_of_cross_attention_names_what_it_lacks(
    name: str, reference: Twin, device: torch.device
) -> None:
    served = Served(name, 1, device, reference, kind="encoder_decoder")
    step = served.common([3], [3], [0, 1, 2], {})
    for field in (
        "encoder_seq_lens",
        "encoder_seq_lens_cpu",
        "cross_block_table_tensor",
        "encoder_query_start_loc",
        "encoder_query_start_loc_cpu",
        "cross_slot_mapping",
    ):
        words = f"{field.removesuffix('_tensor')} = None.*: expected"
        with pytest.raises(ValueError, match=words):
            forward(served, step.replace(**{field: None}))
    assert bool(served.cache.isnan().all()), "nothing is written"
    words = r"key = None but cross_slot_mapping has 3 slots: expected the keys"
    with pytest.raises(ValueError, match=words):
        forward(served, step, key=None, value=None)
    with pytest.raises(ValueError, match="value = None: expected both, or neither"):
        forward(served, step, value=None)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_step_of_an_encoder_says_where_its_tokens_start(
    name: str, reference: Twin, device: torch.device
) -> None:
    served = Served(name, 1, device, reference, kind="encoder")
    step = served.common([3], [3], [0, 1, 2], {})
    bare = step.replace(encoder_query_start_loc=None, encoder_query_start_loc_cpu=None)
    with pytest.raises(ValueError, match="encoder_query_start_loc = None: expected"):
        forward(served, bare)
    with pytest.raises(ValueError, match="encoder_query_start_loc_cpu = None"):
        forward(served, step.replace(encoder_query_start_loc_cpu=None))
    with pytest.raises(ValueError, match="key = None and attn_type = 'encoder'"):
        forward(served, step, key=None)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_prompt_of_a_model_without_decoder_comes_whole(
    name: str, reference: Twin, device: torch.device
) -> None:
    served = Served(name, 1, device, reference, kind="encoder_only")
    served.computed = [4]
    with pytest.raises(ValueError, match="request 0 brings 3 of 7 tokens"):
        forward(served, served.common([3], [0], [0, 1, 2], {}))
    served.computed = [0]
    tree = torch.ones(1, 3, 3, dtype=torch.bool, device=device)
    with pytest.raises(ValueError, match="tree_mask is given and attn_type"):
        forward(served, served.common([3], [0], [0, 1, 2], {"tree_mask": tree}))


@pytest.mark.parametrize("name", BACKENDS)
def test_a_cache_is_what_the_layer_was_made_for(
    name: str, reference: Twin, device: torch.device
) -> None:
    plain = Served(name, 1, device, reference)
    fp8 = Served(name, 1, device, reference, cache="fp8")
    step = plain.common([3], [0], [0, 1, 2], {})
    with pytest.raises(TypeError, match="kv_cache_dtype = 'auto': expected torch"):
        forward(plain, step, kv_cache=fp8.cache)
    with pytest.raises(TypeError, match="kv_cache_dtype = 'fp8': expected torch"):
        forward(fp8, step, kv_cache=plain.cache)
    with pytest.raises(ValueError, match="layer has no _k_scale: expected a layer"):
        forward(fp8, step, layer=object())
    with pytest.raises(ValueError, match="key = None but slot_mapping has 3 slots"):
        forward(plain, step, key=None, value=None)
    for served in (plain, fp8):
        assert bool(served.cache.float().isnan().all()), "nothing is written"


@pytest.mark.parametrize("name", BACKENDS)
def test_an_output_and_its_scale_belong_together(
    name: str, reference: Twin, device: torch.device
) -> None:
    served = Served(name, 1, device, reference)
    step = served.common([3], [0], [0, 1, 2], {})
    scale = torch.tensor(1.0, device=device)
    fp8 = torch.zeros(3, HEADS, SIZE, dtype=torch.float8_e4m3fn, device=device)
    with pytest.raises(ValueError, match="output_scale = None: expected a scale"):
        forward(served, step, output=fp8)
    with pytest.raises(ValueError, match="output_scale is given but output is"):
        forward(served, step, output_scale=scale)
    with pytest.raises(NotImplementedError, match="output_block_scale is given"):
        forward(served, step, output_block_scale=scale)
    with pytest.raises(ValueError, match="output = None: expected a tensor"):
        forward(served, step, output=None)
    assert bool(served.cache.isnan().all()), "nothing is written"
