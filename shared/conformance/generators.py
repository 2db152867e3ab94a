"""The former name of `cases`."""

raise ImportError(
    "pagetwin.conformance.generators is now pagetwin.conformance.cases, under the same file names"
)
