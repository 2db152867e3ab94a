"""Hugging Face transformers: any model of the library on either twin.

transformers looks its attention function up by name. `register` registers a twin under a name, and
`generate` runs a model over a paged KV cache with it: continuous batching, chunked prefill, prefix
caching, and preemption when blocks run out.

transformers imports triton. Without a GPU, set TRITON_INTERPRET=1 in the environment before this
import to run the Triton kernels in the interpreter; otherwise their first launch raises. The
reference needs neither.
"""

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
from .attention import use_attention as use_attention
from .generation import generate as generate
from .paged_batch import PagedBatch as PagedBatch
from .paged_cache import PagedCache as PagedCache
from .statistics import Statistics as Statistics
