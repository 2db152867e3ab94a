"""Hugging Face transformers: any model of the library on either twin.

transformers looks its attention function up by name. `register` registers a twin under a name, and
`generate` runs a model over a paged KV cache with it: continuous batching, chunked prefill, prefix
caching, and preemption when blocks run out.
"""

import os
import sys

import torch

# transformers imports triton, and Triton reads TRITON_INTERPRET at import. Without a GPU the
# optimized twin runs only in the interpreter.
if not torch.cuda.is_available() and "triton" not in sys.modules:
    os.environ.setdefault("TRITON_INTERPRET", "1")

try:
    import transformers as _transformers  # noqa: F401
except ImportError as error:
    raise ImportError(
        "pagetwin.integrations.transformers needs the library transformers:"
        " pip install 'pagetwin[transformers]'"
    ) from error

from .attention import count_calls as count_calls
from .attention import register as register
from .attention import register_all as register_all
from .generation import generate as generate
from .paged_batch import PagedBatch as PagedBatch
from .paged_cache import PagedCache as PagedCache
from .statistics import Statistics as Statistics
