"""The dtype in which a layer computes attention."""

import torch
from torch import Tensor

from ....validation.library_models import check_one_dtype


def in_one_dtype(*tensors: Tensor) -> list[Tensor]:
    """Return queries, keys and values in the dtype of autocast; unchanged without autocast.

    Under autocast, rotary positions leave queries and keys in float32 and values in a lower dtype.
    torch's own attention casts all of them to the dtype of autocast.

    Raises:
        TypeError: without autocast, the dtypes are different.
    """
    device = tensors[0].device.type
    if torch.is_autocast_enabled(device) and tensors[0].dtype != torch.float64:
        return [tensor.to(torch.get_autocast_dtype(device)) for tensor in tensors]
    check_one_dtype([tensor.dtype for tensor in tensors])
    return list(tensors)
