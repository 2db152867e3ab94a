"""Paged attention to be run: numpy on the host, Triton and xFormers on the device.

The same files, names and signatures as `pagetwin.reference`. The kernels need a CUDA device;
without one they run in Triton's interpreter, which is slow and exact, so that the real twin is
tested anywhere.
"""

import os
import sys

import torch

# The interpreter has to be chosen before triton is imported; afterwards it is too late, and the
# first launch on a CPU tensor says so (_launch.py).
if not torch.cuda.is_available() and "triton" not in sys.modules:
    os.environ.setdefault("TRITON_INTERPRET", "1")
