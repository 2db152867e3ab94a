"""The former place of what is now in a folder per stage of a check."""

raise ImportError(
    "pagetwin.conformance.harness is now pagetwin.conformance.base (support, families),"
    " pagetwin.conformance.checks (expect, canaries), pagetwin.conformance.candidates (candidate,"
    " guard, calls), pagetwin.conformance.laws (law), pagetwin.conformance.running (trial, worker),"
    " pagetwin.conformance.reports (report) and pagetwin.conformance.api (check, which was runner,"
    " fuzz, probe). Support, Report, check_implementation and the other public names are in"
    " pagetwin.conformance"
)
