"""PagedCache of transformers against dense tensors, and calls of it that are out of turn."""

import copy
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")
from library_models import (
    draw,
    on_device,
    tiny,
)
from pagetwin.contract.block_classes import OutOfBlocks
from pagetwin.integrations.transformers import PagedCache, register
from support.twins import WITHOUT_GPU
from transformers import AttentionInterface

HEADS, SIZE = 2, 4


class Layer(nn.Module):
    """An attention module of a decoder, as far as the attention function knows it."""

    def __init__(self, index: int, window: int | None) -> None:
        super().__init__()
        self.layer_idx, self.window = index, window


class Dense:
    """Keys and values of padded requests, and attention over them in float64.

    Args:
        is_token: [reqs, columns] bool.
        keys, values: per layer [reqs, heads, columns, size].
    """

    def __init__(self, num_reqs: int, num_layers: int) -> None:
        self.is_token = torch.zeros(num_reqs, 0, dtype=torch.bool)
        empty = torch.zeros(num_reqs, HEADS, 0, SIZE)
        self.keys, self.values = [empty] * num_layers, [empty] * num_layers

    def change(self, rows: Callable[[Tensor], Tensor]) -> None:
        """Select or repeat requests in every tensor."""
        self.is_token = rows(self.is_token)
        self.keys, self.values = (
            [rows(tensor) for tensor in tensors] for tensors in (self.keys, self.values)
        )

    def crop(self, num_columns: int) -> None:
        """Keep the first columns."""
        self.is_token = self.is_token[:, :num_columns]
        self.keys, self.values = (
            [tensor[:, :, :num_columns] for tensor in tensors]
            for tensors in (self.keys, self.values)
        )

    def mask(self, num_new: int, window: int | None) -> Tensor:
        """Return the library's mask for the last columns."""
        column = torch.arange(self.is_token.shape[1])
        query = column[len(column) - num_new :, None]
        shown = column <= query
        if window is not None:
            shown = shown & (column > query - window)
        return (shown & self.is_token[:, None, :])[:, None]

    def attend(self, layer: int, query: Tensor, mask: Tensor) -> Tensor:
        """Return [reqs, queries, heads, size]; queries that attend to nothing give 0."""
        keys, values = self.keys[layer].double(), self.values[layer].double()
        scores = query.double() @ keys.transpose(2, 3) * 0.5
        weights = scores.masked_fill(~mask, -torch.inf).softmax(3).nan_to_num(0)
        return (weights @ values).transpose(1, 2)


class History:
    """A PagedCache and the same cache in dense tensors, changed by the same random operations.

    Args:
        seed: of the random numbers.
        windows: per layer the window, or None.
        implementation: name of the twin.
    """

    def __init__(
        self, seed: int, windows: tuple[int | None, ...], implementation: str
    ) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.layers = [Layer(index, window) for index, window in enumerate(windows)]
        self.name = register(implementation)
        self.cache = PagedCache(96, 3, implementation)
        self.dense = Dense(self.random.randint(1, 3), len(windows))
        self.has_windows = any(windows)

    def append(self) -> None:
        """Run all layers on new columns, of which some are padding."""
        num_reqs, before = self.dense.is_token.shape
        num_new = self.random.randint(1, 7)
        tokens = torch.ones(num_reqs, num_new, dtype=torch.bool)
        for row in tokens:
            if self.random.random() < 0.5 and not (self.has_windows and before):
                row[: self.random.randint(0, num_new - 1)] = False
                if not self.has_windows and self.random.random() < 0.5:
                    row[:] = row.flip(0)
        self.dense.is_token = torch.cat([self.dense.is_token, tokens], 1)
        for layer in self.layers:
            index = layer.layer_idx
            query, key, value = torch.randn(
                3, num_reqs, HEADS, num_new, SIZE, generator=self.generator
            )
            self.dense.keys[index] = torch.cat([self.dense.keys[index], key], 2)
            self.dense.values[index] = torch.cat([self.dense.values[index], value], 2)
            mask = self.dense.mask(num_new, layer.window)
            right = self.dense.attend(index, query, mask)
            keys, values = self.cache.update(key, value, index)
            found, _ = AttentionInterface()[self.name](
                layer,
                query,
                keys,
                values,
                mask,
                scaling=0.5,
                sliding_window=layer.window,
            )
            right = right * tokens[:, :, None, None]
            torch.testing.assert_close(found, right.float(), atol=1e-5, rtol=1e-5)
        assert self.cache.get_seq_length() == self.dense.is_token.shape[1]

    def crop(self) -> None:
        """Forget some columns, once by their number and once by the length that remains."""
        length = self.dense.is_token.shape[1]
        removed = self.random.randint(0, length - 1)
        by_length = removed and self.random.random() < 0.5
        self.cache.crop(length - removed if by_length else -removed)
        self.dense.crop(length - removed)

    def reorder(self) -> None:
        """Give each request the content of a random one."""
        num_reqs = len(self.dense.is_token)
        chosen = [self.random.randrange(num_reqs) for _ in range(num_reqs)]
        self.cache.reorder_cache(torch.tensor(chosen))
        self.dense.change(lambda states: states[chosen])

    def select(self) -> None:
        """Keep one request or some."""
        num_reqs = len(self.dense.is_token)
        kept = sorted(
            self.random.sample(range(num_reqs), self.random.randint(1, num_reqs))
        )
        self.cache.batch_select_indices(torch.tensor(kept))
        self.dense.change(lambda states: states[kept])

    def repeat(self) -> None:
        """Repeat each request, if there are few."""
        if len(self.dense.is_token) <= 3:
            self.cache.batch_repeat_interleave(2)
            self.dense.change(lambda states: states.repeat_interleave(2, 0))

    def copy(self) -> None:
        """Go on with a copy; afterwards the original is changed, which the copy must not see."""
        original = self.cache
        if self.random.random() < 0.5:
            self.cache = copy.deepcopy(original)
        else:
            self.cache = pickle.loads(pickle.dumps(original))
        for layer in original.layers:
            layer.pages.poison(range(96))
        original.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.cache.reset()
        self.dense = Dense(self.random.randint(1, 3), len(self.layers))

    def run(self, num_steps: int) -> None:
        """Append, and change the cache in between."""
        others = (
            self.crop,
            self.crop,
            self.reorder,
            self.select,
            self.repeat,
            self.copy,
            self.reset,
        )
        for _ in range(num_steps):
            self.append()
            if self.random.random() < 0.7:
                self.random.choice(others)()
        self.append()


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    "windows",
    [(None, None), (None, 4), (4, None)],
    ids=["full", "mixed", "window first"],
)
@pytest.mark.parametrize("seed", range(12))
def test_a_paged_cache_holds_what_a_dense_cache_holds(
    windows: tuple[int | None, ...], seed: int
) -> None:
    """Padding on both sides and between, crops, beams, copies; freed pages hold NaN."""
    History(seed, windows, "reference").run(12)


