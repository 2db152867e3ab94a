"""Entry point of the SGLang plugin: registration, and what is refused before a model is served."""

import logging
import os
import re
from functools import cache
from typing import TYPE_CHECKING, Any

from ...contract.cache_formats import TENSOR_SCALE_DTYPES
from ...contract.extras import require
from ...contract.operations import Implementation
from ...contract.specs import KVCacheSpec
from ...validation.integrations import load_named

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from .backend import PagetwinBackend

BACKEND_NAME = "pagetwin"
"""The name of the option `--attention-backend`."""

IMPLEMENTATION_VARIABLE = "PAGETWIN_SGLANG_IMPLEMENTATION"
"""Environment variable with the name of the twin that runs."""

CHAINS = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "DFLASH")
"""Algorithms whose drafts may be one chain per request."""

OLDEST, NEWEST = (0, 5, 20), (0, 5, 23)
"""Releases of SGLang whose interfaces the backend was checked with, both included."""


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

    for known, add in (
        (choices.ATTENTION_BACKEND_CHOICES, choices.add_attention_backend_choices),
        (
            choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
            choices.add_deterministic_attention_backend_choices,
        ),
        (
            choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND,
            choices.add_radix_supported_deterministic_attention_backend_choices,
        ),
    ):
        if BACKEND_NAME not in known:
            add([BACKEND_NAME])
    from sglang.srt.layers.attention.attention_registry import (
        register_attention_backend,
    )

    register_attention_backend(BACKEND_NAME)(make_backend)
    if os.environ.get("PAGETWIN_RECORD"):
        from ...recorder.wrappers.sglang import record_sglang_backends

        record_sglang_backends()


def check_version(version: str) -> None:
    """Raise for a release that is too old; log one warning for one that is newer than all known.

    Args:
        version: `sglang.__version__`, such as "0.5.23" or "0.6.0.dev3".

    Raises:
        RuntimeError: the version is older than the oldest supported one.
    """
    oldest, newest = (".".join(map(str, number)) for number in (OLDEST, NEWEST))
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    number = tuple(map(int, found.groups())) if found else None
    if number is not None and number < OLDEST:
        raise RuntimeError(
            f"sglang = {version}: expected {oldest} to {newest}; pip install 'sglang>={oldest}'"
        )
    if number is None or number > NEWEST:
        logger.warning(
            "SGLang %s is not known to pagetwin, whose backend was checked with the interfaces of"
            " %s to %s; if the engine does not start, install sglang==%s or choose another"
            " --attention-backend",
            version,
            oldest,
            newest,
            newest,
        )


def make_backend(runner: Any) -> "PagetwinBackend":
    """Return the backend of a model runner. SGLang calls it once the model is loaded.

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
    from .backend import PagetwinBackend

    return PagetwinBackend(runner)


def why_not(runner: Any, run: Implementation) -> list[str]:
    """Return every reason why a model runner cannot be served."""
    from sglang.srt.runtime_context import get_exec, get_parallel, get_spec

    if runner.use_mla_backend:
        return ["latent attention (MLA): expected keys and values per head"]
    model, ranks, drafts = runner.model_config, get_parallel(), get_spec()
    algorithm, overlap = drafts.speculative_algorithm, get_exec().overlap
    dtype = runner.kv_cache_dtype
    spec = KVCacheSpec(int(runner.page_size), 1, model.head_dim, dtype)
    reasons = {
        "a draft model: expected another --speculative-draft-attention-backend, such as triton": (
            runner.is_draft_worker
        ),
        "cross-attention: expected a model without an encoder": model.is_encoder_decoder,
        f"speculative_algorithm = {algorithm}: expected {', '.join(CHAINS)}": (
            algorithm is not None and algorithm not in CHAINS
        ),
        "drafts in a tree: expected --speculative-eagle-topk 1": (
            (drafts.speculative_eagle_topk or 1) > 1
        ),
        "data-parallel attention: expected no --enable-dp-attention": ranks.attn_dp_size
        > 1,
        "context parallelism: expected tensor parallelism alone": (
            ranks.attn_cp_size > 1 or ranks.attn_dcp_size > 1
        ),
        "two batches at once: expected no --enable-two-batch-overlap": (
            overlap.enable_two_batch_overlap
        ),
        f"kv_cache_dtype = {dtype}: expected {runner.dtype} or an FP8 dtype": (
            dtype not in (runner.dtype, *TENSOR_SCALE_DTYPES)
        ),
    }
    found = [reason for reason, is_so in reasons.items() if is_so]
    for layer in runner.model.modules():
        kind = getattr(layer, "attn_type", None)
        if getattr(kind, "value", kind) == "decoder_bidirectional":
            found.append("a decoder whose prompts attend in both directions")
        if getattr(layer, "logit_capping_method", "tanh") != "tanh":
            found.append(f"logit_capping_method = {layer.logit_capping_method}")
        if (getattr(layer, "xai_temperature_len", None) or 0) > 0:
            found.append("scores that depend on the position (xai_temperature_len)")
    found += run.backends[0].validate_configuration(spec, runner.device)
    if any(reason.startswith("device = cpu") for reason in found):
        found.append(f"or {IMPLEMENTATION_VARIABLE}=reference")
    return list(dict.fromkeys(found))


def load_implementation() -> Implementation:
    """Return the implementation that the environment names: "optimized" if it names none.

    Raises:
        ValueError: it cannot be loaded.
    """
    return _load(os.environ.get(IMPLEMENTATION_VARIABLE) or "optimized")


@cache
def _load(name: str) -> Implementation:
    try:
        return load_named(name)
    except ValueError as error:
        raise ValueError(f"{IMPLEMENTATION_VARIABLE}: {error}") from error
