"""The recorder on sparse latent attention: the plugin's own classes, with faults of the field."""

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
from support.fake_vllm import VERSIONS, fake_vllm
from support.sparse_steps import BLOCK_SIZE, TOPK, Choice, SparseSteps
from support.twins import WITHOUT_GPU

pytestmark = WITHOUT_GPU

OLDEST, NEWEST = VERSIONS[0], VERSIONS[-1]
RECORDS = {"rank": 512, "rope": 64}
CLEAN = Choice(most=TOPK)
STEPS: list[tuple[int, ...]] = [(30, 3, 1), (1, 1, 1), (3, 1, 2), (20, 2, 1)]
SAMPLED = 4 + 3 + 4 + 4
"""Tokens that four sampled steps compare: at most four per step."""


@pytest.fixture(autouse=True)
def reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGETWIN_VLLM_IMPLEMENTATION", "reference")


@pytest.fixture(params=[OLDEST, NEWEST])
def version(request: pytest.FixtureRequest) -> Iterator[str]:
    with fake_vllm(request.param, use_mla=True, use_sparse=True):
        yield request.param


def recorded_steps(
    version: str, folder: Path, action: str = "continue", **given: Any
) -> tuple[SparseSteps, Recorder]:
    """Return the steps of a recorded layer, and the recorder, which samples every step."""
    from pagetwin.integrations.vllm.plugin import choose_backend

    settings = RecorderSettings(folder, sample_every=1, action=action)
    checks = Recorder(settings, "CUSTOM")
    reader = SparseReader(WorkerSteps())
    backend = record_backend(choose_backend(), checks, reader, recorded_sparse_impl)
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
