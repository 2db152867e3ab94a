"""The attention backend for SGLang: metadata of a step, cache write, and attention."""

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.runtime_context import get_exec
from torch import Tensor

from ...contract.attention_options import AttentionOptions
from ...contract.cache_formats import TENSOR_SCALE_DTYPES
from .settings import IMPLEMENTATION_VARIABLE, load_implementation
from .steps import SglangStep, read_step


class PagetwinSglangBackend(AttentionBackend):
    """Paged attention on a twin, for the layers of one model runner.

    Args:
        model_runner: SGLang's `ModelRunner`, which `make_backend` has found to be served.

    Attributes:
        token_to_kv_pool, req_to_token_pool, max_context_len: the runner's, which SGLang reads here.
        forward_metadata: Optional. The step. If None, it has no request.
    """

    # launches depend on upper bounds, which the host knows from them
    needs_cpu_seq_lens: bool = True

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        self.run = load_implementation()
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.kv_index_translator = model_runner.kv_index_translator
        self.max_context_len = int(model_runner.model_config.context_len)
        self.page_size = int(model_runner.page_size)
        self.forward_metadata: SglangStep | None = None
        has_windows = isinstance(self.token_to_kv_pool, SWAKVPool)
        self._windows = self.token_to_kv_pool if has_windows else None
        self._chunk_size = model_runner.attention_chunk_size
        deterministic = get_exec().deterministic
        self._is_invariant = bool(deterministic.enable_deterministic_inference)
        self._options: dict[Any, AttentionOptions] = {}

    def init_forward_metadata(self, forward_batch: Any, in_graph: bool = False) -> None:
        """Read the description of a step."""
        rows, windows = self.req_to_token_pool.req_to_token, self._windows
        step = read_step(forward_batch, rows, self.page_size, windows, in_graph)
        self.forward_metadata = step

    def init_forward_metadata_out_graph(
        self, forward_batch: Any, in_capture: bool = False
    ) -> None:
        """Do nothing: a graph reads the description of its step by itself."""

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Read it in operations that are captured, so each replay reads it again."""
        self.init_forward_metadata(forward_batch, in_graph=True)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Raise ValueError if the twin may read tensors on the host; a graph has its metadata."""
        if self.run.name != "optimized":
            raise ValueError(
                f"{IMPLEMENTATION_VARIABLE} = {self.run.name}: expected optimized, or"
                " --disable-cuda-graph"
            )

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return the keys of a row of padding: one, in the first slot of SGLang's page 0."""
        return 1

    def forward_decode(self, *args: Any, **kwargs: Any) -> Tensor:
        """Attend in a step of decodes, with the arguments and the result of `forward_extend`."""
        return self.forward_extend(*args, **kwargs)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Write the step's keys and values, and attend.

        Args:
            q: [tokens, num_heads * head_dim] queries.
            k, v: Optional. [tokens, num_kv_heads, head_dim]. If None, the cache has them.
            layer, forward_batch: SGLang's layer and its description of the step.
            save_kv_cache: whether `k` and `v` are written here.
            sinks: Optional. [num_heads] one score per head that has no value.
            kwargs: options of other backends; NotImplementedError if one is given.

        Returns:
            [tokens, num_heads * v_head_dim], in the dtype of `q`.
        """
        for name, given in kwargs.items():
            if given is not None and given is not False:
                raise NotImplementedError(
                    f"{name} is given: expected None, which --attention-backend pagetwin needs"
                )
        step, pool = self.forward_metadata, self.token_to_kv_pool
        assert step is not None, "init_forward_metadata comes first"
        if save_kv_cache and k is not None:
            slots = KVWriteLoc(forward_batch.out_cache_loc, step.window_slots)
            pool.set_kv_buffer(layer, slots, k, v, layer.k_scale, layer.v_scale)
        windows, table = self._windows, step.block_table
        if windows is not None and windows.layers_mapping[layer.layer_id][1]:
            assert step.window_table is not None
            table = step.window_table
        keys, values = map(self._as_pages, pool.get_kv_buffer(layer.layer_id))
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = q.new_empty(len(query), layer.tp_q_head_num, layer.v_head_dim)
        self.run.paged_attention(
            query, keys, values, table, step.query_start_loc, step.seq_lens,
            step.max_query_len, step.max_seq_len, float(layer.scaling), out,
            options=self._options_of(layer, keys.dtype, sinks),
        )  # fmt: skip
        return out.view(len(query), -1)

    def _as_pages(self, buffer: Tensor) -> Tensor:
        """Return a pool's buffer as [pages, page_size, heads, size], without a copy."""
        if buffer.dim() == 4:  # [pages, heads, page_size, size]: SGLANG_USE_HND_KVCACHE
            return buffer.transpose(1, 2)
        return buffer.view(-1, self.page_size, *buffer.shape[1:])

    def _options_of(
        self, layer: Any, cache_dtype: torch.dtype, sinks: Tensor | None
    ) -> AttentionOptions:
        """Return the options of a layer. Graphs read its scales, and a copy of its sinks."""
        k_scale = v_scale = None
        if cache_dtype in TENSOR_SCALE_DTYPES:
            k_scale = 1.0 if layer.k_scale is None else layer.k_scale
            v_scale = 1.0 if layer.v_scale is None else layer.v_scale
        # a layer called with sinks and without has options of both kinds
        kind = (layer, sinks is None)
        found = self._options.get(kind)
        if found and found.k_scale is k_scale and found.v_scale is v_scale:
            if sinks is not None and found.sinks is not None:
                found.sinks.copy_(sinks)
            return found
        window = layer.sliding_window_size
        self._options[kind] = options = AttentionOptions(
            causal=layer.attn_type is not AttentionType.ENCODER_ONLY,
            sliding_window=None if window is None or window < 0 else window + 1,
            attention_chunk_size=self._chunk_size if layer.use_irope else None,
            logits_soft_cap=float(layer.logit_cap) or None,
            sinks=None if sinks is None else sinks.detach().clone().float(),
            k_scale=k_scale,
            v_scale=v_scale,
            batch_invariant=self._is_invariant,
        )
        return options
