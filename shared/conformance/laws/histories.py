"""Laws of a cache over whole histories of requests.

Each operation may be correct alone while the cache still ends up wrong: a freed block is written
again, a row keeps an entry of the previous request, or a copy on write comes too late. Therefore
whole histories are run (`machine`), and everything is compared after each action.
"""

from random import Random

from hypothesis import strategies as st

from ..candidates.setting import Setting
from ..cases.batches import LAYOUTS
from ..cases.reuse import compiled
from .law import law
from .machine import KINDS, CacheAction, CacheHistory, Machine

OFTEN = (*KINDS, "start", "step", "append", "append")


@st.composite
def histories(draw: st.DrawFn) -> CacheHistory:
    """Return a history. If it breaks a law, Hypothesis shrinks it action by action."""
    actions = draw(
        st.lists(
            st.builds(
                CacheAction,
                st.sampled_from(OFTEN),
                st.integers(0, 3),
                st.sampled_from([1, 1, 2, 3, 4, 5, 8, 9]),
            ),
            min_size=2,
            max_size=24,
        )
    )
    pick = Random(draw(st.integers(0, 2**16)))
    kernel = compiled(pick)
    return CacheHistory(
        actions=(CacheAction("start", 0, pick.choice([1, 4, 5, 7])), *actions),
        block_size=kernel.choice([1, 2, 3, 4, 4]),
        layout=kernel.choice(LAYOUTS),
        filled=pick.choice([True, True, False]),
        shuffled=pick.choice([True, False]),
    )


@law(
    "StepBuffers",
    "reshape_and_cache",
    "gather_cache",
    "copy_blocks",
    "swap_blocks",
    cases=histories(),
)
def a_cache_is_right_after_any_sequence_of_operations(
    setting: Setting, history: CacheHistory
) -> None:
    Machine(setting, history).run()


TOLD = (
    # a fork and its origin diverge in the middle of a block: the fork first, then the origin
    CacheHistory(
        (
            CacheAction("start", 0, 6),
            CacheAction("fork", 0),
            CacheAction("append", 1, 3),
            CacheAction("append", 0, 3),
        )
    ),
    # a row is reused by a shorter request, in a step of a smaller size
    CacheHistory(
        (
            CacheAction("start", 0, 13),
            CacheAction("start", 0, 5),
            CacheAction("free", 0),
            CacheAction("start", 0, 1),
            CacheAction("step"),
        ),
        shuffled=True,
    ),
    # a shared prefix outlives the request that computed it
    CacheHistory(
        (
            CacheAction("start", 0, 9),
            CacheAction("share", 0, 2),
            CacheAction("free", 0),
            CacheAction("start", 0, 8),
            CacheAction("append", 0, 5),
        )
    ),
    # blocks that are swapped in from the host get other block ids
    CacheHistory(
        (
            CacheAction("start", 0, 7),
            CacheAction("swap out", 0),
            CacheAction("start", 0, 10),
            CacheAction("swap in", 0),
            CacheAction("step"),
            CacheAction("preempt", 1),
        ),
        block_size=3,
        layout="interleaved",
    ),
    # three requests in a step of size four, then two in a step of size two, then four
    CacheHistory(
        (
            CacheAction("start", 0, 2),
            CacheAction("start", 0, 3),
            CacheAction("start", 0, 4),
            CacheAction("step"),
            CacheAction("free", 1),
            CacheAction("append", 1, 5),
            CacheAction("fork", 0),
            CacheAction("fork", 1),
            CacheAction("step"),
            CacheAction("step"),
        ),
        layout="hnd",
        shuffled=True,
    ),
)


@law(
    "StepBuffers",
    "reshape_and_cache",
    "gather_cache",
    "copy_blocks",
    "swap_blocks",
    cases=TOLD,
)
def a_cache_is_right_after_sequences_that_failed_before(
    setting: Setting, history: CacheHistory
) -> None:
    Machine(setting, history).run()
