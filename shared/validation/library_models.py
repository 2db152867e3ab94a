"""Validation of the models of other libraries: what a twin cannot compute exactly."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

ATTENTION_KINDS = ("full_attention", "sliding_attention", "chunked_attention")


def check_attention_replaced(model: str, found: str | None, expected: str) -> None:
    """Raise NotImplementedError if a model kept its own attention."""
    if found != expected:
        raise NotImplementedError(
            f"{model} does not let its attention be replaced (it kept {found!r}): expected a"
            " model whose file looks its attention up by name (ALL_ATTENTION_FUNCTIONS)"
        )


def check_attends_everywhere(model: str, is_stateful: bool) -> None:
    """Raise NotImplementedError for a model with recurrent or convolutional layers."""
    if is_stateful:
        raise NotImplementedError(
            f"{model} keeps a state of the past besides keys and values (a recurrent or"
            " convolutional layer): expected a model with attention in all layers"
        )


def check_takes_keywords(model: str, takes: bool) -> None:
    """Raise NotImplementedError for a model that passes no keywords on to its attention."""
    if not takes:
        raise NotImplementedError(
            f"{model}.forward takes no further keywords: expected a model that passes them on"
            " to its attention function, which gets the pages from them"
        )


def check_num_layers(model: str, config: Any) -> int:
    """Return the number of a model's layers; raise NotImplementedError if it names none."""
    found = getattr(config, "num_hidden_layers", None)
    if found is None:
        raise NotImplementedError(
            f"{model} has no num_hidden_layers in its configuration: expected a model of one stack"
            " of layers"
        )
    return int(found)


def check_calls(model: str, calls: Mapping[str, int], expected: int) -> None:
    """Raise NotImplementedError unless each layer ran on the twin exactly once."""
    wrong = {name: count for name, count in calls.items() if count != 1}
    if len(calls) != expected or wrong:
        raise NotImplementedError(
            f"{model}: {len(calls)} of {expected} attention layers ran on the twin in this"
            f" step{f', some not once: {wrong}' if wrong else ''}; expected each once. A layer"
            " that computes its own attention cannot use a paged cache"
        )


def check_pages_used(model: str, found: int, expected: int) -> None:
    """Raise NotImplementedError unless each layer read the pages of the step."""
    if found != expected:
        raise NotImplementedError(
            f"{model}: {found} of {expected} attention layers got the pages of this step: expected"
            " layers that pass on either further keywords (pagetwin=) or attention_mask unchanged"
        )


def check_in_step(module: str, is_in_step: bool) -> None:
    """Raise NotImplementedError for a replaced attention module outside of a step."""
    if not is_in_step:
        raise NotImplementedError(
            f"{module} runs on a twin only in a step of PagedBatch: expected generate(...) or"
            " model(**batch.model_inputs(...)), without a cache of the library"
        )


def check_no_rounded_alibi(model: str, has_alibi: bool) -> None:
    """Raise NotImplementedError for a Falcon model with ALiBi."""
    if has_alibi:
        raise NotImplementedError(
            f"{model} has alibi = True: transformers rounds the bias of each key to bfloat16 in"
            " every dtype, which no slope per head expresses; expected rotary positions (alibi ="
            " False), or run this model with model.generate of the library"
        )


def check_no_merged_attention(model: str, classes: Iterable[type]) -> None:
    """Raise NotImplementedError for a decoder that merges self-attention and cross-attention."""
    merged = [cls.__name__ for cls in classes if "MergedAttention" in cls.__name__]
    if merged:
        raise NotImplementedError(
            f"{model}: {merged[0]} computes one softmax over the keys of the decoder and of the"
            " encoder, which are in two block tables; expected separate cross-attention (such as"
            " T5Gemma), or run this model with model.generate of the library"
        )


def check_inference(query: Tensor, dropout: float) -> None:
    """Raise NotImplementedError for dropout and for gradients."""
    if dropout:
        raise NotImplementedError(
            f"dropout = {dropout}: expected 0; call model.eval() first"
        )
    if torch.is_grad_enabled() and query.requires_grad:
        raise NotImplementedError(
            "query requires a gradient: expected none, as the twins have no backward pass; run"
            " the model under torch.no_grad()"
        )


def check_layer_kind(
    module: Any, sliding_window: int | None, causal: bool
) -> int | None:
    """Return the layer's chunk size; raise if its options contradict its kind."""
    config: Any = getattr(module, "config", None)
    # cross-attention; the kinds are those of the decoder's self-attention
    if not causal and getattr(config, "is_decoder", False):
        return None
    layer = getattr(module, "layer_idx", None)
    kinds = getattr(config, "layer_types", None)
    of_config = getattr(config, "sliding_window", None)
    where = f"layer {layer} ({type(module).__name__})"
    if kinds is None or layer is None or layer >= len(kinds):
        wants_window = getattr(config, "use_sliding_window", True) and of_config
        if wants_window and sliding_window is None and layer is not None:
            raise NotImplementedError(
                f"{where} passes no sliding_window, and its config has sliding_window ="
                f" {of_config}: expected the window"
            )
        return None
    kind = kinds[layer]
    if kind not in ATTENTION_KINDS:
        raise NotImplementedError(
            f"{where} is of kind {kind!r}: expected one of {', '.join(ATTENTION_KINDS)}"
        )
    if (kind == "sliding_attention") != (sliding_window is not None):
        raise NotImplementedError(
            f"{where} is of kind {kind!r} and passes sliding_window = {sliding_window}:"
            " expected a window in layers of that kind and only in those"
        )
    return int(config.attention_chunk_size) if kind == "chunked_attention" else None


