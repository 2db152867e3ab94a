"""Rows after the last token of a step change nothing, whatever they hold.

Each step runs twice, without padding and with rows of NaN or of huge numbers after its tokens. All
that a layer keeps and returns is then bitwise equal.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from pagetwin.contract.kinds import AttentionType
from pagetwin.contract.metadata_classes import CommonAttentionMetadata
from pagetwin.contract.specs import CacheConfig
from pagetwin.engine.layer import Attention
from pagetwin.engine.selector import load_backend
from pagetwin.recorder import Recorder, RecorderSettings, record_backend
from support.twins import TWINS
from torch import Tensor

HEADS, KV_HEADS, SIZE, BLOCK = 4, 2, 32, 16
BACKENDS = ["REFERENCE", "TRITON", "XFORMERS"]
POISONS = [torch.nan, torch.inf, 6e4]

pytestmark = pytest.mark.usefixtures("installed")

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"per_layer_sliding_window": 3},
    "soft cap": {"logits_soft_cap": 2.0},
    "slopes": {"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]},
    "chunks": {"attention_chunk_size": 4},
    "sinks": {"sinks": torch.arange(4.0)},
    "bias": {"position_bias": torch.linspace(-1, 1, 4 * 9).view(4, 9)},
    "short values": {"head_size_v": 16},
}


@dataclass
class Steps:
    """A layer, its cache, and steps of three requests.

    Args:
        backend: name of the layer's backend.
        kind: kind of attention.
        device: device of the layer.
        cache_dtype: dtype of the cache.
        recorder: Optional. Checks the layer's steps. If None, nothing is recorded.
        options: further options of the layer.
        fields: further fields of each step.
    """

    backend: str
    kind: AttentionType
    device: torch.device
    cache_dtype: str
    recorder: Recorder | None
    options: dict[str, Any]
    fields: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        backend = load_backend(self.backend)
        if self.recorder is not None:
            backend = record_backend(backend, self.recorder)
        config = CacheConfig(
            block_size=BLOCK,
            cache_dtype=self.cache_dtype,
            calculate_kv_scales=self.cache_dtype != "auto",
        )
        self.layer = Attention(
            HEADS,
            SIZE,
            SIZE**-0.5,
            KV_HEADS,
            cache_config=config,
            attn_type=self.kind,
            attn_backend=backend,
            prefix="layer.0",
            **self.options,
        ).to(self.device)
        spec = self.layer.get_kv_cache_spec(BLOCK, torch.float16)
        self.builder = backend.get_builder_cls()(spec, ["layer.0"], self.device)
        if spec is not None:
            shape = backend.get_kv_cache_shape(9, BLOCK, KV_HEADS, SIZE)
            cache = torch.zeros(shape, dtype=spec.dtype, device=self.device)
            self.layer.kv_cache = cache

    def run(
        self, new: list[int], old: list[int], encoders: list[int], padding: Any
    ) -> Tensor:
        """Run a step, and return the rows of its tokens."""
        common = self.common(new, old, encoders)
        tokens, generator = sum(new), torch.Generator().manual_seed(sum(old))
        own = tokens
        if self.kind in (AttentionType.ENCODER, AttentionType.ENCODER_DECODER):
            own = sum(encoders)
        queries = own if self.kind == AttentionType.ENCODER else tokens
        value_size = self.options.get("head_size_v", SIZE)
        shapes = ((queries, HEADS * SIZE), (own, KV_HEADS * SIZE))
        shapes += ((own, KV_HEADS * value_size),)
        rows: list[Any] = []
        for shape in shapes:
            part = torch.randn(shape, generator=generator)
            if padding is not None:
                part = torch.cat([part, torch.full((3, shape[1]), padding)])
            rows.append(part.half().to(self.device))
        crosses = self.kind == AttentionType.ENCODER_DECODER
        if crosses and not own:
            rows[1:] = [None, None]
        if padding is not None:
            pad = torch.full((3,), -1, device=self.device)
            slots = torch.cat([common.slot_mapping, pad])
            common = common.replace(slot_mapping=slots)
        output: Tensor = self.layer(*rows, self.builder.build(0, common))
        assert not output[queries:].any(), "rows of padding are zero"
        return output[:queries]

    def common(
        self, new: list[int], old: list[int], encoders: list[int]
    ) -> CommonAttentionMetadata:
        """Return the step; encoders compute in the step that begins the sequences."""
        table = [[2, 1], [5, 0], [4, 7]]
        build = TWINS["reference"].build_common_attn_metadata
        common = build(new, old, table, BLOCK, self.device).replace(**self.fields)
        if self.kind in (AttentionType.DECODER, AttentionType.ENCODER_ONLY):
            return common
        starts = torch.tensor([0, *encoders]).cumsum(0).int()
        lens = torch.tensor([5, 1, 9], dtype=torch.int32)
        slots = [8 * BLOCK + n for n in range(sum(encoders))]
        return common.replace(
            encoder_seq_lens=lens.to(self.device),
            encoder_seq_lens_cpu=lens,
            encoder_query_start_loc=starts.to(self.device),
            encoder_query_start_loc_cpu=starts,
            cross_block_table_tensor=torch.full((3, 1), 8, device=self.device).int(),
            cross_slot_mapping=torch.tensor(slots, device=self.device).long(),
        )

    def kept(self) -> list[Tensor]:
        """Return what the layer keeps: its cache and its scales."""
        names = ("_q_scale", "_k_scale", "_v_scale")
        scales = [getattr(self.layer, name).cpu() for name in names]
        return [self.layer.kv_cache.cpu().view(torch.uint8), *scales]


def expect_no_difference(padding: float, *arguments: Any) -> None:
    """Run the steps of a sequence with and without padding, the first without tokens."""
    plain, padded = Steps(*arguments), Steps(*arguments)
    steps = [
        ([0, 0, 0], [0, 0, 0], [0, 0, 0]),
        ([2, 3, 5], [0, 0, 0], [5, 1, 9]),
        ([1, 1, 1], [2, 3, 5], [0, 0, 0]),
        ([1, 1, 4], [3, 4, 6], [0, 0, 0]),
    ]
    kind = arguments[1]
    if kind in (AttentionType.ENCODER, AttentionType.ENCODER_ONLY):
        steps = steps[1:2]  # whole prompts, and nothing is kept
    for step in steps:
        found = padded.run(*step, padding), plain.run(*step, None)
        assert torch.equal(*found) and bool(found[0].isfinite().all())
        for one, other in zip(padded.kept(), plain.kept(), strict=True):
            assert torch.equal(one, other)
        # a step without tokens determines no scale
        is_measured = arguments[3] != "auto" and any(step[0])
        is_cached = kind in (AttentionType.DECODER, AttentionType.ENCODER_DECODER)
        if is_measured and is_cached:
            assert not padded.layer.calculate_kv_scales
            assert padded.layer._k_scale_float != 1.0


@pytest.mark.sample(4)
@pytest.mark.parametrize("padding", POISONS)
@pytest.mark.parametrize("cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("kind", list(AttentionType))
@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_changes_no_kind_of_layer(
    backend: str,
    kind: AttentionType,
    cache_dtype: str,
    padding: float,
    device: torch.device,
) -> None:
    expect_no_difference(padding, backend, kind, device, cache_dtype, None, {})


@pytest.mark.sample(2)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_changes_no_option_of_a_layer(
    backend: str, options: str, device: torch.device
) -> None:
    arguments = (backend, AttentionType.DECODER, device, "fp8", None, OPTIONS[options])
    expect_no_difference(torch.nan, *arguments)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["causal", "mm_req_doc_ranges", "tree_mask"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_changes_no_mask_of_a_step(
    backend: str, name: str, device: torch.device
) -> None:
    values: dict[str, Any] = {
        "causal": torch.tensor([True, False, True], device=device),
        "mm_req_doc_ranges": {1: [(1, 2)], 2: [(0, 3)]},
        "tree_mask": torch.eye(5, dtype=torch.bool, device=device).expand(3, 5, 5),
    }
    fields = {name: values[name]}
    arguments = (backend, AttentionType.DECODER, device, "fp8", None, {}, fields)
    expect_no_difference(torch.nan, *arguments)


@pytest.mark.sample(4)
@pytest.mark.parametrize("cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("kind", list(AttentionType))
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_recorder_reads_no_padding(
    backend: str,
    kind: AttentionType,
    cache_dtype: str,
    device: torch.device,
    tmp_path: Path,
) -> None:
    settings = RecorderSettings(tmp_path, sample_every=1, action="stop")
    recorder = Recorder(settings)
    steps = Steps(backend, kind, device, cache_dtype, recorder, {})
    steps.run([2, 3, 5], [0, 0, 0], [5, 1, 9], torch.nan)
    if steps.layer.kv_cache.numel():
        steps.run([1, 1, 4], [2, 3, 5], [0, 0, 0], torch.nan)
    recorder.finish()
    assert recorder.is_on and not recorder.findings
    assert recorder.checked["rows"] or kind != AttentionType.DECODER
