"""Tests of the context that products of matrices run in, whatever torch's global modes are."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pagetwin.contract.default_modes import default_modes

PRODUCTS: Any = torch.backends.cuda.matmul
ON_HOST: Any = torch.backends.mkldnn.matmul


def settings() -> dict[str, Any]:
    """Return torch's settings of products of matrices."""
    return {
        "float32": (PRODUCTS.fp32_precision, ON_HOST.fp32_precision),
        "float16": PRODUCTS.allow_fp16_reduced_precision_reduction,
        "float16 split-K": PRODUCTS.allow_fp16_reduced_precision_reduction_split_k,
        "bfloat16": PRODUCTS.allow_bf16_reduced_precision_reduction,
        "accumulation": PRODUCTS.allow_fp16_accumulation,
    }


def set_defaults() -> None:
    PRODUCTS.fp32_precision = ON_HOST.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    PRODUCTS.allow_fp16_reduced_precision_reduction = True
    PRODUCTS.allow_bf16_reduced_precision_reduction = True
    PRODUCTS.allow_fp16_accumulation = False


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    set_defaults()
    yield
    set_defaults()


def set_all() -> None:
    torch.set_float32_matmul_precision("medium")


def set_one_backend() -> None:
    PRODUCTS.fp32_precision = "tf32"


def set_half() -> None:
    PRODUCTS.allow_fp16_reduced_precision_reduction = (False, False)
    PRODUCTS.allow_bf16_reduced_precision_reduction = False
    PRODUCTS.allow_fp16_accumulation = True


@pytest.mark.parametrize("change", [set_all, set_one_backend, set_half])
def test_settings_are_the_defaults_within_and_the_callers_after(change: Any) -> None:
    default = settings()
    change()
    before = settings()
    assert before != default
    with default_modes(), default_modes():
        assert settings() == default
    assert settings() == before


def test_one_precision_for_all_backends_is_one_again() -> None:
    torch.set_float32_matmul_precision("high")
    with default_modes():
        assert torch.get_float32_matmul_precision() == "highest"
    assert torch.get_float32_matmul_precision() == "high"


def test_autocast_is_off_within_and_as_before_after() -> None:
    numbers = torch.ones(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        with default_modes():
            assert (numbers @ numbers).dtype == torch.float32
        assert (numbers @ numbers).dtype == torch.bfloat16


def test_an_error_within_restores_the_settings() -> None:
    set_all()
    before = settings()
    with pytest.raises(KeyError), default_modes():
        raise KeyError
    assert settings() == before


def test_settings_stay_the_defaults_until_the_last_thread_leaves() -> None:
    set_all()
    before, found = settings(), []
    entered, left = threading.Event(), threading.Event()

    def stay() -> None:
        with default_modes():
            entered.set()
            left.wait(10)
            found.append(settings())

    thread = threading.Thread(target=stay)
    with default_modes():
        thread.start()
        entered.wait(10)
        within = settings()
    left.set()
    thread.join()
    assert found == [within]
    assert settings() == before
