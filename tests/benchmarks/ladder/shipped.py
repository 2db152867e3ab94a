"""How far is the kernel that ships from the last rung?

It is `paged_attention` of pagetwin.optimized, called as a user calls it: the same idea, with
every option, layout, dtype and head size beside it. What a call does not use is compiled away. A
package may hold kernels for one chip only, in modules named after it (`_prefill_sm90`);
`portable` leaves them out, to show what other chips get.
"""

import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

import pagetwin.optimized.kernels
from pagetwin.contract.operations import load_implementation
from torch import Tensor

from .batches import Batch


def kernels_of_one_chip() -> list[ModuleType]:
    """Return the modules with kernels for one chip only; each says by `takes` what it takes."""
    return [
        import_module(found.name)
        for found in pkgutil.walk_packages(
            pagetwin.optimized.kernels.__path__, "pagetwin.optimized.kernels."
        )
        if ".sm" in found.name and not found.ispkg
    ]


@contextmanager
def left_out(modules: list[ModuleType]) -> Iterator[None]:
    """Let these modules take nothing, whoever asks them."""
    takes = [each.takes for each in modules if hasattr(each, "takes")]
    attend = import_module("pagetwin.optimized.launch.dispatch")
    replaced = [
        (module, name, value)
        for module in (*modules, attend)
        for name, value in list(vars(module).items())
        if any(value is each for each in takes)
    ]
    for module, name, _ in replaced:
        setattr(module, name, lambda *_, **__: False)
    try:
        yield
    finally:
        for module, name, value in replaced:
            setattr(module, name, value)


def prepare(batch: Batch, out: Tensor, portable: bool = False) -> Callable[[], Any]:
    """Return what calls the operation."""
    attend: Any = load_implementation("optimized").paged_attention
    call = partial(
        attend,
        batch.query,
        batch.key_cache,
        batch.value_cache,
        batch.block_table,
        batch.query_start_loc,
        batch.seq_lens,
        max(batch.query_lens),
        max(batch.kv_lens),
        out=out,
    )

    def call_portable() -> Any:
        with left_out(kernels_of_one_chip()):
            return call()

    return call_portable if portable else call
