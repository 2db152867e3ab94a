"""The folder of what both implementations share; its packages have public names of their own."""

raise ImportError(
    "pagetwin.shared is the name of a folder, not of a package. Its parts are imported as"
    " pagetwin.conformance (was pagetwin.shared.conformance), pagetwin.integrations.transformers"
    " (was pagetwin.shared.integrations.transformers), pagetwin.engine.layer (was"
    " pagetwin.shared.layer), pagetwin.contract, pagetwin.engine, pagetwin.validation,"
    " pagetwin.tools and pagetwin.examples"
)
