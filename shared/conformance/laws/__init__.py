"""The laws, one file per subject; each law is one function."""

from ...contract.extras import require

require("pagetwin.conformance", "hypothesis")
