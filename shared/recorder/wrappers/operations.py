"""RecordedOperations: an implementation whose calls the recorder checks."""

from typing import Any

from torch import Tensor

from ...contract.attention_options import DEFAULT_OPTIONS
from ...contract.cache_formats import find_format
from ...contract.metadata_classes import CommonAttentionMetadata
from ...contract.operations import Implementation
from ..recorder import Recorder
from ..step import step_tensors


class RecordedOperations:
    """The operations of an implementation; three of them tell the recorder what they did.

    `build_common_attn_metadata` begins a step. `reshape_and_cache` and `paged_attention` are
    checked in sampled steps. A layer is identified by the address of its key cache, and layers are
    numbered in the order of their first calls. All other attributes are those of the
    implementation.

    Args:
        run: the implementation.
        recorder: the recorder.
        window: Optional. The window of all layers. Blocks before it may then be unallocated. If
            None, all blocks of a row are checked.
    """

    def __init__(
        self, run: Implementation, recorder: Recorder, window: int | None = None
    ) -> None:
        self._run = run
        self.recorder = recorder
        self._window = window
        self._layers: dict[int, str] = {}
        # bound once, since every layer calls them in every step
        self._write, self._attend = run.reshape_and_cache, run.paged_attention
        if not recorder.implementation:
            recorder.implementation = run.name
        recorder.attach()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run, name)

    def build_common_attn_metadata(
        self, *args: Any, **kwargs: Any
    ) -> CommonAttentionMetadata:
        """Return the metadata of a step, and begin the step."""
        built: CommonAttentionMetadata = self._run.build_common_attn_metadata(
            *args, **kwargs
        )
        block_size = kwargs["block_size"] if "block_size" in kwargs else args[3]
        if built.num_actual_tokens:
            self.recorder.begin_step(step_tensors(built, block_size, self._window))
        return built

    def reshape_and_cache(
        self,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
        k_scale: Tensor | float | None = None,
        v_scale: Tensor | float | None = None,
        kv_cache_dtype: str | None = None,
        k_global_scale: float | None = None,
        v_global_scale: float | None = None,
    ) -> None:
        """Write each new token's key and value to its slot."""
        every = {
            "k_scale": k_scale,
            "v_scale": v_scale,
            "k_global_scale": k_global_scale,
            "v_global_scale": v_global_scale,
        }
        scales: dict[str, Any] = {k: v for k, v in every.items() if v is not None}
        named: Any = (
            {} if kv_cache_dtype is None else {"kv_cache_dtype": kv_cache_dtype}
        )
        self._write(key, value, key_cache, value_cache, slot_mapping, **scales, **named)
        if not self.recorder.wants_layers:
            return
        form = find_format(key_cache.dtype, k_scale, kv_cache_dtype)
        self.recorder.wrote(
            self._name(key_cache),
            key,
            value,
            key_cache,
            value_cache,
            scales,
            format_name=form.name if form.is_measured else None,
        )

    def paged_attention(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        *args: Any,
        **kw: Any,
    ) -> Tensor:
        """Return attention of each new token over its sequence in the paged cache."""
        out: Tensor = self._attend(query, key_cache, value_cache, *args, **kw)
        if not self.recorder.wants_layers:
            return out
        self.recorder.attended(
            self._name(key_cache),
            query,
            out,
            key_cache,
            value_cache,
            kw["scale"] if "scale" in kw else (args[5] if len(args) > 5 else None),
            kw.get("options", DEFAULT_OPTIONS),
        )
        return out

    def _name(self, key_cache: Tensor) -> str:
        address = key_cache.data_ptr()
        if address not in self._layers:
            self._layers[address] = f"layer {len(self._layers)}"
        return self._layers[address]
