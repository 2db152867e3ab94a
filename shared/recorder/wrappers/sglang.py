"""The recorder in SGLang: any of its attention backends, recorded, without a change of the engine.

SGLang makes each backend by a function in its registry. If PAGETWIN_RECORD is set,
`record_sglang_backends` replaces these functions by ones that return the same backend with three
methods of the object wrapped: the one that reads a step, and the two that run a layer.

The metadata of a step are read from SGLang's `ForwardBatch`, and not from those of the backend.
Steps that replay a CUDA graph are not seen, since SGLang then calls no layer: to check decodes,
start it with `--disable-cuda-graph`. Layers that are not checked: those of draft models, latent
attention, cross-attention, encoders, chunked attention, and calls with options of a single backend.
With a tree of drafts the writes are compared, and attention is not.
"""

import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...contract.attention_options import AttentionOptions
from ...contract.cache_formats import TENSOR_SCALE_DTYPES
from ...contract.extras import require
from ..environment import recorder_from_environment
from ..recorder import Recorder
from ..settings import RECORD_VARIABLE
from ..step import StepTensors

LOGGER = logging.getLogger("pagetwin.recorder")
OWN_NAME = "pagetwin"


def record_sglang_backends() -> None:
    """Let SGLang make recorded backends if PAGETWIN_RECORD is set. May be called several times.

    Raises:
        ImportError: SGLang is not installed.
    """
    if not os.environ.get(RECORD_VARIABLE):
        return
    require(f"{RECORD_VARIABLE} for SGLang", "sglang")
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    for name, make in list(ATTENTION_BACKENDS.items()):
        if not hasattr(make, "is_recorded"):
            ATTENTION_BACKENDS[name] = _recorded(name, make)


