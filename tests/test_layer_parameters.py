"""Are layers compared by everything a plan fixes, and by nothing else?"""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import Twin
from hypothesis import given
from hypothesis import strategies as st
from pagetwin.contract.layer_parameters import PerLayerParameters

COMPARED = {
    "window_left": st.sampled_from([-1, 127]),
    "logits_soft_cap": st.sampled_from([None, 30.0]),
    "sm_scale": st.sampled_from([0.125, 0.25]),
    "has_sinks": st.booleans(),
}
layers = st.builds(PerLayerParameters, **COMPARED)


class Impl:
    """An implementation with whatever attributes a case gives it."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


@given(params=st.lists(layers, min_size=1, max_size=4))
def test_the_flags_say_whether_all_layers_agree(
    params: list[PerLayerParameters], twin: Twin
) -> None:
    named = {f"layer.{n}": each for n, each in enumerate(params)}
    before = {name: vars(each).copy() for name, each in named.items()}
    found = twin.infer_global_hyperparameters(named)
    assert found == params[0] and found is not params[0]
    windows = {each.window_left for each in params}
    everything = {tuple(getattr(each, name) for name in COMPARED) for each in params}
    assert found.has_same_window_lefts == (len(windows) == 1)
    assert found.has_same_all_params == (len(everything) == 1)
    assert {name: vars(each) for name, each in named.items()} == before


def test_every_field_but_the_flags_is_compared() -> None:
    fields = {
        each.name: each.compare for each in dataclasses.fields(PerLayerParameters)
    }
    assert {name for name, compared in fields.items() if compared} == set(COMPARED)
    assert set(fields) - set(COMPARED) == {
        "has_same_window_lefts",
        "has_same_all_params",
    }


def test_the_numbers_are_read_off_the_implementation(twin: Twin) -> None:
    impls = {
        "a": Impl(scale=0.125),
        "b": Impl(
            scale=0.5, sliding_window=(127, 0), logits_soft_cap=30.0, sinks=[1.0]
        ),
        "c": Impl(scale=1.0, sliding_window=None, sinks=None),
    }
    model = {name: SimpleNamespace(impl=impl) for name, impl in impls.items()}
    found = twin.get_per_layer_parameters(
        {**model, "norm": object()}, ["norm", "b", "a", "c"], Impl
    )
    assert found == {
        "b": PerLayerParameters(127, 30.0, 0.5, has_sinks=True),
        "a": PerLayerParameters(-1, None, 0.125),
        "c": PerLayerParameters(-1, None, 1.0),
    }
    assert list(found) == ["b", "a", "c"]


def test_layers_that_cannot_be_are_refused(twin: Twin) -> None:
    def ask(impl: Any, name: str = "a") -> Any:
        layers = {"a": SimpleNamespace(impl=impl)}
        return twin.get_per_layer_parameters(layers, [name], Impl)

    with pytest.raises(KeyError, match="layer 'b': expected one of a"):
        ask(Impl(scale=1.0), "b")
    with pytest.raises(
        TypeError, match="layer 'a' runs SimpleNamespace: expected Impl"
    ):
        ask(SimpleNamespace(scale=1.0))
    with pytest.raises(TypeError, match="layer 'a' has no scale"):
        ask(Impl())
    with pytest.raises(
        TypeError, match="sliding_window = 128: expected None or the pair"
    ):
        ask(Impl(scale=1.0, sliding_window=128))
    with pytest.raises(ValueError, match="expected at least one layer"):
        twin.infer_global_hyperparameters({})
