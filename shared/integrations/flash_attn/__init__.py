"""The names of flash-attn, computed by pagetwin: a module to import where flash_attn is expected.

`flash_attn_func`, `flash_attn_varlen_func` and `flash_attn_with_kvcache` run the optimized twin.
`pagetwin.integrations.flash_attn.reference` has the same names on the reference. `install` makes
`import flash_attn` find them, in a process where the original is not installed.
"""

from .calls import FlashAttention as FlashAttention
from .hub import write_hub_kernel as write_hub_kernel
from .install import API_VERSION as API_VERSION
from .install import install as install
from .install import uninstall as uninstall

_OPTIMIZED = FlashAttention("optimized")
flash_attn_func = _OPTIMIZED.flash_attn_func
flash_attn_varlen_func = _OPTIMIZED.flash_attn_varlen_func
flash_attn_with_kvcache = _OPTIMIZED.flash_attn_with_kvcache
