"""The former place of what is now in `runtime`, `dispatch`, `kernels` and `warm_up`."""

raise ImportError(
    "pagetwin.optimized.launch is now pagetwin.optimized.runtime (launcher, workspace, capture,"
    " operators, repeat), pagetwin.optimized.dispatch (dispatch, families, cascade),"
    " pagetwin.optimized.kernels.portable.host (tuning, launches), pagetwin.optimized.warm_up and"
    " pagetwin.optimized.backends"
)
