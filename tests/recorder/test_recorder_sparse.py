"""The recorder on sparse latent attention: the plugin's own classes, with faults of the field."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pagetwin.recorder import Recorder, RecorderSettings, record_backend
from pagetwin.recorder.findings import CorruptionFound
from pagetwin.recorder.reproduce import reproduce_case
from pagetwin.recorder.wrappers import vllm as recorder_vllm
from pagetwin.recorder.wrappers.vllm_latent import why_left_alone
from pagetwin.recorder.wrappers.vllm_schedule import WorkerSteps
from pagetwin.recorder.wrappers.vllm_sparse import SparseReader, recorded_sparse_impl
from simulated_graph import GraphOperations, SimulatedGraph
from support.fake_vllm import VERSIONS, fake_vllm
from support.sparse_steps import BLOCK_SIZE, TOPK, Choice, SparseSteps
from support.twins import WITHOUT_GPU

pytestmark = WITHOUT_GPU

OLDEST, NEWEST = VERSIONS[0], VERSIONS[-1]
RECORDS = {"rank": 512, "rope": 64}
CLEAN = Choice(most=TOPK)
STEPS: list[tuple[int, ...]] = [(30, 3, 1), (1, 1, 1), (3, 1, 2), (20, 2, 1)]
ROWS, SAMPLED = 4, 4 + 3 + 4 + 4
"""Tokens that four sampled steps compare: at most four per step."""


@pytest.fixture(autouse=True)
def reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGETWIN_VLLM_IMPLEMENTATION", "reference")


@pytest.fixture(params=[OLDEST, NEWEST])
def version(request: pytest.FixtureRequest) -> Iterator[str]:
    with fake_vllm(request.param, use_mla=True, use_sparse=True):
        yield request.param


def recorded_steps(
    version: str,
    folder: Path,
    action: str = "continue",
    backend: Any = None,
    name: str = "CUSTOM",
    reads_graphs: bool = False,
    **given: Any,
) -> tuple[SparseSteps, Recorder]:
    """Return the steps of a recorded layer, and the recorder, which samples every step."""
    from pagetwin.integrations.vllm.plugin import choose_backend

    settings = RecorderSettings(folder, sample_every=1, action=action, rows=ROWS)
    checks = Recorder(settings, name, fp8_steps=int(name != "CUSTOM"))
    reader = SparseReader(WorkerSteps(), reads_graphs=reads_graphs)
    backend = backend or choose_backend()
    backend = record_backend(backend, checks, reader, recorded_sparse_impl)
    return SparseSteps(version, backend=backend, **given), checks


@pytest.mark.parametrize(
    ("kv_cache_dtype", "sizes", "writes"),
    [("auto", {}, SAMPLED), ("fp8", {}, SAMPLED), ("fp8_ds_mla", RECORDS, 0)],
)
def test_clean_steps_raise_nothing_and_selections_and_rows_are_compared(
    version: str, tmp_path: Path, kv_cache_dtype: str, sizes: Any, writes: int
) -> None:
    steps, checks = recorded_steps(
        version, tmp_path, kv_cache_dtype=kv_cache_dtype, **sizes
    )
    for lens in STEPS:
        assert steps.step(lens, CLEAN) <= 1
    checks.finish()
    assert checks.is_on and checks.findings == []
    assert checks.checked["selections"] == checks.checked["rows"] == SAMPLED
    assert checks.checked["writes"] == writes
    assert checks.checked["blocks"] > 0
    assert steps.impl.recorded_slots is None


def test_prefix_hits_and_padding_raise_nothing(version: str, tmp_path: Path) -> None:
    steps, checks = recorded_steps(version, tmp_path)
    steps.step((40,), CLEAN)
    steps.hit_prefix(0, 1, 2)
    steps.step((1, 9), CLEAN, padding=3, spare_reqs=1)
    checks.finish()
    assert checks.is_on and checks.findings == []
    assert checks.checked["selections"] == 4 + 4


def spoil(steps: SparseSteps, change: Any) -> None:
    """Change what the indexer writes, from now on."""
    select = steps.select

    def spoiled(query_lens: Any, choice: Choice) -> Any:
        rows = select(query_lens, choice)
        steps.buffer[: len(rows)] = change(steps.buffer[: len(rows)].clone())
        return rows

    steps.select = spoiled  # type: ignore[method-assign]


def twice(rows: Any) -> Any:
    rows[:, 1] = rows[:, 0]
    return rows


def past_the_end(rows: Any) -> Any:
    rows[:, 0] = 3 * BLOCK_SIZE
    return rows


def after_the_token(rows: Any) -> Any:
    """The last token of a prompt is selected by those before it."""
    rows[:, 0] = 21
    return rows


def one_after_the_token(rows: Any) -> Any:
    # row i is of position i
    for position in range(len(rows) - 1):
        rows[position, 0] = position + 1
    return rows


def too_few(rows: Any) -> Any:
    rows[:, 2] = -1
    return rows


SELECTIONS = [
    (twice, r"position \d+ selects position \d+ 2 times: expected once"),
    (
        past_the_end,
        r"position \d+ selects position 48, of a sequence of 22 tokens: expected at most",
    ),
    (
        after_the_token,
        r"position \d+ selects position 21, after it: expected at most \d+",
    ),
    (
        one_after_the_token,
        r"position \d+ selects position \d+, after it: expected at most \d+",
    ),
    (too_few, r"position \d+ selects \d+ of \d+ positions: expected \d+"),
]


@pytest.mark.parametrize(("change", "sentence"), SELECTIONS)
def test_a_selection_of_other_keys_is_found(
    version: str, tmp_path: Path, change: Any, sentence: str
) -> None:
    steps, _ = recorded_steps(version, tmp_path, "stop")
    spoil(steps, change)
    with pytest.raises(CorruptionFound, match=rf"selection: layer: {sentence}"):
        steps.step((22,), CLEAN)
    [path] = tmp_path.glob("*.pt")
    again = reproduce_case(path)
    assert again.still is not None and again.still.law == "selection"
    assert "pagetwin reproduce" not in again.still.found


def test_page_ids_that_are_taken_for_slots_are_found(
    version: str, tmp_path: Path
) -> None:
    """As in a kernel whose table holds the first slot of each page: it reads other requests."""
    steps, _ = recorded_steps(version, tmp_path, "stop")
    steps.step((30, 30, 30), CLEAN)
    plain = steps.impl.run.convert_req_index_to_global_index

    def confused(req_id: Any, table: Any, *rest: Any) -> Any:
        slots, count = plain(req_id, table // BLOCK_SIZE, *rest)
        return slots, count

    steps.impl.run = replaced(
        steps.impl.run, convert_req_index_to_global_index=confused
    )
    expected = (
        r"reads slot \d+, of no block of its request \(block [01]\), for position"
    )
    with pytest.raises(CorruptionFound, match=expected):
        steps.step((1, 1, 1), CLEAN)
    [path] = tmp_path.glob("*.pt")
    again = reproduce_case(path)
    assert again.still is not None and "expected slot" in again.still.found


def test_slots_that_a_kernel_reads_otherwise_are_found_by_their_rows(
    version: str, tmp_path: Path
) -> None:
    """The slots are right, and the attention reads the next ones."""
    steps, _ = recorded_steps(version, tmp_path, "stop")
    steps.step((30, 30, 30), CLEAN)
    plain = steps.impl.run.sparse_attention
    steps.impl.run = replaced(
        steps.impl.run,
        sparse_attention=lambda query, key, value, slots, *rest, **options: plain(
            query,
            key,
            value,
            torch.where(slots >= 0, slots ^ 1, slots),
            *rest,
            **options,
        ),
    )
    with pytest.raises(CorruptionFound, match="attention: layer: attention of posi"):
        steps.step((1, 1, 1), CLEAN)
    [path] = tmp_path.glob("*.pt")
    again = reproduce_case(path)
    assert again.still is not None and again.still.law == "attention"
    assert again.candidate_agrees


def replaced(run: Any, **operations: Any) -> Any:
    """Return an implementation with another operation."""
    others = {name: getattr(run, name) for name in run.operations}
    return SimpleNamespace(
        name=run.name, operations=run.operations, **others | operations
    )


def test_an_indexer_cache_that_is_moved_by_token_is_found_if_scores_are_nan(
    version: str, tmp_path: Path
) -> None:
    """A page has the codes of its tokens, and then their scales.

    Moved as rows of 132 bytes, a part of a page takes codes of other tokens along and leaves the
    scales. Where these are NaN, the tokens have no score and are not selected.
    """
    steps, _ = recorded_steps(version, tmp_path, "stop")
    run, random = steps.impl.run, torch.Generator().manual_seed(1)
    keys = torch.randn(10, 128, generator=random)
    pages = torch.full((3, BLOCK_SIZE, 132), 0xFF, dtype=torch.uint8)
    run.indexer_k_quant_and_cache(keys, pages, torch.arange(10))
    by_page, by_token = pages.clone(), pages.clone()
    by_page[2] = pages[0]
    by_token[2, :10] = pages[0, :10]
    query = torch.randn(1, 4, 128, generator=random)
    weights = torch.rand(1, 4, generator=random)

    def positions(cache: torch.Tensor) -> torch.Tensor:
        scores = run.index_scores(
            query, weights, cache, torch.tensor([[2]], dtype=torch.int32),
            torch.tensor([0, 1], dtype=torch.int32),
            torch.tensor([10], dtype=torch.int32), 10,
        )  # fmt: skip
        found: torch.Tensor = run.select_keys(scores, TOPK)
        return found

    steps.grow((9,))
    first = steps.common((9,), 0, 0)
    steps.select((9,), CLEAN)
    steps.builder.build(0, first)
    for cache, is_right in ((by_page, True), (by_token, False)):
        selected = positions(cache)
        own = sorted(selected[selected >= 0].tolist())
        assert (own == list(range(10))) == is_right
    spoil(steps, lambda rows: positions(by_token))
    with pytest.raises(CorruptionFound, match=r"selects \d of 10 positions: expected"):
        steps.step((1,), CLEAN)


class SparseGraph(GraphOperations):
    """An implementation whose calls of a sparse layer are one call each in a graph."""

    def concat_and_cache_mla(self, *args: Any, **kwargs: Any) -> None:
        """Write each new token's latent and rope key to its slot."""
        self._graph.call(self._run.concat_and_cache_mla, args, kwargs)

    def convert_req_index_to_global_index(self, *args: Any) -> tuple[Any, None]:
        """Return the slots of the keys that each token selected."""
        convert = self._run.convert_req_index_to_global_index
        return self._graph.call(lambda *given: convert(*given)[0], args, {}), None

    def sparse_attention(self, *args: Any, **kwargs: Any) -> Any:
        """Return attention of each token over the cache slots that its row names."""
        return self._graph.call(self._run.sparse_attention, args, kwargs)