@WITHOUT_GPU
def test_a_paged_cache_of_the_optimized_twin_does_too() -> None:
    History(3, (None, 4), "optimized").run(4)


# --- out of turn


@pytest.fixture
def model() -> Any:
    """Return a copy of a model that runs on the reference."""
    model = copy.deepcopy(tiny("llama"))
    model.set_attn_implementation(register("reference"))
    with torch.no_grad():
        yield model


def run(model: Any, cache: Any, count: int = 3) -> Tensor:
    ids = on_device([draw(count, seed=count)])
    logits: Tensor = model(ids, past_key_values=cache, use_cache=True).logits
    return logits


def test_a_paged_cache_of_two_models_raises(model: Any) -> None:
    cache, other = PagedCache(9, 4, "reference"), copy.deepcopy(model)
    told = run(model, copy.deepcopy(cache), 5)
    run(model, cache)
    with pytest.raises(ValueError, match="expected one model per PagedCache"):
        run(other, cache)
    # nothing has changed, and after a reset another model may use it
    run(model, cache)
    cache.reset()
    torch.testing.assert_close(run(other, cache, 5), told)
    with pytest.raises(ValueError, match="expected one model per PagedCache"):
        run(model, cache)


def test_a_run_that_ended_before_its_last_layer_is_noticed(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layers that had run would attend to the tokens twice."""
    cache = PagedCache(9, 4, "reference")
    run(model, cache)
    layer = model.model.layers[1].self_attn
    monkeypatch.setattr(layer, "forward", lambda **_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(model, cache)
    monkeypatch.undo()
    for again in (
        lambda: run(model, cache),
        lambda: cache.crop(-1),
        lambda: cache.batch_repeat_interleave(2),
        lambda: cache.reorder_cache(torch.tensor([0])),
    ):
        with pytest.raises(ValueError, match=r"ended before its last layer.*reset\(\)"):
            again()
    cache.reset()
    run(model, cache)


def test_a_first_run_that_ended_before_its_last_layer_is_noticed(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = PagedCache(9, 4, "reference")
    monkeypatch.setattr(model.model.layers[1].self_attn, "forward", lambda **_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(model, cache)
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"layer 1 .* has 0 tokens .* has 6"):
        run(model, cache)


def test_a_write_that_does_not_fit_changes_nothing(model: Any) -> None:
    """The last block is shared and would be copied; then the next beam has no block."""
    cache = PagedCache(3, 2, "reference")
    run(model, cache)
    told = run(model, copy.deepcopy(cache), 1)
    cache.batch_repeat_interleave(3)
    before = pickle.dumps(cache.rows.manager)
    with pytest.raises(OutOfBlocks):
        model(on_device([[5], [5], [5]]), past_key_values=cache, use_cache=True)
    assert pickle.dumps(cache.rows.manager) == before
    assert cache.get_seq_length() == 3
    cache.batch_select_indices(torch.tensor([True, False, False]))
    torch.testing.assert_close(run(model, cache, 1), told)


def test_masks_that_show_other_padding_in_another_layer_raise() -> None:
    layers, cache = [Layer(0, None), Layer(1, None)], PagedCache(9, 4, "reference")
    attend = AttentionInterface()[register("reference")]
    key = torch.randn(1, HEADS, 3, SIZE)
    whole = torch.ones(1, 1, 3, 3, dtype=torch.bool).tril()
    part = whole.clone()
    part[..., 0] = False
    attend(layers[0], key, *cache.update(key, key, 0), part)
    with pytest.raises(NotImplementedError, match="two layers show different tokens"):
        attend(layers[1], key, *cache.update(key, key, 1), whole)


def test_a_mask_is_read_for_each_cache_and_number_of_requests() -> None:
    """What was read from it for one cache was used for another one with other lengths."""
    attend, key = AttentionInterface()[register("reference")], torch.randn(2, 2, 3, 4)
    mask = torch.ones(1, 1, 3, 3, dtype=torch.bool)

    def write(cache: PagedCache, num_reqs: int) -> Tensor:
        new = key[:num_reqs]
        shown = cache.update(new, new, 0)
        attend(Layer(0, None), new, *shown, mask, is_causal=False)
        return cache.rows.contents.is_token

    cache = PagedCache(4, 4, "reference")
    assert write(cache, 1).tolist() == [[True] * 3]
    cache.reset()
    assert write(cache, 2).tolist() == [[True] * 3] * 2
    with pytest.raises(NotImplementedError, match=r"attention_mask\[0, 0, 0, 2\]"):
        write(PagedCache(4, 4, "reference", lengths=[2]), 1)


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda c: c.crop(-9), ValueError, "removes 9 tokens: expected at most the 3"),
        (lambda c: c.crop(-1.0), TypeError, "tokens_to_remove.* expected an integer"),
        (lambda c: c.reorder_cache(torch.tensor([1])), IndexError, r"indices\[0\] = 1"),
        (lambda c: c.batch_select_indices([2.0]), TypeError, "expected an integer"),
        (lambda c: c.batch_repeat_interleave(0), ValueError, "repeats = 0"),
        (lambda c: c.layers[0].crop(-1), TypeError, r"expected cache\.crop\("),
        (
            lambda c: c.layers[0].reorder_cache(None),
            TypeError,
            "reorder_cache of one l",
        ),
        (lambda c: c.layers[0].batch_repeat_interleave(2), TypeError, "of one layer"),
        (lambda c: c.layers[0].batch_select_indices(None), TypeError, "of one layer"),
        (lambda c: c.layers[0].reset(), TypeError, "reset of one layer"),
        (lambda c: PagedCache("9"), TypeError, "num_blocks = '9' is str"),
        (lambda c: PagedCache(9.0), TypeError, "num_blocks = 9.0 is float"),
        (lambda c: PagedCache(9, True), TypeError, "block_size = True is bool"),
        (lambda c: PagedCache(0), ValueError, "num_blocks = 0: expected at least 1"),
        (lambda c: PagedCache(9, lengths=[-1]), ValueError, r"lengths\[0\] = -1"),
        (lambda c: PagedCache(9, lengths=5), TypeError, "expected a list of integers"),
    ],
)
def test_bad_calls_of_a_paged_cache_raise_and_change_nothing(
    model: Any, call: Callable[[Any], Any], error: type[Exception], words: str
) -> None:
    cache = PagedCache(9, 4, "reference")
    run(model, cache)
    told = run(model, copy.deepcopy(cache), 2)
    with pytest.raises(error, match=words):
        call(cache)
    torch.testing.assert_close(run(model, cache, 2), told)


def test_a_copy_of_a_cache_is_independent(model: Any) -> None:
    """A deep copy raised: cannot pickle 'module' object."""
    cache = PagedCache(9, 4, "reference")
    assert copy.deepcopy(cache).get_seq_length() == 0
    run(model, cache)
    branch = copy.deepcopy(cache)
    told = [run(model, copy.deepcopy(cache), count) for count in (1, 2)]
    torch.testing.assert_close(run(model, branch, 2), told[1])
    torch.testing.assert_close(run(model, cache, 1), told[0])
    assert (branch.get_seq_length(), cache.get_seq_length()) == (5, 4)
    assert branch.layers[0].keys.shape == (1, 2, 5, 16)
