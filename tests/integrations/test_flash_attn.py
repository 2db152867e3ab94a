"""The names of flash-attn: results, caches and strides on both twins, and what is not computed."""

import importlib.util
import inspect
import json
import sys

import pytest
import torch
from pagetwin.integrations import flash_attn
from pagetwin.integrations.flash_attn import (
    FlashAttention,
    install,
    uninstall,
    write_hub_kernel,
)
from pagetwin.integrations.flash_attn.calls import _filled, _rows, _starts
from pagetwin.integrations.flash_attn.padding import pad_input, unpad_input
from support.twins import TWINS
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, KV_HEADS, SIZE = 4, 2, 32
BLOCK = 16
CALLS = {
    "plain": {},
    "causal": {"causal": True},
    "causal window": {"causal": True, "window_size": (4, 4)},
    "causal by its window": {"window_size": (4, 0)},
    "window on both sides": {"window_size": (3, 3)},
    "soft cap and scale": {"causal": True, "softcap": 2.0, "softmax_scale": 0.5},
    "ALiBi": {"causal": True, "alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0])},
    "sinks": {"causal": True, "s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0])},
}


@pytest.fixture(params=TWINS)
def functions(request):
    """Return the functions on each twin."""
    return FlashAttention(request.param)


def numbers(*shape, seed=0):
    """Return random numbers, exact in every dtype that is used."""
    drawn = torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed))
    return (drawn / 8).to(DEVICE)


def on_device(arguments):
    return {
        name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }


