"""The CUDA graph that a stream captures, and when it has been destroyed.

Torch does not say which graph a stream captures (torch 2.10 and 2.11), so the driver is called. A
graph can hold "user objects". The driver calls an object's destructor when the graph, and every
executable graph made from it, has been destroyed and has finished. The destructor must not call
CUDA, and must not call Python from the driver's thread. So it is `sem_post` of the C library, which
increments a semaphore that is read here later.
"""

import ctypes
from functools import cache
from typing import Any

SEMAPHORE_BYTES = 64
"""At least the size of `sem_t`, which is 32 bytes on Linux."""
NO_DESTRUCTOR_SYNC = 1
MOVE = 1
"""Flags of the driver: the destructor runs at any time; the graph becomes the only owner."""

_spare: list[int] = []
"""Addresses of semaphores for further graphs. They are never freed: the driver may write late."""
_alive: list[tuple[int, Any]] = []
"""Address of the semaphore of each captured graph, and what the caller wants back."""


class Capture:
    """The capture that a stream is in.

    Args:
        id: unique in the process.
        graph: handle of the graph that is being captured.
    """

    def __init__(self, id: int, graph: int) -> None:
        self.id = id
        self._graph = graph

    def when_destroyed(self, token: Any) -> None:
        """Have `destroyed` return a token when the graph has been destroyed."""
        driver, libc = _libraries()
        semaphore = _new_semaphore(libc)
        handle = ctypes.c_void_p()
        failed = driver.cuUserObjectCreate(
            ctypes.byref(handle),
            ctypes.c_void_p(semaphore),
            ctypes.cast(libc.sem_post, ctypes.c_void_p),
            ctypes.c_uint(1),
            ctypes.c_uint(NO_DESTRUCTOR_SYNC),
        ) or driver.cuGraphRetainUserObject(
            ctypes.c_void_p(self._graph), handle, ctypes.c_uint(1), ctypes.c_uint(MOVE)
        )
        # without a user object the token is never returned, which is safe
        if not failed:
            _alive.append((semaphore, token))


def find_capture(stream: int) -> Capture | None:
    """Return the capture that a stream is in; None if the driver does not tell.

    Args:
        stream: raw handle.
    """
    driver, _ = _libraries()
    if driver is None:
        return None
    status = ctypes.c_int()
    id = ctypes.c_ulonglong()
    graph = ctypes.c_void_p()
    failed = driver.cuStreamGetCaptureInfo_v2(
        ctypes.c_void_p(stream),
        ctypes.byref(status),
        ctypes.byref(id),
        ctypes.byref(graph),
        None,
        None,
    )
    if failed or not status.value or not graph.value:
        return None
    return Capture(id.value, graph.value)


def destroyed() -> list[Any]:
    """Return the tokens of the graphs that were destroyed since the last call."""
    found = []
    if _alive:
        _, libc = _libraries()
        for entry in list(_alive):
            semaphore, token = entry
            if _value(libc, semaphore):
                _alive.remove(entry)
                _spare.append(semaphore)
                found.append(token)
    return found


@cache
def _libraries() -> tuple[Any, Any]:
    """Return the driver and the C library; None and None if the driver lacks what is needed."""
    needed = ("cuStreamGetCaptureInfo_v2", "cuUserObjectCreate")
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        libc = ctypes.CDLL(None)
    except OSError:
        return None, None
    if not all(hasattr(driver, name) for name in needed):
        return None, None
    libc.calloc.restype = ctypes.c_void_p
    return driver, libc


def _new_semaphore(libc: Any) -> int:
    """Return the address of a semaphore with the value 0, in memory that Python never frees."""
    if _spare:
        address = _spare.pop()
    else:
        address = libc.calloc(ctypes.c_size_t(1), ctypes.c_size_t(SEMAPHORE_BYTES))
    libc.sem_init(ctypes.c_void_p(address), 0, ctypes.c_uint(0))
    return address


def _value(libc: Any, semaphore: int) -> int:
    """Return the value of a semaphore."""
    value = ctypes.c_int()
    libc.sem_getvalue(ctypes.c_void_p(semaphore), ctypes.byref(value))
    return value.value
