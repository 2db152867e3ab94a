"""Fatal errors: those after which a process cannot judge any other call.

After an illegal access, a trap or a failed assertion of a kernel, every later CUDA call of the
process raises the same error. After a failed allocation, memory may still be occupied.
"""

import torch

from ..base.results import Status


class Fatal(BaseException):
    """A fatal error of a case. No handler of ordinary errors catches it.

    Args:
        status: OUT_OF_MEMORY or CRASHED.
        case: The case, as Python.
        message: The error in one line.
    """

    def __init__(self, status: Status, case: str, message: str) -> None:
        super().__init__(message)
        self.status, self.case, self.message = status, case, message


def fatal_status(error: BaseException, device: torch.device | None) -> Status | None:
    """Return the status of a case that raised a fatal error, or None if the process can go on.

    Args:
        error: The error.
        device: The device of the tensors. If it is CUDA, its context is tried.
    """
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return Status.OUT_OF_MEMORY
    return Status.CRASHED if is_context_lost(device) else None


def is_context_lost(device: torch.device | None) -> bool:
    """Return whether every further call on a CUDA device raises an error."""
    if device is None or device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize()
        torch.ones(1, device=device).item()
    except Exception:
        return True
    return False


def message_of(error: BaseException) -> str:
    """Return an error as one line: its type and the first line of its message."""
    return f"{type(error).__name__}: {error}".split("\n")[0][:500]