def dense(q, k, v, arguments):
    """Return attention of one sequence and its log-sum-exp, in float64.

    Args:
        q: [queries, heads, size], the last positions.
        k, v: [keys, kv_heads, size].
        arguments: As the functions take them.
    """
    q, k, v = (tensor.double() for tensor in (q, k, v))
    k, v = (tensor.repeat_interleave(HEADS // KV_HEADS, 1) for tensor in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k)
    scores = scores * (arguments.get("softmax_scale") or SIZE**-0.5)
    cap = arguments.get("softcap", 0.0)
    if cap:
        scores = cap * (scores / cap).tanh()
    positions = torch.arange(len(k) - len(q), len(k), device=q.device)[:, None]
    distance = positions - torch.arange(len(k), device=q.device)
    if "alibi_slopes" in arguments:
        slopes = arguments["alibi_slopes"].double().to(q.device)
        scores = scores - slopes[:, None, None] * distance
    left, right = arguments.get("window_size", (-1, -1))
    if arguments.get("causal"):
        right = 0
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left >= 0:
        hidden |= distance > left
    if right >= 0:
        hidden |= distance < -right
    scores = scores.masked_fill(hidden, -torch.inf)
    if "s_aux" in arguments:
        sink = arguments["s_aux"].double().to(q.device)[:, None, None]
        scores = torch.cat([scores, sink.expand(-1, len(q), 1)], 2)
        v = torch.cat([v, torch.zeros_like(v[:1])])
    return torch.einsum("hqk,khd->qhd", scores.softmax(2), v), scores.logsumexp(2)


def assert_equal(found, expected):
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CALLS)
def test_a_dense_batch(functions, name):
    arguments = on_device(CALLS[name])
    q = numbers(2, 3, HEADS, SIZE)
    k, v = numbers(2, 2, 9, KV_HEADS, SIZE, seed=1)
    out, lse = functions.flash_attn_func(q, k, v, return_softmax_lse=True, **arguments)
    assert torch.equal(out, functions.flash_attn_func(q, k, v, **arguments))
    for index in range(2):
        expected, expected_lse = dense(q[index], k[index], v[index], arguments)
        assert_equal(out[index], expected)
        assert_equal(lse[index], expected_lse)


def test_keys_with_any_strides_are_not_copied(functions, monkeypatch):
    q = numbers(2, 3, HEADS, SIZE)
    stored = numbers(2, 2, KV_HEADS, 20, SIZE, seed=1)
    k, v = (part.transpose(1, 2)[:, :9] for part in stored)
    used = []
    operation = functions.twin.paged_attention

    def watched(query, key_cache, *rest, **named):
        used.append(key_cache)
        return operation(query, key_cache, *rest, **named)

    monkeypatch.setattr(functions.twin, "paged_attention", watched)
    out = functions.flash_attn_func(q, k, v, causal=True)
    assert used[0].data_ptr() == k.data_ptr() and used[0].stride() == k.stride()
    for index in range(2):
        assert_equal(
            out[index], dense(q[index], k[index], v[index], {"causal": True})[0]
        )


@pytest.mark.parametrize("name", CALLS)
def test_a_packed_batch(functions, name):
    arguments = on_device(CALLS[name])
    q = numbers(6, HEADS, SIZE)
    k, v = numbers(2, 13, KV_HEADS, SIZE, seed=1)
    starts = [[0, 2, 2, 6], [0, 5, 8, 13]]
    q_starts, k_starts = (
        torch.tensor(row, dtype=torch.int32, device=DEVICE) for row in starts
    )
    out, lse = functions.flash_attn_varlen_func(
        q, k, v, q_starts, k_starts, 4, 5, return_softmax_lse=True, **arguments
    )
    for index in (0, 2):
        rows, keys = (slice(*row[index : index + 2]) for row in starts)
        expected, expected_lse = dense(q[rows], k[keys], v[keys], arguments)
        assert_equal(out[rows], expected)
        assert_equal(lse[:, rows], expected_lse)


def paged(keys, lengths, seed=0):
    """Return a cache with NaN in every free slot, its table, and the keys of each request."""
    order = torch.randperm(8, generator=torch.Generator().manual_seed(seed)).tolist()
    cache = torch.full((2, 8, BLOCK, KV_HEADS, SIZE), torch.nan, device=DEVICE)
    table = torch.zeros(len(lengths), 3, dtype=torch.int32)
    for request, length in enumerate(lengths):
        for entry in range(-(-(length + 4) // BLOCK)):
            block = table[request, entry] = order.pop()
            first = entry * BLOCK
            count = max(0, min(BLOCK, length - first))
            cache[:, block, :count] = keys[:, request, first : first + count]
    return cache, table.to(DEVICE)


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("table_name", ["block_table", "page_table"])
def test_a_packed_batch_over_a_cache(functions, name, table_name):
    arguments = on_device(CALLS[name])
    lengths = [20, 7]
    keys = numbers(2, 2, 24, KV_HEADS, SIZE, seed=1)
    cache, table = paged(keys, lengths)
    q = numbers(4, HEADS, SIZE)
    starts = torch.tensor([0, 3, 4], dtype=torch.int32, device=DEVICE)
    counts = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    ends = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
    given = arguments | {table_name: table}
    out = functions.flash_attn_varlen_func(q, *cache, starts, ends, 3, 20, **given)
    again = functions.flash_attn_varlen_func(
        q,
        *cache,
        starts,
        None,
        3,
        20,
        seqused_k=counts,
        out=torch.empty_like(q),
        **given,
    )
    assert torch.equal(out, again)
    for request, rows in enumerate((slice(0, 3), slice(3, 4))):
        k, v = keys[:, request, : lengths[request]]
        assert_equal(out[rows], dense(q[rows], k, v, arguments)[0])


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("is_paged", [True, False])
def test_new_keys_are_stored_and_attended_to(functions, name, is_paged):
    arguments = on_device(CALLS[name])
    lengths, new = [14, 7], 3
    keys = numbers(2, 2, 24, KV_HEADS, SIZE, seed=1)
    q = numbers(2, new, HEADS, SIZE)
    counts = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    added = torch.stack(
        [
            keys[:, request, length : length + new]
            for request, length in enumerate(lengths)
        ],
        1,
    )
    if is_paged:
        cache, table = paged(keys, lengths)
        place = {"block_table": table}
    else:
        cache = torch.full((2, 5, 24, KV_HEADS, SIZE), torch.nan, device=DEVICE)
        sequences = torch.tensor([3, 1], dtype=torch.int32, device=DEVICE)
        for request, sequence in enumerate(sequences.tolist()):
            end = lengths[request]
            cache[:, sequence, :end] = keys[:, request, :end]
        place = {"cache_batch_idx": sequences}
    out, lse = functions.flash_attn_with_kvcache(
        q,
        *cache,
        *added,
        cache_seqlens=counts,
        return_softmax_lse=True,
        **place,
        **arguments,
    )
    assert counts.tolist() == lengths
    for request, length in enumerate(lengths):
        k, v = keys[:, request, : length + new]
        expected, expected_lse = dense(q[request], k, v, arguments)
        assert_equal(out[request], expected)
        assert_equal(lse[request], expected_lse)
    stored = sum(length + new for length in lengths)
    assert int(cache[0, ..., 0, 0].isfinite().sum()) == stored


def test_a_cache_is_read_with_one_length_for_all_or_whole(functions):
    q = numbers(2, 1, HEADS, SIZE)
    cache = numbers(2, 2, 9, KV_HEADS, SIZE, seed=1)
    whole = functions.flash_attn_with_kvcache(q, *cache)
    part = functions.flash_attn_with_kvcache(q, *cache, cache_seqlens=4)
    for index in range(2):
        assert_equal(whole[index], dense(q[index], *cache[:, index], {})[0])
        assert_equal(part[index], dense(q[index], *cache[:, index, :4], {})[0])


TENSOR = torch.zeros(1)
REJECTED = {
    "dropout": ("flash_attn_func", {"dropout_p": 0.1}, "dropout_p = 0.1"),
    "dropout as a tensor": ("flash_attn_func", {"dropout_p": TENSOR}, "is a tensor"),
    "lengths as a list": (
        "flash_attn_with_kvcache",
        {"cache_seqlens": [3, 3]},
        r"\[3, 3\]: expected a number",
    ),
    "weights": ("flash_attn_func", {"return_attn_probs": True}, "never stored"),
    "one side": ("flash_attn_func", {"window_size": (3, 5)}, r"\(3, 5\)"),
    "no pair": ("flash_attn_func", {"window_size": 3}, "expected a pair"),
    "slopes per sequence": (
        "flash_attn_func",
        {"causal": True, "alibi_slopes": torch.zeros(2, HEADS)},
        "the same for every sequence",
    ),
    "slopes both ways": (
        "flash_attn_func",
        {"alibi_slopes": torch.zeros(HEADS)},
        "need a causal call",
    ),
    "unknown": ("flash_attn_func", {"qv": TENSOR}, "does not take qv"),
    "rotation": ("flash_attn_with_kvcache", {"rotary_cos": TENSOR}, "rotate q and k"),
    "left padding": (
        "flash_attn_with_kvcache",
        {"cache_leftpad": TENSOR},
        "start at position 0",
    ),
    "half of an append": (
        "flash_attn_with_kvcache",
        {"k": numbers(2, 1, KV_HEADS, SIZE), "cache_seqlens": 3},
        "one of them is None",
    ),
    "an append to nothing": (
        "flash_attn_with_kvcache",
        {
            "k": numbers(2, 1, KV_HEADS, SIZE),
            "v": numbers(2, 1, KV_HEADS, SIZE),
        },
        "stored after those keys",
    ),
    "two tables": (
        "flash_attn_with_kvcache",
        {"block_table": TENSOR, "page_table": TENSOR},
        "two names of one argument",
    ),
    "a table and sequences": (
        "flash_attn_with_kvcache",
        {"block_table": TENSOR, "cache_batch_idx": TENSOR},
        "both say where keys are",
    ),
    "other values than keys": (
        "flash_attn_with_kvcache",
        {
            "k": numbers(2, 2, KV_HEADS, SIZE),
            "v": numbers(2, 3, KV_HEADS, SIZE),
            "cache_seqlens": 3,
        },
        r"k has \[2, 2\], v has \[2, 3\]",
    ),
    "keys of other requests": (
        "flash_attn_with_kvcache",
        {
            "k": numbers(3, 1, KV_HEADS, SIZE),
            "v": numbers(3, 1, KV_HEADS, SIZE),
            "cache_seqlens": 3,
        },
        r"q has \[2\], k has \[3\]",
    ),
    "more keys than the cache": (
        "flash_attn_with_kvcache",
        {
            "k": numbers(2, 1, KV_HEADS, SIZE),
            "v": numbers(2, 1, KV_HEADS, SIZE),
            "cache_seqlens": 9,
        },
        "expected 0 to 9 together",
    ),
    "starts alone": (
        "flash_attn_with_kvcache",
        {"cu_seqlens_q": TENSOR},
        "expected 3 axes",
    ),
    "an order of the third version": (
        "flash_attn_func",
        {"causal": 0.125},
        "expected True or False",
    ),
}


def test_rows_of_padding_store_nothing_and_give_zeros(monkeypatch):
    """transformers' continuous batching pads a captured decode so, where contents are not read."""
    monkeypatch.setenv("PAGETWIN_CHECK_VALUES", "0")
    function = FlashAttention("optimized").flash_attn_with_kvcache
    q, added = numbers(3, 1, HEADS, SIZE), numbers(2, 3, 1, KV_HEADS, SIZE, seed=1)
    cache = numbers(2, 6, BLOCK, KV_HEADS, SIZE, seed=2)
    alone = cache.clone()
    table = torch.tensor([[4, 2], [-1, -1], [-1, -1]], dtype=torch.int32, device=DEVICE)
    held = torch.tensor([20, -1, -1], dtype=torch.int32, device=DEVICE)
    given = {"cache_seqlens": held, "block_table": table}
    out = function(q, *cache, *added, **given, causal=True)
    first = {name: value[:1] for name, value in given.items()}
    right = function(q[:1], *alone, *added[:, :1], **first, causal=True)
    assert torch.equal(out[:1], right)
    assert not out[1:].any()
    assert torch.equal(cache, alone)


def test_requests_keys_and_values_have_to_be_as_many(functions):
    q, (k, v) = numbers(3, 1, HEADS, SIZE), numbers(2, 2, 9, KV_HEADS, SIZE)
    with pytest.raises(ValueError, match=r"q has \[3\], k has \[2\]"):
        functions.flash_attn_func(q, k, v)
    with pytest.raises(ValueError, match=r"k has \[2, 9\], v has \[1, 18\]"):
        functions.flash_attn_func(q[:2], k, v.reshape(1, 18, KV_HEADS, SIZE))
    with pytest.raises(ValueError, match="k_cache has 2 sequences for 3 requests"):
        functions.flash_attn_with_kvcache(q, k, v)


@pytest.mark.parametrize("has_lse", [False, True])
def test_packed_queries_of_a_cache(functions, has_lse):
    lens, starts = (1, 3), torch.tensor([0, 1, 4], dtype=torch.int32, device=DEVICE)
    q = numbers(4, HEADS, SIZE)
    cache = numbers(2, 4, BLOCK, KV_HEADS, SIZE, seed=1)
    table = torch.tensor([[2, 0], [3, 1]], dtype=torch.int32, device=DEVICE)
    keys = torch.tensor([20, 17], dtype=torch.int32, device=DEVICE)
    given = {"cache_seqlens": keys, "page_table": table, "causal": True}
    found = functions.flash_attn_with_kvcache(
        q,
        *cache,
        **given,
        cu_seqlens_q=starts,
        max_seqlen_q=3,
        cu_seqlens_k_new=None,
        return_softmax_lse=has_lse,
    )
    out = found[0] if has_lse else found
    for request, length in enumerate(lens):
        rows = slice(starts[request], starts[request + 1])
        alone = functions.flash_attn_with_kvcache(
            q[rows][None],
            *cache,
            cache_seqlens=keys[request : request + 1],
            page_table=table[request : request + 1],
            causal=True,
            return_softmax_lse=True,
        )
        assert torch.allclose(out[rows], alone[0][0], atol=1e-6)
        if has_lse:
            assert torch.allclose(found[1][:, rows], alone[1][0], atol=1e-5)
        assert length == len(q[rows])
    with pytest.raises(ValueError, match="belong together"):
        functions.flash_attn_with_kvcache(q, *cache, cu_seqlens_q=starts)
    with pytest.raises(NotImplementedError, match="store the keys before"):
        functions.flash_attn_with_kvcache(
            q, *cache, *cache, **given, cu_seqlens_q=starts, max_seqlen_q=3
        )


@pytest.mark.parametrize("name", REJECTED)
def test_what_is_not_computed_is_one_sentence_and_stores_nothing(functions, name):
    function, arguments, words = REJECTED[name]
    q = numbers(2, 1, HEADS, SIZE)
    cache = numbers(2, 2, 9, KV_HEADS, SIZE, seed=1)
    before = cache.clone()
    with pytest.raises(
        (NotImplementedError, TypeError, ValueError), match=words
    ) as raised:
        getattr(functions, function)(q, *cache, **arguments)
    assert "\n" not in str(raised.value)
    assert torch.equal(cache, before)


WRONG_READS = {
    "head size": (numbers(2, 1, HEADS, SIZE + 8), {}),
    "heads": (numbers(2, 1, HEADS + 1, SIZE), {}),
    "dtype": (numbers(2, 1, HEADS, SIZE).half(), {}),
    "gradient": (numbers(2, 1, HEADS, SIZE).requires_grad_(), {}),
    "slopes": (None, {"alibi_slopes": torch.zeros(HEADS + 1)}),
    "sinks": (None, {"s_aux": torch.zeros(HEADS + 1)}),
    "scale": (None, {"softmax_scale": "large"}),
    "length": (None, {"cache_seqlens": 9}),
}


@pytest.mark.parametrize("name", WRONG_READS)
def test_new_keys_are_not_stored_if_attention_would_raise(functions, name):
    q, arguments = WRONG_READS[name]
    q = numbers(2, 1, HEADS, SIZE) if q is None else q
    cache = numbers(2, 2, 9, KV_HEADS, SIZE, seed=1)
    before = cache.clone()
    added = numbers(2, 2, 1, KV_HEADS, SIZE, seed=2)
    given = {"cache_seqlens": 3, "causal": True} | on_device(arguments)
    with pytest.raises((ValueError, TypeError, IndexError, NotImplementedError)):
        functions.flash_attn_with_kvcache(q, *cache, *added, **given)
    assert torch.equal(cache, before)


def test_constants_of_a_traced_call_are_not_kept(functions):
    q = numbers(3, 5, HEADS, SIZE)
    k, v = numbers(2, 3, 7, KV_HEADS, SIZE, seed=1)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(tensor) for tensor in (q, k, v)]
        _starts(3, 5, fake[0].device)
        _rows(3, fake[0].device)
        _filled(3, 7, fake[0].device)
    assert functions.flash_attn_func(q, k, v).isfinite().all()
    with FakeTensorMode():
        assert isinstance(_starts(3, 5, q.device), FakeTensor)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"cu_seqlens_k": None}, "need their starts"),
        ({"seqused_k": TENSOR}, "needs a block_table"),
        ({"block_table": TENSOR, "seqused_k": TENSOR}, "not both"),
        ({"block_table": TENSOR, "cu_seqlens_k": None}, "not both"),
    ],
)
def test_numbers_of_keys_are_given_once(functions, arguments, words):
    given = {"cu_seqlens_q": TENSOR, "cu_seqlens_k": TENSOR} | arguments
    with pytest.raises(ValueError, match=words):
        functions.flash_attn_varlen_func(*numbers(3, 4, HEADS, SIZE), **given)


