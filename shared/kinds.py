"""Which values does the whole project agree on?"""

import torch

PAD_SLOT_ID = -1
"""The slot of a token whose key and value are not stored (vLLM's name)."""

HOST = torch.device("cpu")
"""Where a step is planned, whatever torch's default device is."""

CACHE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""What the twin stores; the reference also takes float64."""
