"""Can a model that nobody here wrote run on the twins?

Hugging Face transformers lets a model's attention be replaced by name. `register` puts a twin under
a name, and `generate` runs a model over a paged cache with it: many requests in one flat batch,
long prompts in chunks, equal beginnings shared, requests that start over when blocks run out.
"""

import os
import sys

import torch

# transformers imports triton, and Triton's interpreter has to be chosen before: without a GPU the
# fast twin runs in nothing else
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
