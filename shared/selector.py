"""Which backend runs?

The one that was asked for. A request that cannot be met raises an error that says why, and which
backends could take its place; nothing is chosen behind the caller's back.
"""

import importlib

import torch

from .backend_interface import AttentionBackend
from .specs import KVCacheSpec

TWIN_OF_BACKEND = {
    "REFERENCE": "reference",
    "TRITON": "optimized",
    "XFORMERS": "optimized",
}


def load_backend(name: str) -> type[AttentionBackend]:
    """Return the backend of that name, whether or not it can run here.

    Raises:
        ValueError: there is none; the message lists what there is.
    """
    if name not in TWIN_OF_BACKEND:
        raise ValueError(
            f"backend = {name!r}: expected one of {', '.join(TWIN_OF_BACKEND)}"
        )
    module = importlib.import_module(f"pagetwin.{TWIN_OF_BACKEND[name]}.backend")
    backends: dict[str, type[AttentionBackend]] = {
        each.name: each for each in module.BACKENDS
    }
    return backends[name]


def get_attn_backend(
    name: str, spec: KVCacheSpec, device: torch.device | str
) -> type[AttentionBackend]:
    """Return the backend that was asked for, if it can run such a cache there.

    Args:
        name: "REFERENCE", "TRITON" or "XFORMERS".
        spec: block size, heads, head size and dtype of the cache.
        device: where the cache lies.

    Raises:
        ValueError: no such backend, or it cannot run; the message says why and what can.

    Source:
        vLLM's function of that name, which chooses by itself and remembers its choice.

    Example:
        get_attn_backend("XFORMERS", KVCacheSpec(24, 8, 64, torch.float16), "cuda") raises:
        24 is not a multiple of 16; TRITON and REFERENCE can.
    """
    backend = load_backend(name)
    reasons = backend.validate_configuration(spec, device)
    if not reasons:
        return backend
    able = []
    for other in TWIN_OF_BACKEND:
        try:
            if not load_backend(other).validate_configuration(spec, device):
                able.append(other)
        except ImportError:
            continue
    raise ValueError(
        f"backend {name} cannot run here: {'; '.join(reasons)}."
        f" What can: {', '.join(able) or 'none'}"
    )
