"""A stored step, run again on the same twins and compared by the same laws.

The cache is rebuilt as it was before the step: the blocks of the batch have their stored content,
and all others hold NaN.
"""

from collections.abc import Mapping
from pathlib import Path

import torch

from ...contract.operations import Implementation
from ...contract.specs import KVCacheSpec
from .memory import GIB, bytes_available
from .mismatch import StoredStep, TwinMismatch, load_step
from .model import LayerInputs
from .named_twins import load_reference, make_twin
from .step import run_step
from .twins import ImplementationTwin


def reproduce(
    path: Path, implementations: Mapping[str, Implementation] | None = None
) -> TwinMismatch | None:
    """Run the step in a file again; see `run_again`.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is damaged, or as in `run_again`.
    """
    stored, _ = load_step(path)
    return run_again(stored, path, implementations)


def run_again(
    stored: StoredStep,
    path: Path | None = None,
    implementations: Mapping[str, Implementation] | None = None,
) -> TwinMismatch | None:
    """Run a stored step again on its twins.

    Args:
        stored: the step.
        path: Optional. The file it was loaded from, for the message.
        implementations: implementations that are loaded already, by name.

    Returns:
        The mismatch; None if the twins agree now.

    Raises:
        ValueError: a twin cannot be loaded, or the step ran on a GPU and none is available.
        MemoryError: the caches need more memory than is available.
        NotImplementedError: a twin does not support such a step.
    """
    device, inputs = stored.device, stored.inputs
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"step {stored.step} was stored by a replay on cuda and torch sees no GPU here:"
            " expected to run it where it was stored"
        )
    _check_memory(stored)
    block_size, kv_heads, head_size = stored.blocks.shape[2:]
    spec = KVCacheSpec(block_size, kv_heads, head_size, stored.blocks.dtype)
    twins = [
        make_twin(
            name,
            spec,
            inputs.query.shape[1],
            device,
            len(inputs.query),
            implementations,
        )
        for name in stored.twins
    ]
    on_device = LayerInputs(
        query=inputs.query.to(device),
        key=inputs.key.to(device),
        value=inputs.value.to(device),
    )
    result = run_step(
        ImplementationTwin("reference", load_reference(implementations), device),
        twins,
        stored.batch,
        [on_device],
        [stored.cache(device)],
        [[stored.cache(device)] for _ in twins],
        check_whole_cache=True,
    )
    if result.violation is None:
        return None
    return TwinMismatch(result.violation, stored, path)


def _check_memory(stored: StoredStep) -> None:
    """Raise if the caches of the step need more memory than is available."""
    of_a_block = stored.blocks[:, :1].nbytes
    needed = of_a_block * stored.num_blocks * (len(stored.twins) + 1)
    available = bytes_available(stored.device)
    if available is not None and needed > available:
        raise MemoryError(
            f"num_blocks = {stored.num_blocks} of the stored step needs {needed / GIB:,.1f} GiB,"
            f" expected at most the {available / GIB:,.1f} GiB that are available"
        )
