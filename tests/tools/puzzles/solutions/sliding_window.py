import torch
from torch import Tensor


def sliding_window(query_len: int, kv_len: int, window: int) -> Tensor:
    context = kv_len - query_len
    query = torch.arange(query_len)[:, None] + context
    key = torch.arange(kv_len)[None]
    distance = query - key
    return (distance >= 0) & (distance < window)
