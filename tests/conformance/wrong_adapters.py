"""An adapter with a wrong kernel."""

from pagetwin.conformance.harness.runner import choose_laws

LAWS = choose_laws(None)[:4]


WRONG = LAWS[1]