def test_hints_are_taken_and_a_wrong_number_of_axes_is_named(functions):
    q = numbers(2, 1, HEADS, SIZE)
    cache = numbers(2, 2, 9, KV_HEADS, SIZE, seed=1)
    hints = {"num_splits": 1, "pack_gqa": True, "sm_margin": 0, "qv": None}
    out = functions.flash_attn_with_kvcache(q, *cache, **hints)
    assert torch.equal(out, functions.flash_attn_with_kvcache(q, *cache))
    with pytest.raises(ValueError, match=r"q has shape \[1, 4, 32\]: expected 4 axes"):
        functions.flash_attn_func(q[0], *cache)


def test_padding_is_removed_and_added():
    values = numbers(2, 4, 3)
    mask = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 0]], device=DEVICE)
    packed, indices, starts, longest, counts = unpad_input(values, mask)
    assert (starts.tolist(), longest, counts.tolist()) == ([0, 2, 5], 3, [2, 3])
    assert torch.equal(packed, values[mask.bool()])
    assert torch.equal(pad_input(packed, indices, 2, 4), values * mask[..., None])


@pytest.fixture
def installed():
    """Install the reference, and remove it afterwards."""
    install("reference")
    yield
    uninstall()


def test_a_program_that_imports_flash_attn_finds_the_functions(installed):
    import flash_attn as imported
    from flash_attn.bert_padding import unpad_input as found
    from flash_attn.flash_attn_interface import flash_attn_varlen_func
    from flash_attn_interface import flash_attn_with_kvcache

    assert imported.__version__ == f"{flash_attn.API_VERSION}+pagetwin"
    assert imported.flash_attn_varlen_func == flash_attn_varlen_func
    assert flash_attn_with_kvcache.__wrapped__.__self__.implementation == "reference"
    assert found is unpad_input
    install("optimized")
    assert sys.modules["flash_attn"].__pagetwin__ == "optimized"
    uninstall()
    assert "flash_attn" not in sys.modules


