"""Attention backend: all operations as one object with an engine's interface.

There are two. TRITON runs everything in this package's own kernels. XFORMERS runs its decodes in
xFormers' paged split-K operator and its prefills in Triton, as vLLM's V1 backend of that name did.
"""

from .triton import TritonAttentionBackend
from .xformers import XFormersAttentionBackend

BACKENDS = (TritonAttentionBackend, XFormersAttentionBackend)
