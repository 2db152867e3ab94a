"""What tells two calls apart: each size, stride, dtype and device of each of their tensors.

Calls with one signature share a launch plan, a repeated call or a repeated write, so whatever those
follow from has to be in the signature, or is read at each call. The cases are generated from the
fields of a call, from the options, and from the arguments of the operations.
"""

from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import pytest
import torch
from pagetwin.contract.attention_options import OPTIONS_PER_BATCH, AttentionOptions
from pagetwin.optimized.runtime import attention_call
from pagetwin.optimized.runtime.attention_call import AttentionCall, sign, sizes_fit
from pagetwin.optimized.runtime.repeat import signatures
from pagetwin.optimized.runtime.repeat import writes as repeated_write
from pagetwin.optimized.runtime.repeat.signatures import make_comparison, sign_numbers
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

OTHER_DEVICE = "cpu" if torch.cuda.device_count() == 1 else "cuda:1"
"""Fake tensors may be on any GPU if there is none."""

Key = Callable[[dict[str, Any]], Any]


@pytest.fixture(autouse=True)
def not_interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Calls on pretended GPUs are signed as on real ones."""
    for module in (attention_call, signatures, repeated_write):
        monkeypatch.setattr(module, "INTERPRETED", False)
    with FakeTensorMode():
        yield


def make(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda:0")


def integers(*shape: int) -> Tensor:
    return make(*shape, dtype=torch.int32)


OPTIONS: dict[str, Any] = {
    "causal": False,
    "sliding_window": 3,
    "attention_chunk_size": 5,
    "logits_soft_cap": 7.0,
    "alibi_slopes": (4,),
    "position_bias": (4, 9),
    "sinks": (4,),
    "k_scale": (2,),
    "v_scale": (2,),
    "k_global_scale": 0.5,
    "v_global_scale": 2.0,
    "out_scale": 0.5,
    "batch_invariant": True,
}
"""Options of a call that is repeated; shapes stand for tensors."""


def make_options() -> AttentionOptions:
    """Return options of which each is given."""
    return AttentionOptions(
        **{
            name: make(*option, dtype=torch.float32)
            if isinstance(option, tuple)
            else option
            for name, option in OPTIONS.items()
        }
    )


def make_call(is_paged: bool) -> AttentionCall:
    """Return a call of which each tensor is there."""
    storage = (9, 16) if is_paged else (30,)
    return AttentionCall(
        query=make(5, 4, 64),
        key=make(*storage, 2, 64),
        value=make(*storage, 2, 64),
        block_table=integers(2, 3) if is_paged else None,
        query_start_loc=integers(3),
        lengths=integers(2 if is_paged else 3),
        max_query_len=3,
        max_key_len=30,
        scale=0.125,
        out=make(5, 4, 64),
        lse=make(4, 5, dtype=torch.float32),
        options=make_options(),
    )


def variants(tensor: Tensor) -> dict[str, Tensor]:
    """Return tensors that differ from one in one property each."""
    shape, strides, place = tensor.shape, tensor.stride(), tensor.device

    def like(**changes: Any) -> Tensor:
        given = {"size": shape, "stride": strides, "dtype": tensor.dtype}
        return torch.empty_strided(**({"device": place} | given | changes))

    found = {
        "dtype": like(dtype=torch.bfloat16),
        "device": like(device=OTHER_DEVICE),
        "axes": like(size=(*shape, 1), stride=(*strides, 1)),
    }
    for axis in range(tensor.dim()):
        for what, old in (("size", shape), ("stride", strides)):
            other = [number + 8 * (at == axis) for at, number in enumerate(old)]
            found[f"{what} of axis {axis}"] = like(**{what: other})
    return found


def find_alike(given: dict[str, Any], key: Key, *same: str) -> set[str]:
    """Return which changes of tensors leave a key as it is: of one property of one tensor each."""
    right, found = key(given), set()
    assert right == key(given) and right is not None
    for name, tensor in given.items():
        if isinstance(tensor, Tensor):
            others: dict[str, Any] = {"absence": None} if name in same else {}
            others |= variants(tensor)
            for what, other in others.items():
                if key(given | {name: other}) == right:
                    found.add(f"{what} of {name}")
    return found


READ_AT_EACH_CALL = {
    "size of axis 0 of query",
    "size of axis 0 of query_start_loc",
    "size of axis 0 of lengths",
    *(f"size of axis {axis} of out" for axis in range(3)),
    *(f"size of axis {axis} of lse" for axis in range(2)),
    # the kernels take them as numbers
    *(f"stride of axis {axis} of lse" for axis in range(2)),
    "axes of lse",
}
"""What calls of one launch plan may differ in. Sizes are checked by `sizes_fit`."""
OF_TABLES = {
    "size of axis 0 of block_table",
    "size of axis 1 of block_table",
    "stride of axis 0 of block_table",
}
OF_RAGGED_KEYS = {"size of axis 0 of key", "size of axis 0 of value"}


@pytest.mark.parametrize("is_paged", [True, False])
def test_a_plan_belongs_to_every_property_of_every_tensor_that_is_not_read_at_each_call(
    is_paged: bool,
) -> None:
    call = make_call(is_paged)
    key: Key = lambda given: sign(AttentionCall(**given))  # noqa: E731
    given = call._asdict()
    alike = find_alike(given, key, "out", "lse")
    assert alike == READ_AT_EACH_CALL | (OF_TABLES if is_paged else OF_RAGGED_KEYS)
    if not is_paged:
        # an empty tensor has no tensor map
        assert sign(call._replace(key=make(0, 2, 64), value=make(0, 2, 64))) != key(
            given
        )
    assert sizes_fit(call)
    for equal_change in alike:
        if equal_change.startswith("size"):
            what, name = equal_change.rsplit(" of ", 1)
            other = variants(given[name])[what]
            is_free = equal_change == "size of axis 1 of block_table"
            assert sizes_fit(call._replace(**{name: other})) == is_free, equal_change


def test_a_plan_belongs_to_every_option_and_every_property_of_one() -> None:
    call = make_call(True)

    def key(options: dict[str, Any]) -> Any:
        return sign(call._replace(options=AttentionOptions(**options)))

    check_options(key)


def check_options(key: Key) -> None:
    """Assert that a key tells all options apart, and all properties of those that are tensors."""
    options = make_options()
    given = {name: getattr(options, name) for name in OPTIONS}
    defaults = {field.name: field.default for field in fields(AttentionOptions)}
    assert {*defaults} == {*OPTIONS, *OPTIONS_PER_BATCH}
    assert find_alike(given, key, *OPTIONS) == set()
    for name, option in given.items():
        if not isinstance(option, Tensor):
            others = {
                defaults[name],
                (not option) if option in (True, False) else 2 * option,
            }
            for other in others:
                assert key(given | {name: other}) != key(given), (name, other)
    for name in ("k_scale", "v_scale"):
        found = {str(key(given | {name: scale})) for scale in (None, 1.0, 2.0)}
        assert len({*found, str(key(given))}) == 4


@pytest.mark.parametrize("is_paged", [True, False])
def test_a_repeated_call_belongs_to_every_property_of_every_tensor(
    is_paged: bool,
) -> None:
    call = make_call(is_paged)
    names = [
        name
        for name, argument in call._asdict().items()
        if isinstance(argument, Tensor)
    ]
    fits = make_comparison([getattr(call, name) for name in names])

    def key(given: dict[str, Any]) -> Any:
        tensors = [given[name] for name in names]
        is_alike = all(tensor is not None for tensor in tensors) and fits(*tensors)
        return sign_numbers(AttentionCall(**given)), is_alike

    assert key(call._asdict())[1]
    assert find_alike(call._asdict(), key, "out", "lse") == set()


def test_a_repeated_call_belongs_to_every_number_and_option() -> None:
    call = make_call(True)
    # 30 and 40 keys are rounded to the same bound
    numbers: dict[str, Any] = {"max_query_len": 4, "max_key_len": 2, "scale": 0.5}
    assert {*numbers} == {
        name for name in call._fields if isinstance(getattr(call, name), (int, float))
    }
    right = sign_numbers(call)
    for name, other in (*numbers.items(), ("scale", None)):
        assert sign_numbers(call._replace(**{name: other})) != right, name
    assert sign_numbers(call, (16,)) != right

    def key(options: dict[str, Any]) -> Any:
        return sign_numbers(call._replace(options=AttentionOptions(**options)))

    check_options(key)


WRITES = {
    "keys and values": ("key", "value", "key_cache", "value_cache"),
    "latents": ("key", "value", "key_cache"),
}


@pytest.mark.parametrize("kind", WRITES)
def test_a_repeated_write_belongs_to_all_but_the_number_of_tokens(kind: str) -> None:
    names = WRITES[kind]
    caches = names[2:]
    given = {name: make(5, 2, 8) for name in names[:2]}
    given |= {name: make(9, 16, 2, 8) for name in caches}
    given["slot_mapping"] = make(5, dtype=torch.int64)
    given |= {f"scale of {name}": make(2, dtype=torch.float32) for name in caches}

    def key(given: dict[str, Any]) -> Any:
        return repeated_write.sign_write(
            [given[name] for name in names[:2]],
            [given[name] for name in caches],
            given["slot_mapping"],
            [given[f"scale of {name}"] for name in caches],
        )

    optional = [name for name in given if name.startswith("scale")]
    tokens = ("key", "value", "slot_mapping")
    alike = {f"size of axis 0 of {name}" for name in tokens}
    assert find_alike(given, key, *optional) == alike
    for name in optional:
        seen = {str(key(given | {name: scale})) for scale in (None, 1.0, 2.0, 3)}
        assert len({*seen, str(key(given))}) == 5
    for name, tensor in given.items():
        if tensor.is_floating_point():
            graded = tensor.clone().requires_grad_()
            found = key(given | {name: graded})
            assert found is None or found != key(given), name
            with torch.no_grad():
                assert key(given | {name: graded}) == key(given), name


def test_a_plan_does_not_belong_to_an_option_that_requires_a_gradient() -> None:
    slopes = torch.ones(4)
    right = attention_call.sign_options(AttentionOptions(alibi_slopes=slopes))
    slopes.requires_grad_()
    graded = AttentionOptions(alibi_slopes=slopes)
    assert attention_call.sign_options(graded) != right
    with torch.no_grad():
        assert attention_call.sign_options(graded) == right
