"""Layouts of queries and caches in the terms of `Support`."""

import torch
from torch import Tensor

QUERY = torch.zeros(3, 4, 8)


CACHE = torch.zeros(5, 16, 2, 8)


def strided(*strides: int, offset: int = 0) -> Tensor:
    return torch.zeros(999).as_strided((3, 4, 8), strides, offset)
