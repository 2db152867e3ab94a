"""An adapter with a wrong kernel."""

from pagetwin.conformance.api.check import choose_laws

LAWS = choose_laws(None)[:4]


WRONG = LAWS[1]
