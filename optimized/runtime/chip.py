"""Properties of the chip that a launch plan depends on."""

from functools import cache

import torch

from .launcher import INTERPRETED


@cache
def count_processors(device: torch.device) -> int:
    """Return the number of SMs of a chip."""
    if INTERPRETED:
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


def find_shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that one program may have."""
    properties = torch.cuda.get_device_properties(device)
    # torch has this property, its type stubs do not
    found: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return found


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
