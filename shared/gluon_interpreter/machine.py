"""One program of a Gluon kernel: its roles, and what runs beside them.

Each role (partition) of a program runs in a thread of its own, but only one at a time: a role runs
until it waits, and the machine then chooses who goes on. Asynchronous copies and products are not
done when they are issued but at a time that the machine chooses, and their destination is NaN until
then. So a kernel that reads too early, or overwrites too early, computes NaN or is reported.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from .accesses import LOCAL, Clock
from .barriers import Barrier, NamedBarrier
from .places import UNKNOWN, Place, current_place, number_of
from .products import Product
from .programs import Program
from .shared_memory import Buffer, SharedView
from .values import InterpreterError

MAX_ROLES = 8
HISTORY = 64
"""Operations of a program that a report of a fault can name."""
MAX_STEPS = 200_000
"""Steps after which a program counts as one that never ends; the tests have a few thousand."""


def current_role() -> WarpRole:
    """Return the role that this thread runs."""
    role: WarpRole = LOCAL.role
    return role


class Stopped(BaseException):
    """Ends the threads of a program of which one role has failed."""


@dataclass(eq=False)
class Copy:
    """An asynchronous bulk copy that was issued.

    Args:
        run: does it.
        is_store: whether it reads shared memory.
        role: who issued it.
        place: the line that has issued it.
    """

    run: Callable[[], None]
    is_store: bool
    role: WarpRole
    place: Place = field(default_factory=current_place)


class WarpRole:
    """One partition of a program: some warps that run one function.

    Args:
        machine: its program.
        number: its index.
        num_warps: its warps.

    Attributes:
        place: the line of the last operation on memory or a barrier.
        groups: asynchronous copies of single elements: groups that were committed and not waited
            for, and the group that is open.
        has_stored: whether its warps have stored to global memory since they last met at a barrier.
    """

    def __init__(self, machine: RoleMachine, number: int, num_warps: int) -> None:
        self.machine, self.number, self.num_warps = machine, number, num_warps
        self.products: list[Product] = []
        self.has_stored = False
        self.is_ready: Callable[[], bool] | None = None
        self.waits_for = ""
        self.place = UNKNOWN
        self.groups: list[list[Copy]] = [[]]
        self.is_done = False
        self.turn = threading.Semaphore(0)
        self.clock = Clock(MAX_ROLES, number)

    def note(self, view: SharedView, is_store: bool, is_async: bool = False) -> None:
        """Note an access to shared memory; see `Accesses.note`.

        Raises:
            InterpreterError: a race, or a load of what was not written yet.
        """
        self.note_place()
        view.buffer.accesses.note(
            view.order(),
            view.item_bytes,
            self.clock,
            is_store,
            is_async,
            number_of(self.place),
        )
        if not is_store:
            self.check_written(view, f"role {self.number}")

    def check_written(self, view: SharedView, reader: str) -> None:
        """Raise `InterpreterError` if a view that is read was not written, if that is reported."""
        if self.machine.reports_unwritten:
            view.check_written(reader)

    def note_place(self) -> None:
        """Note that the role has an operation at the current line of its kernel."""
        self.place = current_place()
        self.machine.history.append((self.number, self.place))

    def wait_until(self, is_ready: Callable[[], bool], what: str) -> None:
        """Let others run until a condition holds.

        Args:
            what: names the condition in the report of a deadlock.
        """
        self.is_ready, self.waits_for = is_ready, what
        self.note_place()
        self.machine.hand_over(self)

    def pause(self) -> None:
        """Let the machine run others now and then."""
        self.machine.count_step()
        self.note_place()
        if self.machine.chance.random() < self.machine.pause_rate:
            self.wait_until(lambda: True, "its turn")


@dataclass
class RoleMachine:
    """One program.

    Args:
        program: its indices in the grid.
        grid: programs along each axis.
        chance: chooses who runs next.
        lateness: how likely a role is run before a copy that could be done: 0 does copies at
            once, 1 as late as possible.
        pause_rate: how likely a role stops where it need not wait.
        memory: its accesses to global memory.
        reports_unwritten: see `interpret_gluon`.

    Attributes:
        barriers: by buffer and element.
        named: by number.
        copies: asynchronous copies that were issued and are not done, in their order.
        error: the first fault.
        steps: operations of roles on memory and barriers so far.
        history: the last of them: role and line.
    """

    program: tuple[int, ...]
    grid: tuple[int, ...]
    chance: random.Random
    lateness: float
    pause_rate: float
    memory: Program
    reports_unwritten: bool
    roles: list[WarpRole] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    barriers: dict[tuple[int, int], Barrier] = field(default_factory=dict)
    named: dict[int, NamedBarrier] = field(default_factory=dict)
    copies: list[Copy] = field(default_factory=list)
    error: BaseException | None = None
    steps: int = 0
    history: deque[tuple[int, Place]] = field(
        default_factory=lambda: deque(maxlen=HISTORY)
    )

    def count_step(self) -> None:
        """Count a step of a role.

        Raises:
            InterpreterError: the program has had MAX_STEPS.
        """
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise InterpreterError(
                f"a program does not end within {MAX_STEPS} steps", "deadlock"
            )

    def barrier(self, view: SharedView) -> Barrier:
        """Return the state of an mbarrier in shared memory."""
        found = self.barriers.get((id(view.buffer), view.first))
        if found is None:
            raise InterpreterError(
                "an mbarrier is used before mbarrier.init", "uninitialized read"
            )
        return found

    def hand_over(self, role: WarpRole | None) -> None:
        """Choose who runs next; return when it is the turn of `role` again.

        Raises:
            Stopped: another role has failed.
        """
        following = self._choose()
        if following is not role:
            if following is not None:
                following.turn.release()
            if role is None or role.is_done:
                return
            role.turn.acquire()
        if self.error is not None:
            raise Stopped
        if role is not None:
            role.is_ready = None

    def _choose(self) -> WarpRole | None:
        """Return a role that can run, after copies that are due; None if all have ended."""
        while self.error is None:
            waiting = [role for role in self.roles if not role.is_done]
            ready = [
                role for role in waiting if role.is_ready is None or role.is_ready()
            ]
            if self.copies and (not ready or self.chance.random() >= self.lateness):
                self._copy(self.chance.choice(self.copies))
                continue
            if ready:
                return self.chance.choice(ready)
            if not waiting:
                return None
            states = "; ".join(
                f"role {role.number} waits for {role.waits_for}" for role in waiting
            )
            self.error = InterpreterError(
                f"deadlock: {states}",
                "deadlock",
                waiting[0].place,
                waiting[0].number,
                [(f"role {role.number} waits", role.place) for role in waiting],
            )
        # wake the roles one after another: each of them ends
        left = [role for role in self.roles if not role.is_done]
        return left[0] if left else None

    def _copy(self, copy: Copy) -> None:
        self.copies.remove(copy)
        try:
            copy.run()
        except BaseException as error:
            self.error = error
            if isinstance(error, InterpreterError):
                error.place, error.role = copy.place, copy.role.number

    def finish_stores(self, role: WarpRole, num_pending: int) -> None:
        """Do the stores of a role, but for the last `num_pending`."""
        stores = [copy for copy in self.copies if copy.is_store and copy.role is role]
        self.finish_copies(stores[: len(stores) - num_pending])

    def finish_copies(self, copies: list[Copy]) -> None:
        """Do copies that a role waits for, unless they are done."""
        for copy in copies:
            if copy in self.copies:
                self._copy(copy)
        if self.error is not None:
            raise Stopped

    def run_roles(
        self, functions: list[tuple[Callable[..., Any], Any]], num_warps: list[int]
    ) -> None:
        """Run the roles of warp_specialize to their ends.

        Args:
            functions: each with its arguments.
            num_warps: the warps of each.

        Raises:
            InterpreterError: the first fault of a role.
        """
        outer = LOCAL.role
        self.roles = [WarpRole(self, i, warps) for i, warps in enumerate(num_warps)]
        for started in self.roles:
            # all roles begin after what came before
            started.clock.join(outer.clock)
        done = threading.Semaphore(0)

        def run(role: WarpRole, function: Callable[..., Any], args: Any) -> None:
            LOCAL.role = role
            role.turn.acquire()
            try:
                if self.error is None:
                    torch.set_num_threads(1)
                    function(*args)
                    self._check_end(role)
            except Stopped:
                pass
            except BaseException as error:
                self.error = self.error or error
                if isinstance(error, InterpreterError) and error.role is None:
                    error.role = role.number
            role.is_done = True
            done.release()
            self.hand_over(role)

        threads = [
            threading.Thread(target=run, args=(role, *call), daemon=True)
            for role, call in zip(self.roles, functions, strict=True)
        ]
        for thread in threads:
            thread.start()
        self.chance.choice(self.roles).turn.release()
        for _ in threads:
            done.acquire()
        for thread in threads:
            thread.join()
        LOCAL.role = outer
        self.roles = [outer]
        if self.error is not None:
            raise self.error

    def _check_end(self, role: WarpRole) -> None:
        """Raise `InterpreterError` if a role ends before what it has issued."""
        if role.products:
            raise InterpreterError(
                "a role ends with products that it did not wait for",
                "missing wait",
                role.products[0].place,
                role.number,
            )
        for copy in self.copies:
            if copy.is_store and copy.role is role:
                raise InterpreterError(
                    "a role ends with asynchronous stores that it did not wait for",
                    "missing wait",
                    copy.place,
                    role.number,
                )

    def finish(self) -> None:
        """Check that nothing is in flight at the end of a program.

        Raises:
            InterpreterError: an asynchronous load is in flight, or some threads wait at a named
                barrier.
        """
        for role in self.roles:
            self._check_end(role)
        for copy in self.copies:
            raise InterpreterError(
                "a program ends while an asynchronous load is in flight",
                "missing wait",
                copy.place,
                copy.role.number,
            )
        for number, barrier in self.named.items():
            if barrier.arrived:
                raise InterpreterError(
                    f"named barrier {number} does not end as it began: {barrier.arrived} threads"
                    " wait"
                )