def test_a_graph_copies_what_its_tokens_select(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decode is captured and replayed. From the fourth replay on its indexer is wrong."""
    graph = SimulatedGraph()
    capturing = property(lambda self: graph.is_capturing)
    monkeypatch.setattr(Recorder, "is_capturing", capturing)
    steps, checks = recorded_steps(version, tmp_path, reads_graphs=True)
    steps.impl.run = SparseGraph(steps.impl.run, graph)
    steps.step((18, 5), CLEAN)
    new = steps.grow((1, 1))
    common = steps.common((1, 1), 0, 0)
    steps.select((1, 1), CLEAN)
    module: Any = sys.modules["vllm.v1.attention.backend"]
    # as vLLM's own; the stand-in's methods raise
    module.AttentionMetadataBuilder.build_for_cudagraph_capture = lambda self, common: (
        self.build(0, common)
    )
    metadata = steps.builder.build_for_cudagraph_capture(common)
    query = steps._rows(2, 4, 48)
    with graph:
        steps.write(new, common)
        steps.attend(query, metadata)
    compared = checks.checked["selections"]
    for number in range(6):
        steps.select((1, 1), CLEAN)
        if number >= 3:
            steps.buffer[:2, 0] = 40
        steps.builder.build(0, common)
        query.copy_(steps._rows(2, 4, 48))
        graph.replay()
        checks.finish()
        assert checks.checked["selections"] - compared == 2 * (number + 1)
        laws = [finding.law for finding in checks.findings]
        assert laws == ["selection"] * (number >= 3)
        new.copy_(steps.grow((1, 1)))
        later = steps.common((1, 1), 0, 0)
        common.seq_lens.copy_(later.seq_lens)
        common.slot_mapping.copy_(later.slot_mapping)
    assert checks.is_on


def as_of_vllm(own: Any) -> Any:
    """Return a layer that has the methods of vLLM's own alone."""

    class Layer:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.own = own(*args, **kwargs)
            self.kv_cache_dtype, self.scale = self.own.kv_cache_dtype, self.own.scale

        @property
        def topk_indices_buffer(self) -> Any:
            return self.own.topk_indices_buffer

        def do_kv_cache_update(
            self, kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale
        ) -> None:
            given = (kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale)
            self.own.do_kv_cache_update(*given)

        def forward_mqa(self, q, kv_c_and_k_pe_cache, attn_metadata, layer):
            return self.own.forward_mqa(q, kv_c_and_k_pe_cache, attn_metadata, layer)

    return Layer


@pytest.mark.parametrize(
    ("kv_cache_dtype", "sizes", "rows"),
    [("auto", {}, SAMPLED), ("fp8", {}, 0), ("fp8_ds_mla", RECORDS, 0)],
)
def test_layers_of_vllm_are_compared_where_nothing_is_rounded(
    version: str, tmp_path: Path, kv_cache_dtype: str, sizes: Any, rows: int
) -> None:
    from pagetwin.integrations.vllm.plugin import choose_backend

    plain = choose_backend()
    layer = as_of_vllm(plain.get_impl_cls())
    backend = type("Theirs", (plain,), {"get_impl_cls": staticmethod(lambda: layer)})
    given = {"backend": backend, "name": "FLASHMLA_SPARSE", **sizes}
    steps, checks = recorded_steps(
        version, tmp_path, kv_cache_dtype=kv_cache_dtype, **given
    )
    for lens in STEPS:
        steps.step(lens, CLEAN)
    checks.finish()
    assert checks.is_on and checks.findings == []
    assert checks.checked["selections"] == checks.checked["rows"] == rows
    spoil(steps, past_the_end)
    steps.step((1, 1, 1), CLEAN)
    assert [finding.law for finding in checks.findings] == ["selection"] * bool(rows)


def test_the_registry_gives_the_reader_of_sparse_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGETWIN_RECORD", str(tmp_path))
    monkeypatch.setattr(
        recorder_vllm, "STEPS", SimpleNamespace(recorders=[], watch=int)
    )
    for sparse in (True, False):
        with fake_vllm(NEWEST, use_mla=True, use_sparse=sparse):
            from pagetwin.integrations.vllm.plugin import choose_backend

            backend = choose_backend()
            # the stand-in's methods raise
            monkeypatch.setattr(backend, "is_mla", classmethod(lambda cls: True))
            assert why_left_alone(backend) == ""
            recorded = recorder_vllm._recorded("CUSTOM", backend)
            impl = recorded.get_impl_cls()
            assert (impl.__name__ == "RecordedSparseImpl") == sparse
