"""The call of a candidate that is being judged, and what it reached that it must not reach."""


class InterferenceError(Exception):
    """A kernel reached the reference, an oracle, or the frames of its caller."""


class JudgedCall:
    """Whether a call is being judged, and what was noted of it.

    Attributes:
        depth: Number of calls that have not returned.
        found: What the candidate did, in words.
    """

    def __init__(self) -> None:
        self.depth = 0
        self.found: list[str] = []

    def note(self, what: str) -> None:
        """Note what a candidate did."""
        if what not in self.found:
            self.found.append(what)


JUDGED_CALL = JudgedCall()
"""That of this process."""


def expect_no_call(name: str) -> None:
    """Raise, and note it, if a call is being judged.

    Args:
        name: The function of the suite that was called.

    Raises:
        InterferenceError: A candidate called it, inside of the call that it judges.
    """
    if JUDGED_CALL.depth:
        JUDGED_CALL.note(f"it called {name} of the suite")
        raise InterferenceError(f"{name} was called inside of the call that it judges")
