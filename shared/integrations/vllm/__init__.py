"""vLLM: an attention backend on either twin, for vLLM 0.25 to 0.33.

vLLM calls `register` through the entry point group `vllm.general_plugins`. After that,
`vllm serve MODEL --attention-backend CUSTOM` runs the model's attention on pagetwin. This import
has no side effects and does not import vLLM. The modules `backend`, `builder`, `impl` and `latent`
derive from vLLM's classes: vLLM imports them when it chooses the backend.
"""

from .plugin import choose_backend as choose_backend
from .plugin import register as register
from .settings import PluginSettings as PluginSettings
from .versions import INTERFACES as INTERFACES
from .versions import VllmInterface as VllmInterface
