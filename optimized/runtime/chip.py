"""Properties of the chip that a launch plan depends on."""

from functools import cache
from typing import NamedTuple

import torch

from .launcher import INTERPRETED


@cache
def count_processors(device: torch.device) -> int:
    """Return the number of SMs of a chip."""
    if INTERPRETED:
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def has_dependent_launches(device: torch.device) -> bool:
    """Return whether a chip has programmatic dependent launches: compute capability 9.0 on."""
    if INTERPRETED or device.type != "cuda":
        return False
    return torch.cuda.get_device_properties(device).major >= 9


def find_shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that one program may have."""
    properties = torch.cuda.get_device_properties(device)
    # torch has this property, its type stubs do not
    found: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return found


class Chip(NamedTuple):
    """What distinguishes chips, and parts of a chip, for which other tables are best.

    Args:
        name: as the driver reports it.
        capability: compute capability, such as "9.0".
        multiprocessors: SMs that are visible.
        shared_memory: bytes that one program may have.
    """

    name: str
    capability: str
    multiprocessors: int
    shared_memory: int


def describe_chip(device: torch.device) -> Chip:
    """Return the chip of a device."""
    if INTERPRETED:
        return Chip("Triton's interpreter", "none", count_processors(device), 0)
    properties = torch.cuda.get_device_properties(device)
    return Chip(
        properties.name,
        f"{properties.major}.{properties.minor}",
        properties.multi_processor_count,
        find_shared_memory(device),
    )


@cache
def why_no_device(device: torch.device | str) -> list[str]:
    """Return why kernels cannot run on that device."""
    device = torch.device(device)
    if INTERPRETED:
        return []
    if device.type != "cuda":
        return [
            f"device = {device}: expected cuda, or Triton's interpreter"
            " (TRITON_INTERPRET=1 before triton is imported)"
        ]
    if torch.cuda.get_device_capability(device) < (8, 0):
        return [f"device = {device}: expected compute capability 8.0 or newer"]
    return []
