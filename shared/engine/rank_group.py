"""RankGroup: the collectives of a parallel step, with a time limit and errors that name ranks.

A collective ends on all ranks or on none. If a rank has ended, or does not answer within the time
limit, every other rank raises a RankError with its own rank, the step, and the ranks that did not
report. No partial result is returned. After an error the group stays unusable: its ranks may be in
different steps.

Gloo exchanges tensors in host memory, so tensors on a GPU are copied there and back. NCCL exchanges
them on the device, and it can be captured in a CUDA graph. By default the host waits there too,
until the collective has ended or the time limit is over. With `waits=False` it continues at once,
apart from the first collective of each kind, after which kernels are loaded. Then the caller must
not wait for the device without a limit: `wait`, and `rank_waits.py`.
"""

import json
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from .rank_error import RankError as RankError
from .rank_error import find_missing
from .rank_waits import come_true, note_group, wait_for_ranks

DESCRIPTION_BYTES = 2048
"""Bytes of the description that ranks exchange to compare a step."""
GRACE_S = 2.0
"""Seconds in which the remaining ranks report after an error, so that a missing one is named."""

# torch 2.13 renamed these two
_ALL_GATHER: Any = getattr(
    dist, "all_gather_single", getattr(dist, "all_gather_into_tensor", None)
)
_REDUCE_SCATTER: Any = getattr(
    dist, "reduce_scatter_single", getattr(dist, "reduce_scatter_tensor", None)
)