def test_the_third_version_takes_by_position_what_both_order_alike(installed):
    import flash_attn_interface

    q, (k, v) = numbers(2, 3, HEADS, SIZE), numbers(2, 2, 5, KV_HEADS, SIZE, seed=1)
    named = {"causal": True, "softmax_scale": 0.5}
    out = FlashAttention("reference").flash_attn_func(q, k, v, **named)
    third = flash_attn_interface.flash_attn_func
    found, lse = third(q, k, v, **named, attention_chunk=0, return_attn_probs=True)
    assert torch.equal(found, out)
    assert lse.shape == (2, HEADS, 3)
    with pytest.raises(TypeError, match="takes 3 arguments by position"):
        third(q, k, v, 0.5)
    # packed keys, and twelve arguments in the order of the third version
    starts = torch.tensor([0, 3], dtype=torch.int32, device=DEVICE)
    packed = flash_attn_interface.flash_attn_varlen_func
    with pytest.raises(TypeError, match="takes 7 arguments by position"):
        packed(q[0], q[0], q[0], starts, starts, 3, 3, None, None, 0.125)
    named = inspect.signature(packed).parameters["softmax_scale"]
    assert named.kind is named.KEYWORD_ONLY


def test_the_original_keeps_its_place(monkeypatch, tmp_path):
    (tmp_path / "flash_attn_interface.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RuntimeError, match="flash_attn_interface is there already"):
        install()
    assert "flash_attn" not in sys.modules


def test_an_unknown_implementation_installs_nothing():
    with pytest.raises(ValueError, match="cannot be loaded"):
        install("a_package_that_is_missing")
    assert "flash_attn" not in sys.modules


def test_signatures_show_what_callers_look_for():
    for name in (
        "flash_attn_func",
        "flash_attn_varlen_func",
        "flash_attn_with_kvcache",
    ):
        known = inspect.signature(getattr(flash_attn, name)).parameters
        assert {"softmax_scale", "causal", "window_size", "softcap", "s_aux"} <= set(
            known
        )


def test_a_kernel_of_the_hub_has_the_functions_and_is_written_once(tmp_path):
    folder = write_hub_kernel(tmp_path / "kernel", "reference")
    file = folder / "build/torch-universal/__init__.py"
    spec = importlib.util.spec_from_file_location("hub_kernel", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.flash_attn_with_kvcache.__self__.implementation == "reference"
    metadata = json.loads(file.with_name("metadata.json").read_text())
    assert metadata["name"] == "pagetwin-flash-attn"
    with pytest.raises(FileExistsError, match="is not empty"):
        write_hub_kernel(folder)
    with pytest.raises(FileExistsError, match="is a file: expected a folder"):
        write_hub_kernel(file)
    with pytest.raises(ValueError, match="cannot be loaded"):
        write_hub_kernel(tmp_path / "other", "a_package_that_is_missing")
    assert not (tmp_path / "other").exists()
