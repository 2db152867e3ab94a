"""SGLang: an attention backend on either twin, for SGLang 0.5.20 to 0.5.23.

SGLang calls `register` through the entry point group `sglang.srt.plugins`. After that,
`sglang serve MODEL --attention-backend pagetwin` runs the model's attention on pagetwin. This
import has no side effects and does not import SGLang. The module `backend` derives from SGLang's
class: it is imported when SGLang builds the backend.
"""

from .plugin import make_backend as make_backend
from .plugin import register as register
