"""The former place of the sequence groups of vLLM V0 and their metadata."""

raise ImportError(
    "pagetwin.contract.sequence_classes is now pagetwin.contract.v0.sequence_classes"
)
