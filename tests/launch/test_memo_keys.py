"""What is kept from call to call: one that has answered once answers others as a new one does.

Whatever an answer follows from is in the key under which it is kept. Each input of each memo is
changed alone, and each two of them.
"""

from collections.abc import Callable
from dataclasses import fields, replace
from itertools import combinations_with_replacement
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.contract.parallel import KeySplits
from pagetwin.optimized.dispatch import cascade, dispatch
from pagetwin.optimized.kernels.sm90.latent import family as latent
from pagetwin.optimized.kernels.sm90.prefill import family as prefill
from pagetwin.optimized.parallel.rank_splits import RankSplits
from pagetwin.optimized.runtime.cost_layer import Layer
from support.supported_calls import make_call


class Memo(NamedTuple):
    """Something that keeps what it has found.

    Args:
        make: returns a new one.
        ask: returns its answer for some inputs.
        inputs: of the first call.
        others: another value of each input.
    """

    make: Callable[[], Any]
    ask: Callable[..., Any]
    inputs: dict[str, Any]
    others: dict[str, Any]


def encode(number: int, descriptor: Any) -> list[Any]:
    """Return what a tensor map is encoded from."""
    base = descriptor.base
    sizes = descriptor.shape, descriptor.strides, descriptor.block_shape
    return [(number, base.data_ptr(), base.dtype, *map(tuple, sizes))]


def with_encoder(plan: Any) -> Any:
    plan.launcher = SimpleNamespace(encode=encode)
    return plan


def ask_for_runs(
    splits: RankSplits, width: int, size: int, block: int, slot: int
) -> Any:
    """Return a block table of runs, for blocks of so many slots and strides of blocks and slots."""
    cache = torch.empty_strided((9, size, 1, 8), (block, slot, 8, 1))
    rows = torch.arange(2 * width, dtype=torch.int32).view(2, width)
    table, run = splits.tables(rows, cache)
    return table.tolist(), run


MEMOS = {
    "tensor maps of a prefill": Memo(
        lambda: with_encoder(prefill.plan(make_call())),
        lambda plan, query, key, value, out, tokens, keys: plan.tensor_maps(
            (query, key, value, out), (tokens, keys, keys, tokens)
        ),
        {"query": 64, "key": 128, "value": 256, "out": 512, "tokens": 0, "keys": 0},
        {"query": 128, "key": 64, "value": 64, "out": 64, "tokens": 3, "keys": 5},
    ),
    "tensor maps of a latent decode": Memo(
        lambda: latent.plan(make_call(is_latent=True)),
        lambda plan, **given: plan.tensor_maps(SimpleNamespace(encode=encode), **given),
        {"q_rows": 16, "tokens": 3, "query": 64, "cache": 128},
        {"q_rows": 64, "tokens": 5, "query": 128, "cache": 64},
    ),
    "runs of fixed splits": Memo(
        lambda: RankSplits((2, 0, 1), KeySplits(4), torch.device("cpu")),
        ask_for_runs,
        {"width": 2, "size": 16, "block": 1024, "slot": 8},
        {"width": 3, "size": 32, "block": 2048, "slot": 16},
    ),
    "options of an operation": Memo(
        lambda: AttentionOptions(sliding_window=3),
        lambda options, causal: dispatch.choose_options(options, causal),
        {"causal": True},
        {"causal": False},
    ),
}


@pytest.mark.parametrize("name", MEMOS)
def test_what_is_kept_is_found_again_for_equal_inputs_alone(name: str) -> None:
    memo = MEMOS[name]
    assert {*memo.inputs} == {*memo.others}
    for changed in combinations_with_replacement(memo.inputs, 2):
        inputs = memo.inputs | {name: memo.others[name] for name in changed}
        used = memo.make()
        first = memo.ask(used, **memo.inputs)
        new = memo.make()
        right = memo.ask(new, **inputs)
        assert memo.ask(used, **inputs) == right, changed
        assert memo.ask(used, **memo.inputs) == first


def test_options_over_a_prefix_belong_to_one_object() -> None:
    """They are kept in the dictionary of the options, which a copy does not share."""
    one = AttentionOptions(causal=True, sinks=torch.ones(2), logits_soft_cap=3.0)
    over_prefix = cascade._options_over_prefix
    assert over_prefix(one) is over_prefix(one)
    other = replace(one, logits_soft_cap=5.0)
    assert over_prefix(other).logits_soft_cap == 5.0
    assert dispatch.choose_options(replace(one, causal=None), False).causal is False


def test_layers_that_differ_in_one_field_are_told_apart() -> None:
    """The rows of query tiles are kept under the layer."""
    layer = Layer(4, 2, 256, 512, True, None, 132)
    for field in fields(Layer):
        value = getattr(layer, field.name)
        other = 7 if value is None else value + 1
        changed = replace(layer, **{field.name: other})
        assert changed != layer and len({layer, changed}) == 2, field.name