def check_causal_batch(module: Any, causal: bool) -> None:
    """Raise NotImplementedError for a layer that is not causal."""
    if not causal or getattr(module, "layer_idx", None) is None:
        raise NotImplementedError(
            f"{type(module).__name__} is not causal, or has no layer_idx: expected a layer of a"
            " decoder; run an encoder without pagetwin=, and an encoder-decoder model with"
            " PagedCache"
        )


def check_no_other_thread(owner: str, name: str, other: str) -> None:
    """Raise RuntimeError if another thread has replaced the same attention by another one."""
    if name != other:
        raise RuntimeError(
            f"{owner} runs on {other!r} in another thread, and on {name!r} in this one: expected"
            " the same implementation in all threads whose models share a configuration, or a"
            " configuration for each model (copy.deepcopy(config))"
        )


def check_one_dtype(dtypes: Sequence[torch.dtype]) -> None:
    """Raise TypeError for queries, keys and values of different dtypes."""
    if len(set(dtypes)) > 1:
        raise TypeError(
            f"a layer's queries, keys and values are {', '.join(map(str, dtypes))}: expected one"
            " dtype; load the model in one dtype, or run it under torch.autocast"
        )


# --- positions


def raise_on_mask_read(operation: str) -> NoReturn:
    """Raise NotImplementedError for a model that computes with the mask of a step."""
    raise NotImplementedError(
        f"the model computes with its attention mask ({operation}): expected a model that passes"
        " it on to its attention, as a step of several requests has no mask; run this model with"
        " model.generate of the library"
    )


def check_reads_positions(module: str, ignores: bool) -> None:
    """Raise NotImplementedError for a model that takes no positions."""
    if ignores:
        raise NotImplementedError(
            f"the model of {module} takes no position_ids and counts the tokens of a row, but a"
            " step has several requests in one row: expected a model that takes position_ids; run"
            " this model with model.generate of the library"
        )


def check_no_padding_positions(module: str, counts: bool) -> None:
    """Raise NotImplementedError for a model whose positions begin after the padding id."""
    if counts:
        raise NotImplementedError(
            f"the model of {module} counts its positions from pad_token_id + 1, except in"
            " model.generate of the library, which counts from 0: expected a model whose first"
            " position is 0"
        )


def check_rope_length(
    name: str, num_tokens: int, limit: tuple[str, int] | None
) -> None:
    """Raise NotImplementedError for a sequence that changes the positions of other requests."""
    if limit is not None and num_tokens > limit[1]:
        raise NotImplementedError(
            f"{name} has rotary positions of type {limit[0]!r}, and a sequence of {num_tokens}"
            f" tokens: expected at most {limit[1]}, as a longer one changes the frequencies of"
            " every request in the step; run this model with model.generate of the library"
        )


def check_row_scale(name: str, num_tokens: int, floor_scale: int) -> None:
    """Raise NotImplementedError for a step in which a layer scales queries by their row."""
    if num_tokens >= floor_scale:
        raise NotImplementedError(
            f"{name} scales queries from row {floor_scale - 1} of a step on (floor_scale ="
            f" {floor_scale}), and the step has {num_tokens} tokens: expected fewer than"
            f" {floor_scale} tokens per step; pass a smaller max_batch_tokens"
        )


def check_table_length(
    name: str, num_tokens: int, limit: tuple[str, int] | None
) -> None:
    """Raise ValueError for a sequence that is longer than the model's table of positions."""
    if limit is not None and num_tokens > limit[1]:
        raise ValueError(
            f"{name} has {num_tokens} positions, and the model's table {limit[0]} has {limit[1]}:"
            " expected a shorter prompt or a smaller max_new_tokens"
        )


def check_no_step_bias(has_bias: bool) -> None:
    """Raise NotImplementedError for a position bias in a step of several requests."""
    if has_bias:
        raise NotImplementedError(
            "position_bias in a step: expected none, as the model computes it for the tokens of"
            " one row, and a step has several requests; run this model with model.generate of the"
            " library"
        )


def check_exact_run(model: str, deviation: float, limit: float) -> None:
    """Raise NotImplementedError if two requests together have other logits than each alone."""
    if deviation > limit:
        raise NotImplementedError(
            f"{model} gives other logits for two requests on a twin than for each of them alone in"
            f" the library (relative difference {deviation:.2g}, expected at most {limit:.2g}):"
            " expected a model whose logits depend on its own sequence, its position_ids and its"
            " attention function alone; run this model with model.generate of the library"
        )


def check_encoder_decoder(model: str, config: Any) -> None:
    """Raise NotImplementedError for an encoder and a decoder that are models of their own."""
    if getattr(config, "vocab_size", None) is None:
        raise NotImplementedError(
            f"{model} joins an encoder and a decoder that have their own configurations: expected"
            " a model of one configuration, such as BART, T5 or Whisper; run this model with"
            " model.generate of the library"
        )


def check_no_shared_capacity(model: str, fraction: float | None) -> None:
    """Raise NotImplementedError for experts whose capacity depends on the other requests."""
    if fraction is not None and fraction < 1:
        raise NotImplementedError(
            f"{model} has moe_eval_capacity_token_fraction = {fraction}: expected at least 1, as"
            " a token's expert otherwise depends on the other requests of a batch"
        )
