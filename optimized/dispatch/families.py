"""The kernel families that dispatch chooses from.

To add kernels for a chip, write a `KernelFamily` (runtime/family.py) in a folder of
`optimized/kernels/`, and enter it here. No other file names it.
"""

from ..kernels.portable.host.family import FAMILIES as PORTABLE_FAMILIES
from ..kernels.portable.host.latent import FAMILY as PORTABLE_LATENT
from ..kernels.sm90.append.family import FAMILY as SM90_APPEND
from ..kernels.sm90.cascade.family import FAMILY as SM90_PREFIX
from ..kernels.sm90.code_decode.family import FAMILY as SM90_CODE_DECODE
from ..kernels.sm90.code_prefill.family import FAMILY as SM90_CODE_PREFILL
from ..kernels.sm90.invariant.family import FAMILY as SM90_INVARIANT
from ..kernels.sm90.latent.family import FAMILY as SM90_LATENT
from ..kernels.sm90.prefill.family import FAMILY as SM90_PREFILL
from ..runtime.family import KernelFamily

FAMILIES: tuple[KernelFamily, ...] = (
    SM90_LATENT,
    SM90_INVARIANT,
    SM90_APPEND,
    SM90_CODE_DECODE,
    SM90_CODE_PREFILL,
    SM90_PREFILL,
    SM90_PREFIX,
    PORTABLE_LATENT,
    *PORTABLE_FAMILIES,
)
"""Within a role the first family that takes a call computes it. The portable families, which take
every call, come after all others."""
