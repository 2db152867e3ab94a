"""Paged attention to be run: numpy on the host, Triton and xFormers on the device.

The same files, names and signatures as `pagetwin.reference`. The kernels need a CUDA device;
without one they run in Triton's interpreter, which is slow and exact, so that the real twin is
tested anywhere.
"""

import importlib.util
import os
import sys

import torch

if importlib.util.find_spec("triton") is None:
    raise ImportError(
        "pagetwin.optimized needs triton 3.6 to 3.7, which is made for Linux on x86-64;"
        " pagetwin.reference has the same functions and runs anywhere"
    )

# The interpreter has to be chosen before triton is imported; afterwards it is too late, and the
# first launch on a CPU tensor says so (_launch.py).
if not torch.cuda.is_available() and "triton" not in sys.modules:
    os.environ.setdefault("TRITON_INTERPRET", "1")
