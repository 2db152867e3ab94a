"""Compiled models: what reads the contents of tensors runs between the compiled parts.

`torch.compile` traces a forward without the contents of its tensors. The library does so itself
in `generate`, for a static cache on a GPU. The twins need numbers: which tokens are padding, and
how many there are. So the functions that the library calls inside of a model's forward are called
as they are, with tensors that hold data.
"""

from functools import partial

import torch

outside_of_compiler = partial(
    torch.compiler.disable,
    reason="pagetwin reads masks and lengths, so compile without fullgraph=True",
)
"""Decorator of a function that a compiled model calls and that is not compiled."""
