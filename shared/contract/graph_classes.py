"""The former place of the classes of CUDA graphs."""

raise ImportError(
    "pagetwin.contract.graph_classes is now pagetwin.contract.graph_support (AttentionCGSupport,"
    " AttentionCGSupportInfo, CUDAGraphMode, GroupSupport) and pagetwin.contract.v0.graph_classes"
    " (CapturedStep, GraphInputBuffers)"
)
