"""A step on several ranks, each a process, which are joined by a process group.

The step is `DecodeContextParallel` of the implementation. Rank r of n stores the positions p with
p % n == r. Blocks have a multiple of n slots, so its cache is every n-th slot of each block, with
the same block ids. All ranks map one cache in shared memory, and each takes its view of it. So
poison, and the comparison of every slot, are those of a step on one rank.

On the CPU the group is gloo's. On GPUs it is NCCL's, and rank r has GPU r with a copy of its share.
The share is read from the cache before each write and stored after it, through shared memory.
"""

import tempfile
import warnings
import weakref
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, multiprocessing
from torch import distributed as dist

from ...contract.operations import Implementation, load_implementation
from ...contract.parallel import KeySplits
from ...engine.rank_group import RankGroup
from ...recorder import Recorder
from .batch import ReplayBatch
from .model import LayerInputs
from .twins import ReplayTwin, StepMetadata

TIMEOUT_S = 60.0
"""Seconds that a rank waits for the others in a collective, and that ranks may answer apart."""


class RanksTwin(ReplayTwin):
    """Runs the parallel step of an implementation on several processes.

    Args:
        name: of the twin.
        implementation: its operations in this process, which build the metadata that are compared.
        ranks: number of processes, a divisor of the query heads and of the slots per block.
        splits: fixed splits of every sequence's keys. 0: none.
        query_heads: query heads of all ranks together.
        head_size: elements per head.
        dtype: of the queries.
        max_num_tokens: new tokens of the largest step.
        device: of the cache, "cpu" or "cuda". On "cuda" each rank has a GPU.
        is_staged: Optional. Whether ranks have copies of their shares. If None, on GPUs.
    """

    def __init__(
        self,
        name: str,
        implementation: Implementation,
        ranks: int,
        splits: int,
        query_heads: int,
        head_size: int,
        dtype: torch.dtype,
        max_num_tokens: int,
        device: torch.device | str = "cpu",
        is_staged: bool | None = None,
    ) -> None:
        super().__init__(name, implementation, device)
        on_gpus = self.device.type == "cuda"
        self._is_staged = on_gpus if is_staged is None else is_staged
        if splits:
            self.bits_of = (implementation.name, splits)
        self._ranks, self._heads = ranks, query_heads // ranks
        self._caches: list[tuple[Tensor, Tensor]] = []
        arguments: dict[str, Any] = {
            "num_query_heads": self._heads,
            "head_size": head_size,
            "max_num_tokens": max_num_tokens,
            "splits": KeySplits(splits) if splits else None,
            "dtype": dtype,
        }
        context = multiprocessing.get_context("forkserver")
        # a process that has initialized CUDA cannot be forked
        preloaded = [] if on_gpus else [module_of(implementation.name)]
        context.set_forkserver_preload(["torch", *preloaded])
        # ranks find each other through a file
        folder = tempfile.TemporaryDirectory(prefix="pagetwin-ranks-")
        self._pipes: list[Any] = []
        processes = []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            store = Path(folder.name) / "store"
            where = f"cuda:{rank}" if on_gpus else "cpu"
            given = (theirs, str(store), rank, ranks, implementation.name,
                     arguments | {"device": where}, self._is_staged)  # fmt: skip
            process = context.Process(target=_serve, args=given, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            processes.append(process)
        weakref.finalize(self, _end, processes, folder)

    def record(self, recorder: Recorder) -> None:
        """Raise, because the steps run in other processes."""
        raise ValueError(
            f"twin = {self.name!r}: the recorder checks calls of its own process, so it expects"
            " one rank; unset PAGETWIN_RECORD, or replay without --ranks"
        )

    def metadata(self, batch: ReplayBatch) -> StepMetadata:
        """Return the metadata of a batch; each rank prepares its share at the first write."""
        step = super().metadata(batch)
        self._call("prepare", [(batch,)] * self._ranks)
        return step

    def write(self, inputs: LayerInputs, cache: Tensor, step: StepMetadata) -> None:
        """Write the new keys and values; `cache` is modified in place."""
        number = self._number(cache)
        shared = self._caches[number][1]
        if self._is_staged:
            shared.copy_(cache)
        given = (number, inputs.key.cpu(), inputs.value.cpu())
        self._call("write", [given] * self._ranks)
        if self._is_staged:
            cache.copy_(shared)

    def attend(self, inputs: LayerInputs, cache: Tensor, step: StepMetadata) -> Tensor:
        """Return the step's attention, the heads of all ranks."""
        number = self._number(cache)
        heads = torch.split(inputs.query.cpu(), self._heads, dim=1)
        found = self._call("attend", [(number, share.contiguous()) for share in heads])
        return torch.cat(found, dim=1).to(self.device)

    def _number(self, cache: Tensor) -> int:
        """Return the number of a cache, which the ranks map when it is used first."""
        for number, (mapped, _) in enumerate(self._caches):
            if mapped is cache:
                return number
        # sending a tensor moves it to shared memory
        shared = torch.empty_like(cache, device="cpu") if self._is_staged else cache
        self._caches.append((cache, shared))
        self._call("add_cache", [(shared,)] * self._ranks)
        return len(self._caches) - 1

    def _call(self, name: str, given: list[tuple[Any, ...]]) -> list[Any]:
        """Return what a method of every rank returns; the first error of a rank is raised."""
        for pipe, arguments in zip(self._pipes, given, strict=True):
            pipe.send((name, arguments))
        found: dict[int, Any] = {}
        while len(found) < self._ranks:
            waiting: dict[Any, int] = {
                pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in found
            }
            answered = connection.wait(list(waiting), TIMEOUT_S if found else None)
            if not answered:
                late = ", ".join(map(str, waiting.values()))
                raise RuntimeError(
                    f"rank {late} of {self._ranks}: no answer {TIMEOUT_S:g} s after another rank's"
                )
            for ready in answered:
                rank = waiting[ready]
                try:
                    found[rank] = self._pipes[rank].recv()
                except (EOFError, ConnectionResetError):
                    found[rank] = RuntimeError(
                        f"rank {rank} of {self._ranks}: its process has ended"
                    )
                if isinstance(found[rank], Exception):
                    raise found[rank]
        return [found[rank] for rank in range(self._ranks)]


def module_of(name: str) -> str:
    """Return the module of an implementation."""
    return f"pagetwin.{name}" if name in ("reference", "optimized") else name


class _Rank:
    """One rank, in a process of its own."""

    def __init__(
        self, ranks: RankGroup, name: str, arguments: dict[str, Any], is_staged: bool
    ) -> None:
        self.run: Any = load_implementation(name)
        self.ranks, self.device, self.is_staged = ranks, arguments["device"], is_staged
        self.step = self.run.DecodeContextParallel(ranks, **arguments)
        self.shared: list[tuple[Tensor, Tensor]] = []
        self.caches: list[tuple[Tensor, Tensor]] = []
        self.latest: ReplayBatch | None = None
        self.batch: Any = None

    def add_cache(self, cache: Tensor) -> None:
        """Keep this rank's slots of a cache, or a copy of them on its device."""
        rank, ranks = self.ranks.rank, self.ranks.world_size
        keys, values = self.run.split_kv_cache(cache)
        self.shared.append((keys[:, rank::ranks], values[:, rank::ranks]))
        own = self.shared[-1]
        if self.is_staged:
            own = (own[0].to(self.device, copy=True), own[1].to(self.device, copy=True))
        self.caches.append(own)

    def prepare(self, batch: ReplayBatch) -> None:
        """Receive the batch of the next step."""
        self.latest, self.batch = batch, None

    def write(self, cache: int, key: Tensor, value: Tensor) -> None:
        """Write the new tokens that this rank stores."""
        own, shared = self.caches[cache], self.shared[cache]
        if self.latest is not None:
            self.batch = self._prepare(self.latest, own[0])
            self.latest = None
        if self.is_staged:
            for own_cache, source in zip(own, shared, strict=True):
                own_cache.copy_(source)
        key, value = key.to(self.device), value.to(self.device)
        self.step.write(key, value, *own, self.batch)
        if self.is_staged:
            for own_cache, target in zip(own, shared, strict=True):
                target.copy_(own_cache)

    def attend(self, cache: int, query: Tensor) -> Tensor:
        """Return attention of this rank's heads."""
        query = query.to(self.device)
        out: Tensor = self.step.attend(query, *self.caches[cache], self.batch)
        self.ranks.wait()
        return out.cpu()

    def _prepare(self, batch: ReplayBatch, key_cache: Tensor) -> Any:
        common = self.run.build_common_attn_metadata(
            query_lens=batch.query_lens,
            num_computed_tokens=batch.num_computed_tokens,
            block_rows=batch.block_rows,
            block_size=batch.block_size,
            device=self.device,
        )
        return self.step.prepare(
            key_cache,
            common.block_table_tensor,
            common.query_start_loc,
            common.seq_lens,
            num_tokens=batch.num_tokens,
            max_seq_len=common.max_seq_len,
        )


def _serve(
    pipe: Any,
    store: str,
    rank: int,
    ranks: int,
    name: str,
    arguments: dict[str, Any],
    is_staged: bool,
) -> None:
    """Call methods of this process's rank until the pipe is closed; an error is an answer too."""
    torch.set_num_threads(1)
    # a rank without a key of a sequence computes with -inf
    warnings.filterwarnings("ignore", module="triton.runtime.interpreter")
    stores: Any = dist
    file = stores.FileStore(store, ranks)
    device = torch.device(arguments["device"])
    given: dict[str, Any] = {"backend": "gloo"}
    if device.type == "cuda":
        torch.cuda.set_device(device)
        given = {"backend": "cpu:gloo,cuda:nccl", "device_id": device}
    dist.init_process_group(store=file, rank=rank, world_size=ranks, **given)
    reports = stores.PrefixStore("reports", file)
    group = dist.group.WORLD if ranks > 1 else None
    this: _Rank | None = None
    while True:
        try:
            method, given = pipe.recv()
        except EOFError:
            return
        try:
            if this is None:
                members = RankGroup(group, TIMEOUT_S, reports, device)
                this = _Rank(members, name, arguments, is_staged)
            answer = getattr(this, method)(*given)
        except Exception as error:
            # "no result" is told apart from a wrong one, and any error can be sent as these two
            kind = (
                NotImplementedError
                if isinstance(error, NotImplementedError)
                else RuntimeError
            )
            answer = kind(f"rank {rank} of {ranks}: {type(error).__name__}: {error}")
        pipe.send(answer)


def _end(processes: list[Any], folder: "tempfile.TemporaryDirectory[str]") -> None:
    """End the processes, and remove the folder of their store."""
    for process in processes:
        process.kill()
    for process in processes:
        process.join()
    folder.cleanup()
