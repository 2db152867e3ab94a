"""Bloom, Falcon and MPT: models whose attention modules compute the attention themselves.

The library looks up no attention function for these models. `replace_attention` replaces the
forward of their attention modules: the module's own projections, then the registered attention
function with the keys and values in pages, then the module's own output projection. Bloom and MPT
have ALiBi instead of rotary positions; their slopes are read from the library's own functions.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from ...validation.library_models import check_in_step, check_no_rounded_alibi
from .models.replaced import Replacement, replaced
from .steps.step import step_of

Forward = Callable[..., tuple[Tensor, None]]


def _attend(
    module: Any,
    name: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    dropout: float,
    alibi_slopes: Tensor | None,
) -> Tensor:
    """Return [1, tokens, query_heads * head_size] the attention of a step of a PagedBatch."""
    check_in_step(type(module).__name__, step_of(None, mask) is not None)
    out, _ = AttentionInterface()[name](
        module,
        query,
        key,
        value,
        mask,
        dropout=dropout if module.training else 0.0,
        scaling=scaling,
        alibi_slopes=alibi_slopes,
    )
    flat: Tensor = out.flatten(2)
    return flat


def _bloom(
    module: Any,
    name: str,
    hidden_states: Tensor,
    residual: Tensor,
    alibi: Tensor,
    attention_mask: Tensor | None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The forward of BloomAttention; `alibi` are the slopes, [query_heads]."""
    query, key, value = module._reshape(module.query_key_value(hidden_states))
    dropout = module.attention_dropout.p
    scaling = module.inv_norm_factor
    out = _attend(
        module, name, query, key, value, attention_mask, scaling, dropout, alibi
    )
    return residual + module.dense(out), None


def _falcon(
    module: Any,
    name: str,
    hidden_states: Tensor,
    attention_mask: Tensor | None,
    position_embeddings: tuple[Tensor, Tensor],
    **_: Any,
) -> tuple[Tensor, None]:
    """The forward of FalconAttention with rotary positions."""
    rotate = import_module(type(module).__module__).apply_rotary_pos_emb
    query, key, value = module._split_heads(module.query_key_value(hidden_states))
    # the library repeats each key/value head for its query heads; pages hold it once
    group = key.shape[2] // module.num_kv_heads
    query, key, value = (
        states.transpose(1, 2)
        for states in (query, key[:, :, ::group], value[:, :, ::group])
    )
    query, key = rotate(query, key, *position_embeddings)
    dropout = module.attention_dropout.p
    scaling = module.inv_norm_factor
    out = _attend(
        module, name, query, key, value, attention_mask, scaling, dropout, None
    )
    return module.dense(out), None


def _mpt(
    module: Any,
    name: str,
    hidden_states: Tensor,
    position_bias: Tensor,
    attention_mask: Tensor | None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The forward of MptAttention; `position_bias` is [query_heads, 1, max_seq_len]."""
    states = module.Wqkv(hidden_states)
    if module.clip_qkv:
        states = states.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    query, key, value = (
        state.unflatten(2, (module.n_heads, module.head_dim)).transpose(1, 2)
        for state in states.chunk(3, dim=2)
    )
    # the last two columns are slope * -1 and slope * 0
    slopes = -position_bias[:, 0, -2]
    dropout = module.attn_dropout_p
    scaling = module.softmax_scale
    out = _attend(
        module, name, query, key, value, attention_mask, scaling, dropout, slopes
    )
    return module.out_proj(out), None


FORWARDS: dict[str, Forward] = {
    "transformers.models.bloom.modeling_bloom.BloomAttention": _bloom,
    "transformers.models.falcon.modeling_falcon.FalconAttention": _falcon,
    "transformers.models.falcon.modeling_falcon.FalconFlashAttention2": _falcon,
    "transformers.models.mpt.modeling_mpt.MptAttention": _mpt,
}
"""The replaced forward by the class of the attention module."""


def _class_name(module: object) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def has_own_attention(model: Any) -> bool:
    """Whether `replace_attention` supports the model."""
    return any(_class_name(module) in FORWARDS for module in model.modules())


@contextmanager
def replace_attention(model: Any, name: str) -> Iterator[None]:
    """Run a model's attention modules on a registered attention function inside of the block.

    Args:
        model: a Bloom, Falcon or MPT model of the library.
        name: the name of the attention function, as `register` returns it.

    Raises:
        NotImplementedError: a Falcon model with ALiBi.
    """
    check_no_rounded_alibi(
        type(model).__name__, bool(getattr(model.config, "alibi", False))
    )
    with replaced(lambda: _replacements(model, name)):
        yield


def _replacements(model: Any, name: str) -> list[Replacement]:
    """Return the functions of a model that are replaced."""
    found = []
    for module in model.modules():
        if _class_name(module) in FORWARDS:
            forward = partial(FORWARDS[_class_name(module)], module, name)
            found.append(Replacement(module, "forward", forward, name))
    base = model.base_model
    if hasattr(base, "build_alibi_tensor"):
        # Bloom's own function does not take the mask of a step; layers get the slopes alone
        slopes = partial(_bloom_slopes, type(base).build_alibi_tensor.__get__(base))
        found.append(Replacement(base, "build_alibi_tensor", slopes, name))
    return found


def _bloom_slopes(
    build: Callable[..., Tensor], mask: Tensor, num_heads: int, dtype: torch.dtype
) -> Tensor:
    """Return [num_heads] the slopes: the bias of a key at position 1."""
    two_tokens = torch.ones(1, 2, dtype=torch.int64, device=mask.device)
    return build(two_tokens, num_heads, dtype=torch.float32)[:, 0, 1]
