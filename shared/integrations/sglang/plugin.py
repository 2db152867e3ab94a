"""Entry point of the SGLang plugin: registration, and what is rejected before a model is served."""

import logging
import os
import re
from typing import Any

from ...contract.cache_formats import TENSOR_SCALE_DTYPES
from ...contract.extras import require
from ...contract.operations import Implementation
from ...contract.specs import KVCacheSpec
from .settings import IMPLEMENTATION_VARIABLE, load_implementation

logger = logging.getLogger(__name__)

BACKEND_NAME = "pagetwin"

OLDEST, NEWEST = (0, 5, 20), (0, 5, 23)
"""Releases of SGLang whose interfaces the backend was checked with, both included."""

LISTS = {
    "ATTENTION_BACKEND_CHOICES": "add_attention_backend_choices",
    "DETERMINISTIC_ATTENTION_BACKEND_CHOICES": "add_deterministic_attention_backend_choices",
    "RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND": (
        "add_radix_supported_deterministic_attention_backend_choices"
    ),
}
"""SGLang's lists of backends that an option may name, and what adds to them."""

CHAINS = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "DFLASH")
"""Algorithms whose drafts may be one chain per request."""


def register() -> None:
    """Make `--attention-backend pagetwin` select this backend. May be called several times.

    SGLang calls it in every process, before it reads its arguments. If PAGETWIN_RECORD is set,
    every attention backend of SGLang is recorded, not only this one.

    Raises:
        ImportError: SGLang is not installed.
        RuntimeError: SGLang is older than the oldest supported version.
    """
    require("pagetwin.integrations.sglang", "sglang")
    import sglang

    check_version(sglang.__version__)
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention import attention_registry

    for name, adder in LISTS.items():
        if BACKEND_NAME not in getattr(choices, name):
            getattr(choices, adder)([BACKEND_NAME])
    attention_registry.register_attention_backend(BACKEND_NAME)(make_backend)
    if os.environ.get("PAGETWIN_RECORD"):
        from ...recorder.wrappers.sglang import record_sglang_backends

        record_sglang_backends()


def check_version(version: str) -> None:
    """Raise RuntimeError for a release that is too old; warn of one newer than all known.

    Args:
        version: `sglang.__version__`, such as "0.5.23" or "0.6.0.dev3".
    """
    oldest, newest = (".".join(map(str, number)) for number in (OLDEST, NEWEST))
    number = tuple(map(int, re.findall(r"\d+", version)[:3]))
    if number < OLDEST:
        raise RuntimeError(
            f"sglang = {version}: expected {oldest} to {newest}; pip install 'sglang>={oldest}'"
        )
    if number > NEWEST:
        logger.warning(
            "SGLang %s is not known to pagetwin, whose backend was checked with %s to %s; if the"
            " engine does not start, install sglang==%s or choose another --attention-backend",
            *(version, oldest, newest, newest),
        )


def make_backend(runner: Any) -> Any:
    """Return the `PagetwinSglangBackend` of a model runner, once its model is loaded.

    Args:
        runner: SGLang's `ModelRunner`.

    Raises:
        ValueError: the model or the settings cannot be served; the message has every reason.
    """
    reasons = why_not(runner, load_implementation())
    if reasons:
        raise ValueError(
            f"--attention-backend {BACKEND_NAME} cannot serve this: {'; '.join(reasons)}"
        )
    if runner.page_size % 16:
        logger.warning(
            "page_size = %d: the kernels for Hopper need a multiple of 16, so the portable ones"
            " run; --page-size 16 is faster",
            runner.page_size,
        )
    from .backend import PagetwinSglangBackend

    return PagetwinSglangBackend(runner)


def why_not(runner: Any, run: Implementation) -> list[str]:
    """Return every reason why a model runner cannot be served."""
    from sglang.srt.runtime_context import get_exec, get_parallel, get_spec

    if runner.use_mla_backend:
        return ["latent attention (MLA): expected keys and values per head"]
    model, ranks, drafts = runner.model_config, get_parallel(), get_spec()
    algorithm, dtype = drafts.speculative_algorithm, runner.kv_cache_dtype
    shared_ranks = max(ranks.attn_cp_size, ranks.attn_dcp_size)
    layers = [vars(layer) for layer in runner.model.modules()]
    kinds = [layer.get("attn_type") for layer in layers]
    caps = {layer.get("logit_capping_method", "tanh") for layer in layers} - {"tanh"}
    reasons = {
        "a draft model: expected another --speculative-draft-attention-backend, such as triton": (
            runner.is_draft_worker
        ),
        "cross-attention: expected a model without an encoder": model.is_encoder_decoder,
        f"speculative_algorithm = {algorithm}: expected one of {', '.join(CHAINS)}": (
            algorithm not in (None, *CHAINS)
        ),
        "drafts in a tree: expected --speculative-eagle-topk 1": (
            (drafts.speculative_eagle_topk or 1) > 1
        ),
        "data-parallel attention: expected no --enable-dp-attention": ranks.attn_dp_size
        > 1,
        "context parallelism: expected tensor parallelism alone": shared_ranks > 1,
        "two batches at once: expected no --enable-two-batch-overlap": (
            get_exec().overlap.enable_two_batch_overlap
        ),
        f"kv_cache_dtype = {dtype}: expected {runner.dtype} or an FP8 dtype": (
            dtype not in (runner.dtype, *TENSOR_SCALE_DTYPES)
        ),
        f"logit_capping_method = {', '.join(map(str, caps))}: expected tanh": caps,
        "scores that depend on the position (xai_temperature_len): expected none": any(
            (layer.get("xai_temperature_len") or 0) > 0 for layer in layers
        ),
        "prompts of a decoder that attend in both directions: expected causal ones": any(
            getattr(kind, "value", kind) == "decoder_bidirectional" for kind in kinds
        ),
    }
    found = [reason for reason, is_so in reasons.items() if is_so]
    spec = KVCacheSpec(int(runner.page_size), 1, model.head_dim, dtype)
    found += run.backends[0].validate_configuration(spec, runner.device)
    if any(reason.startswith("device = cpu") for reason in found):
        found.append(f"or {IMPLEMENTATION_VARIABLE}=reference")
    return found
