"""Can a model that nobody here wrote run on the twins?

Hugging Face transformers lets a model's attention be replaced by name. `register` puts a twin under
a name, and `generate` runs a model over a paged cache with it: many requests in one flat batch,
long prompts in chunks, equal beginnings shared, requests that start over when blocks run out.

transformers imports triton. Without a GPU, set TRITON_INTERPRET=1 in the environment before this
import to run the Triton kernels in the interpreter; otherwise their first launch raises. The
reference twin needs neither.
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
from .generation import generate as generate
from .paged_batch import PagedBatch as PagedBatch
from .paged_cache import PagedCache as PagedCache
from .statistics import Statistics as Statistics
