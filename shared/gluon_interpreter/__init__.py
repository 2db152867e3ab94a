"""Interpreter of Gluon kernels on the CPU, role by role, which reports faults that a GPU hides.

Triton's interpreter does not run Gluon. This one runs the Python functions of the kernels as they
are, with other operations under the same names:

| module | what it has |
|---|---|
| values.py, arithmetic.py | numbers, tiles, pointers; accesses outside a tensor are errors |
| shared_memory.py | buffers and views with the order of bytes that the hardware has |
| accesses.py | races: accesses of two roles that no barrier orders |
| programs.py | races of two programs in global memory, which atomic counters order |
| machine.py, barriers.py | roles that run in turns, copies in flight, mbarriers, named barriers |
| operations.py, asynchronous.py, products.py | the operations; products that are in flight |
| assembly.py, packed.py | inline assembly; instructions on packed FP8 numbers are run one by one |
| language.py | the modules that kernels import, with these operations |
| arguments.py, kernels.py | launches: arguments, and functions whose globals are replaced |
| places.py | lines of kernels, for reports |
| launches.py | launches in several orders, and the faults found |

Functions in Triton that these kernels call are run in the same way.

What it reports as an error: deadlocks; races of roles in shared memory; a product or copy whose
shared memory changes before it was waited for; shared memory that is stored without a fence before
the asynchronous proxy reads it; shared memory that is read before it was written; accesses outside
a tensor; stores of two programs to one element, and loads of what another program has stored
without a release and an acquire; addresses and integers that are not the multiples that the kernel
promises; overflow of 32-bit integers; accumulators that are used too early; barriers, products and
stores that are left open at the end.
What it cannot show: registers, layouts, races between the threads of one role, and speed.
"""

from .kernels import interpret_gluon
from .launches import KernelFault, KernelOutcome, Launch, interpret_launches
from .places import Place
from .values import InterpreterError

__all__ = [
    "InterpreterError",
    "KernelFault",
    "KernelOutcome",
    "Launch",
    "Place",
    "interpret_gluon",
    "interpret_launches",
]
