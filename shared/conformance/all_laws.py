"""Which laws are there?

Every file of laws is imported here; the order is that of the concepts.
"""

from . import laws_of_attention as laws_of_attention
from . import laws_of_attention_refusals as laws_of_attention_refusals
from . import laws_of_backends as laws_of_backends
from . import laws_of_batch_invariance as laws_of_batch_invariance
from . import laws_of_batch_slices as laws_of_batch_slices
from . import laws_of_batch_split as laws_of_batch_split
from . import laws_of_blocks as laws_of_blocks
from . import laws_of_cache as laws_of_cache
from . import laws_of_cascade as laws_of_cascade
from . import laws_of_counting as laws_of_counting
from . import laws_of_dcp_attention as laws_of_dcp_attention
from . import laws_of_defaults as laws_of_defaults
from . import laws_of_encoder_decoder as laws_of_encoder_decoder
from . import laws_of_fast_prefill as laws_of_fast_prefill
from . import laws_of_graph_state as laws_of_graph_state
from . import laws_of_histories as laws_of_histories
from . import laws_of_invariance as laws_of_invariance
from . import laws_of_large_batches as laws_of_large_batches
from . import laws_of_latent_cache as laws_of_latent_cache
from . import laws_of_latents as laws_of_latents
from . import laws_of_layer_options as laws_of_layer_options
from . import laws_of_layouts as laws_of_layouts
from . import laws_of_local_attention as laws_of_local_attention
from . import laws_of_masks as laws_of_masks
from . import laws_of_merging as laws_of_merging
from . import laws_of_metadata as laws_of_metadata
from . import laws_of_multimodal_prefix as laws_of_multimodal_prefix
from . import laws_of_sequences as laws_of_sequences
from . import laws_of_slots as laws_of_slots
from . import laws_of_step_buffers as laws_of_step_buffers
from . import laws_of_trees as laws_of_trees
from .law import LAWS

ALL_LAWS = tuple(LAWS)
