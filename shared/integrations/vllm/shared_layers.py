"""Which layers attend over keys that ranks share, and which ones are rejected."""

from typing import Any

from ...contract.cache_formats import CacheFormat
from ...contract.operations import Implementation
from .context_parallel import SharedKeys


def share_keys(
    impl: Any,
    run: Implementation,
    num_heads: int,
    head_size: int,
    scale: float,
    num_kv_heads: int,
    form: CacheFormat,
    owns_cache: bool,
    **layer: Any,
) -> SharedKeys | None:
    """Return how a layer attends to keys that ranks share; None if they are not shared.

    Args:
        impl: vLLM's implementation of the layer, which has the numbers of ranks.
        run: the implementation that runs it.
        num_heads, head_size, scale, num_kv_heads, form, owns_cache: as in `SharedKeys`.
        layer: its arguments that ranks may not take.

    Raises:
        NotImplementedError: something that ranks with a share of the keys do not compute.
    """
    check_ranks(impl, "pcp_world_size")
    ranks = getattr(impl, "dcp_world_size", 1)
    # an encoder has no cache: its heads are computed where they are
    if ranks == 1 or layer["attn_type"] in ("encoder", "encoder_only"):
        return None
    from vllm.config import get_current_vllm_config_or_none
    from vllm.distributed.parallel_state import get_dcp_group

    config: Any = get_current_vllm_config_or_none()
    check_shared_layer(ranks, run, config, **layer)
    sizes = (num_heads, head_size, scale, num_kv_heads)
    return SharedKeys(run, *sizes, form, owns_cache, config, get_dcp_group())


def check_shared_layer(
    ranks: int,
    run: Implementation,
    config: Any,
    sliding_window: int | None,
    alibi_slopes: list[float] | None,
    attn_type: str,
    is_batch_invariant: bool,
) -> None:
    """Raise NotImplementedError if ranks with a share of the keys cannot compute a layer."""
    distances = "a rank does not know how far apart its keys are"
    found = {
        f"sliding_window = {sliding_window}": (sliding_window is not None, distances),
        f"alibi_slopes = {alibi_slopes}": (alibi_slopes is not None, distances),
        f"attn_type = {attn_type}": (
            attn_type == "encoder_decoder",
            "an encoder's keys are stored whole",
        ),
        "VLLM_BATCH_INVARIANT = 1": (
            is_batch_invariant,
            "partial results are grouped by ranks",
        ),
        "enable_dbo or ubatch_size": (
            config.parallel_config.use_ubatching,
            "microbatches would share the buffers of the exchange",
        ),
        f"implementation {run.name}": (
            "DecodeContextParallel" not in run.operations,
            "it has no DecodeContextParallel",
        ),
    }
    for name, (is_found, reason) in found.items():
        if is_found:
            raise NotImplementedError(
                f"{name} with decode_context_parallel_size = {ranks}: expected"
                f" decode_context_parallel_size = 1, since {reason}; or choose another"
                " --attention-backend"
            )


def check_ranks(impl: Any, *names: str) -> None:
    """Raise NotImplementedError if one of these numbers of ranks is above 1."""
    for name in names:
        ranks = getattr(impl, name, 1)
        if ranks > 1:
            raise NotImplementedError(
                f"{name} = {ranks}: expected 1, since this backend does not exchange partial"
                " results between these ranks; choose another --attention-backend"
            )
