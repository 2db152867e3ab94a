import torch
from torch import Tensor


def causal_mask(query_len: int, kv_len: int) -> Tensor:
    context = kv_len - query_len
    query = torch.arange(query_len)[:, None] + context
    key = torch.arange(kv_len)[None]
    return key <= query
