"""Tensors with gradients or without plain memory are rejected by both twins, before any write.

With a gradient, the reference's cache became a part of autograd's graph, and the optimized twin's
silently did not.
"""

import inspect
from typing import Any

import pytest
import torch
from pagetwin.contract.argument_kinds import kind_of
from pagetwin.contract.operations import load_implementation
from pagetwin.examples import EXAMPLES, Example, example_names, run_example
from pagetwin.reference import AttentionOptions
from torch import Tensor

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="runs once, on a machine without a GPU"
)


def float_arguments(example: Example) -> list[str]:
    """Return the arguments of an operation that are tensors of floating-point numbers."""
    operation = load_implementation("reference").operations.get(example.operation)
    if operation is None or inspect.isclass(operation):
        return []
    parameters = inspect.signature(operation).parameters.values()
    return [
        parameter.name
        for parameter in parameters
        if kind_of(parameter.annotation).has_gradient
    ]


WITH_FLOATS = [example for example in EXAMPLES if float_arguments(example)]


@pytest.mark.sample(10)
@pytest.mark.parametrize("twin", ["reference", "optimized"])
@pytest.mark.parametrize("example", WITH_FLOATS, ids=lambda each: each.operation)
def test_a_tensor_that_requires_a_gradient_is_rejected(
    example: Example, twin: str
) -> None:
    names = example_names(load_implementation(twin))
    operation = names[example.operation]
    signature = inspect.signature(operation)
    tried: list[str] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        for name in float_arguments(example):
            value = given.get(name)
            if not isinstance(value, Tensor) or not value.is_floating_point():
                continue
            tried.append(name)
            tensors = [
                argument for argument in given.values() if isinstance(argument, Tensor)
            ]
            before = [tensor.clone() for tensor in tensors]
            changed = {name: value.clone().requires_grad_()}
            with pytest.raises(
                NotImplementedError, match=f"{name} requires a gradient: expected none"
            ):
                operation(**(given | changed))
            for tensor, kept in zip(tensors, before, strict=True):
                assert torch.equal(tensor.view(torch.uint8), kept.view(torch.uint8))
        return operation(*args, **kwargs)

    names[example.operation] = call
    list(run_example(example, names))
    assert tried


@pytest.mark.parametrize("twin", ["reference", "optimized"])
def test_without_grad_mode_it_is_taken(twin: str) -> None:
    cache, key = torch.zeros(2, 3, 2, 1, 1), torch.ones(1, 1, 1, requires_grad=True)
    write = load_implementation(twin).reshape_and_cache
    with torch.no_grad():
        write(key, key, cache[0], cache[1], torch.tensor([4]))
    assert cache[:, 2, 0].flatten().tolist() == [1, 1]
    assert not cache.requires_grad


@pytest.mark.parametrize("twin", ["reference", "optimized"])
def test_options_that_require_a_gradient_are_rejected(twin: str) -> None:
    loaded = load_implementation(twin)
    sinks = torch.zeros(1, requires_grad=True)
    new, starts = torch.ones(1, 1, 1), torch.tensor([0, 1], dtype=torch.int32)
    given = (new, new, new, starts, starts, 1, 1)
    with pytest.raises(NotImplementedError, match="sinks requires a gradient"):
        loaded.encoder_attention(*given, options=AttentionOptions(sinks=sinks))


SPECIAL: dict[str, Any] = {
    "a nested tensor": lambda each: torch.nested.nested_tensor([*each]),
    "a sparse tensor": lambda each: each.to_sparse(),
    "a meta tensor": lambda each: each.to("meta"),
    "a quantized tensor": lambda each: torch.quantize_per_tensor(
        each, 1.0, 0, torch.qint8
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("twin", ["reference", "optimized"])
@pytest.mark.parametrize("what", SPECIAL)
def test_a_tensor_without_plain_memory_is_named(what: str, twin: str) -> None:
    cache = torch.zeros(2, 3, 2, 1, 8)
    given = {
        "key": torch.ones(1, 1, 8),
        "value": torch.ones(1, 1, 8),
        "key_cache": cache[0],
        "value_cache": cache[1],
        "slot_mapping": torch.tensor([4]),
    }
    write = load_implementation(twin).reshape_and_cache
    for name in ("key", "key_cache"):
        changed = {name: SPECIAL[what](given[name])}
        with pytest.raises((NotImplementedError, ValueError)) as raised:
            write(**(given | changed))
        assert name in str(raised.value) and "expected" in str(raised.value)
        assert not cache.any()


@pytest.mark.parametrize("twin", ["reference", "optimized"])
def test_a_transform_of_torch_is_named(twin: str) -> None:
    cache = torch.zeros(2, 3, 2, 1, 8)
    write = load_implementation(twin).reshape_and_cache
    keys, slots = torch.ones(2, 1, 1, 8), torch.tensor([[4], [5]])
    mapped = torch.vmap(lambda key, slot: write(key, key, *cache, slot))
    with pytest.raises(NotImplementedError, match=r"inside a transform of torch\.func"):
        mapped(keys, slots)
    assert not cache.any()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("twin", ["reference", "optimized"])
def test_a_scale_that_requires_a_gradient_is_rejected_before_any_write(
    twin: str, dtype: torch.dtype
) -> None:
    """A measured scale is written, after the codes of its token."""
    key, cache = torch.ones(1, 1, 4), torch.zeros(2, 3, 4, 1, 4).to(dtype)
    shape = (3, 4, 1) if dtype == torch.int8 else (1,)
    scale = torch.ones(shape, requires_grad=True)
    write = load_implementation(twin).reshape_and_cache
    with pytest.raises(NotImplementedError, match="k_scale requires a gradient"):
        write(
            key,
            key,
            *cache,
            torch.tensor([5]),
            k_scale=scale,
            v_scale=torch.ones(shape),
        )
    assert not cache.view(torch.uint8).any()


@pytest.mark.parametrize("twin", ["reference", "optimized"])
def test_one_tensor_cannot_hold_the_measured_scales_of_keys_and_of_values(
    twin: str,
) -> None:
    key, cache = torch.ones(1, 1, 4), torch.zeros(2, 3, 4, 1, 4, dtype=torch.int8)
    scale = torch.zeros(3, 4, 1)
    write = load_implementation(twin).reshape_and_cache
    for wrong, other in ((scale, scale), (scale[:1].expand(3, 4, 1), scale.clone())):
        with pytest.raises(ValueError, match="scale"):
            write(key, key, *cache, torch.tensor([5]), k_scale=wrong, v_scale=other)
    assert not cache.any() and not scale.any()