def _recorded(name: str, make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that makes a backend as another one does, and wraps its methods."""

    def make_recorded(runner: Any) -> Any:
        backend = make(runner)
        reason = _why_left_alone(runner)
        if reason:
            LOGGER.warning("flight recorder: %s is not recorded: %s", name, reason)
            return backend
        recorder = recorder_from_environment(name, int(name != OWN_NAME))
        return (
            backend if recorder is None else record_backend(backend, runner, recorder)
        )

    make_recorded.is_recorded = True  # type: ignore[attr-defined]
    return make_recorded


def _why_left_alone(runner: Any) -> str:
    """Return why a runner's backend is not recorded; empty if it is."""
    from sglang.srt.runtime_context import get_parallel

    ranks = get_parallel()
    if runner.use_mla_backend or runner.model_config.is_encoder_decoder:
        return "it has latent attention or cross-attention"
    if runner.is_draft_worker:
        return "the model makes drafts"
    if max(ranks.attn_dp_size, ranks.attn_cp_size, ranks.attn_dcp_size) > 1:
        return "ranks share the requests or the keys"
    return ""


def record_backend(backend: Any, runner: Any, recorder: Recorder) -> Any:
    """Return a backend whose steps and layers are checked; its methods are replaced in place.

    Args:
        backend: an `AttentionBackend` of SGLang.
        runner: the `ModelRunner` that it belongs to.
        recorder: the recorder.
    """
    wrapper = _Wrapper(backend, runner, recorder)
    for name in ("init_forward_metadata_out_graph", "init_forward_metadata"):
        setattr(backend, name, wrapper.reads_step(getattr(backend, name), name))
    for name in ("forward_decode", "forward_extend"):
        setattr(backend, name, wrapper.runs_layer(getattr(backend, name)))
    recorder.attach()
    backend.recorder = recorder
    return backend


class _Wrapper:
    """Tells the recorder of the steps and layers of one backend."""

    def __init__(self, backend: Any, runner: Any, recorder: Recorder) -> None:
        self._backend, self._runner, self._recorder = backend, runner, recorder
        pool = backend.token_to_kv_pool
        self._windows = pool if hasattr(pool, "full_to_swa_index_mapping") else None
        self._batch: Any = None
        """The batch of the current step, if it is checked."""
        self._is_inside = False

    def reads_step(self, plain: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Return a method that reads a step, and then begins it unless a graph replays it."""

        def read(forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
            result = plain(forward_batch, *args, **kwargs)
            self._batch = None
            # dummy runs have no requests
            if name == "init_forward_metadata" and forward_batch.rids:
                self._recorder.own(lambda: self._begin(forward_batch))
            return result

        return read

    def _begin(self, batch: Any) -> None:
        if batch.out_cache_loc is None or batch.forward_mode.is_idle():
            return
        self._recorder.begin_step(self._step(batch, is_window=False), "layers")
        if self._windows is not None:
            step = self._step(batch, is_window=True)
            self._recorder.begin_step(step, "layers with a window")
        self._batch = batch

    def _step(self, batch: Any, is_window: bool) -> StepTensors:
        """Return the metadata of a step, of the full pool or of that of layers with a window."""
        page, mode = int(self._runner.page_size), batch.forward_mode
        reqs = int(batch.batch_size)
        lens = batch.seq_lens[:reqs]
        if mode.is_decode() or mode.is_target_verify():
            new = batch.out_cache_loc.shape[0] // reqs
            counts = torch.full_like(lens, new)
            lens = lens + new if mode.is_target_verify() else lens
            longest = new
        else:
            counts, longest = batch.extend_seq_lens, max(batch.extend_seq_lens_cpu)
        starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
        rows = self._backend.req_to_token_pool.req_to_token[
            batch.req_pool_indices.long()
        ]
        slots, new_slots = rows[:, ::page].long(), batch.out_cache_loc
        window = None
        if self._windows is not None and is_window:
            slots, new_slots = map(
                self._windows.translate_loc_from_full_to_swa, (slots, new_slots)
            )
            window = self._runner.sliding_window_size
        return StepTensors(
            query_start_loc=starts,
            seq_lens=lens.to(torch.int32),
            block_table=(slots // page).to(torch.int32),
            slot_mapping=new_slots.long(),
            max_query_len=int(longest),
            max_seq_len=slots.shape[1] * page,
            block_size=page,
            window=None if window is None else window + 1,
        )

    def runs_layer(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method that runs a layer, and then tells what it has written and computed."""

        def run(
            q: Tensor,
            k: Tensor | None,
            v: Tensor | None,
            layer: Any,
            forward_batch: Any,
            save_kv_cache: bool = True,
            **kwargs: Any,
        ) -> Any:
            given = (layer, forward_batch, save_kv_cache)
            if not self._is_checked(layer, forward_batch, kwargs):
                return plain(q, k, v, *given, **kwargs)
            is_written = save_kv_cache and k is not None and v is not None
            # SGLang's pools divide keys and values by the scales of the cache in place
            new = (k.clone(), v.clone()) if is_written else (None, None)  # type: ignore[union-attr]
            self._is_inside = True
            try:
                result = plain(q, k, v, *given, **kwargs)
            finally:
                self._is_inside = False
            tensors = (q, *new, result)
            self._recorder.own(lambda: self._tell(layer, tensors, kwargs.get("sinks")))
            return result

        return run

    def _is_checked(self, layer: Any, batch: Any, kwargs: dict[str, Any]) -> bool:
        """Return whether a call is one to check."""
        kind = getattr(layer.attn_type, "value", layer.attn_type)
        others = {
            name
            for name, given in kwargs.items()
            if given is not None and given is not False
        }
        return (
            self._recorder.wants_layers
            and batch is self._batch
            and not self._is_inside
            and not torch.compiler.is_compiling()
            and kind == "decoder"
            and not layer.is_cross_attention
            and not layer.use_irope
            and (layer.xai_temperature_len or 0) <= 0
            and others <= {"sinks"}
        )

    def _tell(
        self,
        layer: Any,
        tensors: tuple[Tensor, Tensor | None, Tensor | None, Any],
        sinks: Tensor | None,
    ) -> None:
        query, key, value, output = tensors
        pool, page = self._backend.token_to_kv_pool, int(self._runner.page_size)
        caches = [
            buffer.transpose(1, 2)
            if buffer.dim() == 4
            else buffer.view(-1, page, *buffer.shape[1:])
            for buffer in pool.get_kv_buffer(layer.layer_id)
        ]
        group = "layers"
        if (
            self._windows is not None
            and self._windows.layers_mapping[layer.layer_id][1]
        ):
            group = "layers with a window"
        scales: dict[str, Any] = {}
        if caches[0].dtype in TENSOR_SCALE_DTYPES:
            given = {"k_scale": layer.k_scale, "v_scale": layer.v_scale}
            scales = {
                name: torch.ones((), device=query.device) if scale is None else scale
                for name, scale in given.items()
            }
        name = f"layer {layer.layer_id}"
        self._recorder.wrote(name, key, value, caches[0], caches[1], scales, group)
        drafts = self._batch.spec_info
        if getattr(drafts, "tree_topk", getattr(drafts, "topk", 1)) != 1:
            return
        window = layer.sliding_window_size
        options = AttentionOptions(
            causal=True,
            sliding_window=None if window is None or window < 0 else window + 1,
            logits_soft_cap=float(layer.logit_cap) or None,
            sinks=None if sinks is None else sinks.detach().float(),
            **scales,
        )
        heads = layer.tp_q_head_num
        self._recorder.attended(
            name,
            query.reshape(-1, heads, layer.qk_head_dim),
            output.reshape(-1, heads, layer.v_head_dim),
            caches[0],
            caches[1],
            float(layer.scaling),
            options,
            group,
        )
