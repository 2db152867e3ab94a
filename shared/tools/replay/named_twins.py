"""The twins of a replay by name: implementations, also on several ranks, and backends."""

import re
from collections.abc import Mapping

import torch

from ...contract.operations import Implementation, load_implementation
from ...contract.specs import KVCacheSpec
from ...engine.selector import TWINS, backend_names, get_attn_backend
from .ranks import RanksTwin
from .twins import BackendTwin, ImplementationTwin, ReplayTwin

ON_RANKS = re.compile(r"(.+) on (\d+) ranks?(?: with (\d+) splits)?")
"""Names of implementations that run their parallel step."""


def make_twin(
    name: str,
    spec: KVCacheSpec,
    query_heads: int,
    device: torch.device | str,
    max_num_tokens: int,
    implementations: Mapping[str, Implementation] | None = None,
) -> ReplayTwin:
    """Return the twin of that name.

    Args:
        name: "reference", "optimized", a backend's name in lower case ("triton", "xformers"), or
            a dotted package name. A name of `name_on_ranks` runs on several processes.
        spec: one layer's cache.
        query_heads: query heads of the model.
        device: device of the cache.
        max_num_tokens: new tokens of the largest step.
        implementations: implementations that are loaded already, by name.

    Raises:
        ValueError: the name is unknown, the backend does not support such a cache, or it does not
            run on several ranks.
    """
    if on_ranks := ON_RANKS.fullmatch(name):
        name, ranks, splits = on_ranks.groups()
        if name not in TWINS and name.upper() in backend_names():
            raise ValueError(
                f"twin = {name!r} does not run on several ranks: expected reference, optimized or"
                " a package with the same operations"
            )
        run = _load(name, implementations)
        if "DecodeContextParallel" not in run.operations:
            raise ValueError(
                f"twin = {name!r} has no DecodeContextParallel: expected a package that has it,"
                " or a replay without --ranks"
            )
        return RanksTwin(
            on_ranks[0], run, int(ranks), int(splits or 0), query_heads,
            spec.head_size, spec.dtype, max_num_tokens, device,
        )  # fmt: skip
    if name not in TWINS and name.upper() in backend_names():
        backend = get_attn_backend(name.upper(), spec, device)
        # pagetwin.<twin>.backends.backend
        carrier = _load(backend.__module__.split(".")[1], implementations)
        return BackendTwin(name, carrier, backend, spec, query_heads, device)
    return ImplementationTwin(name, _load(name, implementations), device)


def load_reference(
    implementations: Mapping[str, Implementation] | None = None,
) -> Implementation:
    """Return the implementation that defines the result."""
    return _load("reference", implementations)


def _load(
    name: str, implementations: Mapping[str, Implementation] | None
) -> Implementation:
    if implementations and name in implementations:
        return implementations[name]
    try:
        return load_implementation(name)
    except ModuleNotFoundError as error:
        names = [name.lower() for name in backend_names()]
        raise ValueError(
            f"twin = {name!r} cannot be loaded ({error}): expected optimized,"
            f" {', '.join(names)}, or a package with the same operations"
        ) from error
