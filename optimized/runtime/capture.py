"""The number of the CUDA graph capture that a stream is in.

Torch does not expose it (torch 2.10 and 2.11), so the driver is called, during captures only.
"""

import ctypes
from functools import cache
from typing import Any


def find_capture_id(stream: int) -> int | None:
    """Return the id of a stream's capture, unique in the process.

    Args:
        stream: raw handle.

    Returns:
        the id. None if the stream is not captured, or the driver does not return it.
    """
    driver = _driver()
    if driver is None:
        return None
    status, capture_id = ctypes.c_int(), ctypes.c_ulonglong()
    failed = driver.cuStreamGetCaptureInfo_v2(
        ctypes.c_void_p(stream),
        ctypes.byref(status),
        ctypes.byref(capture_id),
        None,
        None,
        None,
    )
    return None if failed or not status.value else capture_id.value


@cache
def _driver() -> Any:
    """Return the driver's library; None if it cannot be loaded or lacks the function."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return driver if hasattr(driver, "cuStreamGetCaptureInfo_v2") else None