class RankGroup:
    """The ranks that compute one step together.

    Args:
        group: Optional. The process group. If None, there is one rank and nothing is exchanged.
            One of NCCL is created with `device_id`: otherwise its first collective connects the
            ranks, for which the host waits without a limit.
        timeout: Seconds after which a collective that has not ended raises, above 0.
        store: Optional. A `Store` of torch.distributed that all ranks reach. With it an error names
            the ranks that did not report.
        device: Device of the exchanged tensors.

    Raises:
        ValueError: The time limit is not positive.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        timeout: float = 60.0,
        store: Any = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if timeout <= 0:
            raise ValueError(
                f"timeout = {timeout}: expected a number of seconds above 0"
            )
        self.group = group
        self.timeout = timeout
        self.store = store
        self.device = torch.device(device)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world_size = 1 if group is None else dist.get_world_size(group)
        self.backend = "none" if group is None else str(dist.get_backend(group))
        self.step = 0
        self._error: RankError | None = None
        self._latest = ""
        self._kinds: set[tuple[str, torch.dtype, int]] = set()
        self._issued: Any = None
        self._works: list[Any] = []

    @property
    def is_on_device(self) -> bool:
        """Whether collectives run on a GPU, and the host may continue before they have ended."""
        is_exchanged = self.world_size > 1 and self.backend != "gloo"
        return is_exchanged and self.device.type == "cuda"

    def begin_step(self) -> None:
        """Count a step; errors name its number."""
        self.step += 1
        if self.is_on_device:
            note_group(self)

    def all_gather(
        self, tensor: Tensor, out: Tensor | None = None, waits: bool = True
    ) -> Tensor:
        """Return the tensors of all ranks.

        Args:
            tensor: [...], contiguous, of the same shape and dtype on all ranks.
            out: Optional. [ranks, ...], contiguous, modified in place.
            waits: Whether the host waits until the collective has ended. It never does during the
                capture of a CUDA graph, and always with gloo, and after the first collective of a
                dtype and size (to a power of two).

        Returns:
            [ranks, ...]; of a single rank, a view of `tensor`.

        Raises:
            RankError: A rank has ended, or the time limit is over.
        """
        if self.world_size == 1:
            return tensor[None]
        if out is None:
            out = tensor.new_empty(self.world_size, *tensor.shape)
        return self._collect("all-gather", _ALL_GATHER, out, tensor, waits)

    def all_to_all(
        self, tensor: Tensor, out: Tensor | None = None, waits: bool = True
    ) -> Tensor:
        """Send entry r to rank r, and return the entries that all ranks sent to this one.

        Args:
            tensor: [ranks, ...], contiguous, of the same shape and dtype on all ranks.
            out: Optional. Like `tensor`, modified in place.
            waits: As in `all_gather`.

        Returns:
            [ranks, ...]; of a single rank, `tensor` itself.

        Raises:
            RankError: A rank has ended, or the time limit is over.
        """
        if self.world_size == 1:
            return tensor
        out = torch.empty_like(tensor) if out is None else out
        return self._collect("all-to-all", dist.all_to_all_single, out, tensor, waits)

    def reduce_scatter(
        self, tensor: Tensor, out: Tensor | None = None, waits: bool = True
    ) -> Tensor:
        """Return the sum over all ranks of this rank's entry.

        The library chooses the order of the additions.

        Args:
            tensor: [ranks, ...], contiguous, of the same shape and dtype on all ranks.
            out: Optional. [...], contiguous, modified in place.
            waits: As in `all_gather`.

        Returns:
            [...]; of a single rank, a view of `tensor`.

        Raises:
            RankError: A rank has ended, or the time limit is over.
        """
        if self.world_size == 1:
            return tensor[0]
        out = torch.empty_like(tensor[0]) if out is None else out
        return self._collect("reduce-scatter", _REDUCE_SCATTER, out, tensor, waits)

    def start_shift(
        self, tensor: Tensor, out: Tensor, waits: bool = True
    ) -> Callable[[], Tensor]:
        """Start to send a tensor to the next rank, and to receive that of the previous one.

        Rank 0 is the next one of the last. Until the returned call has ended, `tensor` must not be
        changed, and `out` must not be used.

        Args:
            tensor: [...], contiguous, of the same shape and dtype on all ranks.
            out: Like `tensor`, modified in place.
            waits: As in `all_gather`, for the returned call.

        Returns:
            A call that waits until both have ended, and returns `out`.

        Raises:
            RankError: A rank has ended, or the time limit is over. The returned call raises it too.
        """
        if self.world_size == 1:
            return lambda: out.copy_(tensor)
        self._expect_usable()
        if not tensor.numel():
            return lambda: out
        finish = self._start_shift(tensor, out)

        def finish_in_time() -> Tensor:
            found = finish()
            self._end("shift", tensor, waits)
            return found

        return finish_in_time

    def agree(self, **values: Any) -> None:
        """Compare values among the ranks.

        Args:
            values: What must be equal on all ranks. JSON must be able to represent it.

        Raises:
            RankError: A value differs. Every rank raises, and names it with both values.
        """
        if self.world_size == 1:
            return
        text = json.dumps(values).encode()
        if len(text) > DESCRIPTION_BYTES:
            raise ValueError(
                f"the description of a step has {len(text)} bytes: expected at most"
                f" {DESCRIPTION_BYTES}; compare fewer values"
            )
        line = torch.tensor(
            [*text.ljust(DESCRIPTION_BYTES)], dtype=torch.uint8, device="cpu"
        )
        self.wait("the ranks are compared")
        found = self.all_gather(line.to(self.device)).cpu()
        theirs = [json.loads(bytes(line.tolist())) for line in found]
        for other, their in enumerate(theirs):
            for name in {**theirs[0], **their}:
                first, own = theirs[0].get(name), their.get(name)
                if first != own:
                    raise self._fail(
                        f"{name} = {own!r} on rank {other} but {first!r} on rank 0:"
                        " expected the same on all ranks"
                    )

    def wait(self, before: str = "") -> None:
        """Wait until the device has finished, at most for the time limit.

        During the capture of a CUDA graph, and if nothing is exchanged on the device, it returns at
        once.

        Args:
            before: What the caller does next, for the error.

        Raises:
            RankError: The device has not finished, because another rank did not take part.
        """
        if self.is_on_device and not torch.cuda.is_current_stream_capturing():
            self._wait(before)

    def _wait(self, before: str) -> None:
        """Raise an error if the device does not finish in time."""
        # collectives may have been issued on another stream
        events = [self._record(), *([] if self._issued is None else [self._issued])]
        queries = [event.query for event in events]
        queries += [work.is_completed for work in self._works]
        if not come_true(queries, self.timeout):
            what = f"the device has not finished after {self.timeout:g} s"
            what += f", before {before}" if before else ""
            what += f"; the latest collective is {self._latest}" if self._latest else ""
            raise self._fail(what, True)

    def _collect(
        self,
        name: str,
        collective: Callable[..., Any],
        out: Tensor,
        tensor: Tensor,
        waits: bool,
    ) -> Tensor:
        """Run a collective, wait for it if that is wanted, and return `out`."""
        found = self._run(name, collective, out, tensor)
        self._end(name, tensor, waits)
        return found

    def _end(self, name: str, tensor: Tensor, waits: bool) -> None:
        """Wait for a collective that was issued, if that is wanted or it is the first of its kind.

        The driver loads a kernel when it is first used, and waits for the device without a limit.
        What follows a collective of a new size may use kernels for the first time.
        """
        if not self.is_on_device or torch.cuda.is_current_stream_capturing():
            return
        self._issued = self._record()
        kind = (name, tensor.dtype, tensor.numel().bit_length())
        if waits or kind not in self._kinds:
            self.wait()
            self._kinds.add(kind)

    def _record(self) -> Any:
        """Return an event after what has been issued on the current stream of the device."""
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _note(self, name: str) -> None:
        """Note a collective that is about to be issued on the device."""
        self._latest = name
        note_group(self)

    def _run(
        self, name: str, collective: Callable[..., Any], out: Tensor, tensor: Tensor
    ) -> Tensor:
        """Run a collective, and return `out`."""
        self._expect_usable()
        if not tensor.numel():
            return out
        if self.backend != "gloo":
            self._note(name)
            collective(out.view(-1), tensor.view(-1), group=self.group)
            return out
        wait_for_ranks("a tensor is copied to the host")
        received, sent = out.cpu().view(-1), tensor.cpu().view(-1)
        begin = time.monotonic()
        try:
            work = collective(received, sent, group=self.group, async_op=True)
            work.wait(timedelta(seconds=self.timeout))
        except (RuntimeError, ValueError) as error:
            raise self._fail_after(name, begin, error) from error
        # on the host they are one tensor
        return out if out.device.type == "cpu" else out.copy_(received.view(out.shape))

    def _start_shift(self, tensor: Tensor, out: Tensor) -> Callable[[], Tensor]:
        """Start to send and to receive; return the call that waits for both."""
        assert self.group is not None
        following, previous = (
            dist.get_global_rank(self.group, (self.rank + step) % self.world_size)
            for step in (1, -1)
        )
        is_gloo = self.backend == "gloo"
        name = f"send to rank {following}, receive from {previous}"
        if is_gloo:
            wait_for_ranks("a tensor is copied to the host")
        else:
            self._note(name)
        sent, received = (tensor.cpu(), out.cpu()) if is_gloo else (tensor, out)
        begin = time.monotonic()
        try:
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, sent, following, self.group),
                    dist.P2POp(dist.irecv, received, previous, self.group),
                ]
            )
        except (RuntimeError, ValueError) as error:
            raise self._fail_after(name, begin, error) from error

        if not is_gloo:
            self._works = works

        def finish() -> Tensor:
            self._works = []
            begin = time.monotonic()
            try:
                for work in works:
                    left = max(0.001, begin + self.timeout - time.monotonic())
                    if is_gloo:
                        work.wait(timedelta(seconds=left))
                    else:
                        work.wait()
            except (RuntimeError, ValueError) as error:
                raise self._fail_after(name, begin, error) from error
            return out if out is received else out.copy_(received)

        return finish

    def _expect_usable(self) -> None:
        """Raise an error if a collective has failed before."""
        if self._error is not None:
            raise RankError(
                f"rank {self.rank} of {self.world_size}, step {self.step}: the group is unusable"
                f" since an earlier error; start it again ({self._error})",
                self.rank,
                self.step,
                self._error.missing,
            )

    def _fail_after(self, name: str, begin: float, error: Exception) -> RankError:
        """Return the error of a collective that a library's error has ended."""
        why = " ".join(str(error).split())[:200]
        seconds = time.monotonic() - begin
        return self._fail(f"{name} failed after {seconds:.1f} s: {why}", True)

    def _fail(self, what: str, wants_missing: bool = False) -> RankError:
        """Return the error of this rank, and remember it."""
        missing: tuple[int, ...] = ()
        if wants_missing and self.store is not None:
            grace = min(GRACE_S, self.timeout)
            missing = find_missing(self.store, self.rank, self.world_size, grace)
        names = ", ".join(str(rank) for rank in missing)
        told = f"; no report from rank {names}" if missing else ""
        self._error = RankError(
            f"rank {self.rank} of {self.world_size}, step {self.step}: {what}{told}. No result of"
            " this step is returned; start the group again",
            self.rank,
            self.step,
            missing,
        )
        return self._error
