"""Global modes: each one is set inside, and everything is as before afterwards."""

import threading
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
from pagetwin.conformance.candidates.calls.circumstances import MODES, entered

CPU = torch.device("cpu")


def precise() -> float:
    """Return the error of a product of float32 matrices."""
    factors = torch.full((8, 8), 1 + 2.0**-12)
    return float(((factors @ factors).double() - 8 * (1 + 2.0**-12) ** 2).abs().max())


def products() -> tuple[bool, ...]:
    matmul: Any = torch.backends.cuda.matmul
    return (
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
    )


def overflows() -> bool:
    """Return whether numpy raises at an overflow."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            np.float32(1e38) * np.float32(1e38)
        except FloatingPointError:
            return True
    return False


def warns() -> bool:
    """Return whether a warning is an error."""
    try:
        warnings.warn("some", UserWarning, stacklevel=1)
    except UserWarning:
        return True
    return False


READ: dict[str, Callable[[], Any]] = {
    "torch.device('meta') as the default": lambda: torch.empty(1).device.type,
    "torch.set_default_dtype(torch.float16)": torch.get_default_dtype,
    "torch.autocast in bfloat16": lambda: torch.is_autocast_enabled("cpu"),
    "torch.set_float32_matmul_precision('medium')": torch.get_float32_matmul_precision,
    "other settings of 16-bit products": products,
    "torch.use_deterministic_algorithms(True)": torch.are_deterministic_algorithms_enabled,
    "torch.no_grad()": torch.is_grad_enabled,
    "torch.set_num_threads": torch.get_num_threads,
    "torch.manual_seed": torch.initial_seed,
    "numpy.errstate(all='raise')": overflows,
    "warnings as errors": warns,
}
"""What each mode changes; another stream needs a GPU."""


@pytest.fixture(autouse=True)
def quiet() -> Any:
    """Keep warnings of this file's own calls from being errors or printed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("name", READ)
def test_a_mode_is_set_inside_and_everything_is_as_before_after_it(name: str) -> None:
    read = READ[name]
    before = read()
    with entered([name], CPU):
        inside = read()
    assert inside != before
    assert read() == before
    with pytest.raises(KeyError), entered([name], CPU):
        raise KeyError
    assert read() == before


def test_every_mode_is_read_by_these_tests() -> None:
    assert MODES.keys() == READ.keys() | {"another stream"}


def test_several_modes_are_set_together() -> None:
    with entered(list(READ)[1:4], CPU):
        assert torch.get_default_dtype() == torch.float16
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_float32_matmul_precision() == "medium"


def test_products_of_float32_are_rounded_where_the_precision_allows_it() -> None:
    exact = precise()
    with entered(["torch.set_float32_matmul_precision('medium')"], CPU):
        assert precise() > exact + 1e-4
        factors = torch.ones(2, 2, dtype=torch.float64) * (1 + 2.0**-30)
        assert float((factors @ factors)[0, 0]) == 2 * (1 + 2.0**-30) ** 2
        torch.set_float32_matmul_precision("highest")
        assert precise() == exact
    assert precise() == exact


def test_random_numbers_go_on_as_if_a_seed_had_not_been_set() -> None:
    state = torch.get_rng_state()
    with entered(["torch.manual_seed"], CPU):
        torch.rand(3)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_mode_is_entered_on_the_thread_that_calls() -> None:
    seen: list[bool] = []
    with entered(["torch.no_grad()"], CPU):
        thread = threading.Thread(target=lambda: seen.append(torch.is_grad_enabled()))
        thread.start()
        thread.join()
    assert seen == [True]


OF_A_THREAD = ("torch.device('meta') as the default", "torch.no_grad()")
OF_A_THREAD += ("torch.autocast in bfloat16", "numpy.errstate(all='raise')")


@pytest.mark.parametrize("name", [mode for mode in READ if mode not in OF_A_THREAD])
def test_a_mode_that_several_threads_are_in_lasts_until_the_last_one_leaves(
    name: str,
) -> None:
    """Ranks are threads: the first to leave ended it for the others, the last left it set."""
    read = READ[name]
    before = read()
    first, second = (ExitStack() for _ in range(2))
    first.enter_context(entered([name], CPU))
    inside = read()
    second.enter_context(entered([name], CPU))
    first.close()
    assert read() == inside != before
    second.close()
    assert read() == before


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="about kernels in Triton's interpreter"
)
def test_the_interpreter_is_quiet_until_the_last_of_overlapping_modes_has_ended() -> (
    None
):
    from triton.runtime.interpreter import GridExecutor

    usual = GridExecutor.__call__
    first, second = (ExitStack() for _ in range(2))
    first.enter_context(entered(["warnings as errors"], CPU))
    # numpy restores what it has found, so only one of the two may be a mode of numpy
    second.enter_context(entered(["numpy.errstate(all='raise')"], CPU))
    first.close()
    assert GridExecutor.__call__ is not usual
    second.close()
    assert GridExecutor.__call__ is usual
