"""A wrong call raises the same error whether or not a right call has its signature.

A launch plan serves all calls with one signature, and what the signature leaves out is validated at
each call (optimized/runtime/attention_call.py). In the interpreter nothing is planned ahead, so
these tests let it.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from pagetwin import optimized
from pagetwin.conformance.cases.batches import BatchPlan
from pagetwin.conformance.cases.options import paged_call, ragged_call
from pagetwin.optimized.attention import latent
from pagetwin.optimized.cache import cache_ops
from pagetwin.optimized.dispatch import cascade, dispatch
from pagetwin.optimized.runtime import attention_call
from pagetwin.optimized.runtime.launcher import INTERPRETED
from pagetwin.optimized.runtime.plan_cache import PlanCache, SignatureCache

BATCH = BatchPlan((2, 3), (40, 37), block_size=16, group=2)


def paged(device: torch.device) -> dict[str, Any]:
    return paged_call(BATCH, device).keywords


def of_cascade(device: torch.device) -> dict[str, Any]:
    given = paged(device) | {"common_prefix_len": 16}
    given["block_table"][:, 0] = given["block_table"][0, 0]
    return given


def ragged(device: torch.device) -> dict[str, Any]:
    return ragged_call(paged_call(BATCH, device)).keywords


def write(device: torch.device) -> dict[str, Any]:
    names = ("key", "value", "key_cache", "value_cache")
    shapes = ((5, 2, 16), (5, 2, 16), (4, 16, 2, 16), (4, 16, 2, 16))
    given = {
        name: torch.ones(shape, device=device)
        for name, shape in zip(names, shapes, strict=True)
    }
    return given | {"slot_mapping": torch.arange(4, device=device)}


def latent_write(device: torch.device) -> dict[str, Any]:
    names = ("kv_c", "k_pe", "kv_cache")
    shapes = ((5, 16), (5, 8), (4, 16, 24))
    given = {
        name: torch.ones(shape, device=device)
        for name, shape in zip(names, shapes, strict=True)
    }
    return given | {"slot_mapping": torch.arange(4, device=device)}


OPERATIONS: dict[str, Callable[[torch.device], dict[str, Any]]] = {
    "paged_attention": paged,
    "cascade_attention": of_cascade,
    "encoder_attention": ragged,
    "reshape_and_cache": write,
    "concat_and_cache_mla": latent_write,
}


def added(device: torch.device) -> dict[str, Any]:
    """Return the optional arguments of attention."""
    return {
        "scale": 0.25,
        "out": torch.zeros(5, 4, 16, device=device),
        "lse": torch.zeros(4, 5, device=device),
    }


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch, unchecked_values: None) -> Iterator[None]:
    """Plans are kept, as on a GPU, and contents are not validated."""
    monkeypatch.setattr(attention_call, "INTERPRETED", False)
    yield
    if INTERPRETED:
        for module in (dispatch, cascade):
            module.PIPELINE.plans.clear()


class IsRight(Exception):
    """A call was validated and would be planned or launched."""


def first_error(operation: str, given: dict[str, Any]) -> Exception | None:
    """Return the error of a call whose signature is not known, or None if the call is right."""

    def start(*arguments: Any, **named: Any) -> Any:
        raise IsRight

    with pytest.MonkeyPatch.context() as patch:
        for module in (dispatch, cascade):
            patch.setattr(module.PIPELINE, "plans", PlanCache(1))
            patch.setattr(module.PIPELINE, "make_plan", start)
        for module in (cache_ops, latent):
            patch.setattr(module, "WRITES", SignatureCache(1))
            patch.setattr(module, "launch_kernel", start)
        try:
            getattr(optimized, operation)(**given)
        except IsRight:
            return None
        except Exception as error:
            return error
    return None


def wrong_values(value: Any) -> Iterator[Any]:
    """Yield values in the place of a right one. Some of them are right, too."""
    if isinstance(value, torch.Tensor):
        yield value[:-1]
        yield value[:0]
        yield torch.cat([value, value])
        yield value[..., :-1].contiguous()
        yield value[None]
        yield value[0]
        yield None
        yield value.cpu().numpy()
        if value.is_floating_point():
            yield value.clone().requires_grad_()
        yield value.to(torch.float64 if value.is_floating_point() else torch.int16)
    elif isinstance(value, int):
        yield from (-1, -16, 0, 1, value - 1, value + 1, 20, 160, 2**20, 2**31)
    elif isinstance(value, float):
        yield from (float("nan"), float("inf"), -float("inf"), 1e31, -1e31, 1e-45)


@pytest.mark.extended
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_wrong_call_is_rejected_after_right_ones(
    operation: str, planned: None, device: torch.device
) -> None:
    right = OPERATIONS[operation](device)
    if "options" in right:
        more = added(device)
        right |= {name: more[name] for name in more if right.get(name) is None}
    for _ in range(3):  # the third one repeats the second one's launches
        getattr(optimized, operation)(**right)
    rejected = {"options"} & {*right}  # a signature has all of them
    for name, value in right.items():
        for wrong in wrong_values(value):
            changed = right | {name: wrong}
            expected = first_error(operation, changed)
            if expected is None:
                continue
            rejected.add(name)
            with pytest.raises(type(expected), match=re.escape(str(expected))):
                getattr(optimized, operation)(**changed)
    assert rejected == {*right}
