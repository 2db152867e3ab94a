"""The former name of what both twins share, which is in the reference now."""

raise ImportError(
    "pagetwin.bookkeeping is in pagetwin.reference now, under the same file names:"
    " pagetwin.reference.cache.block_manager (was pagetwin.bookkeeping.cache.block_manager),"
    " pagetwin.reference.batch.scheduler (was pagetwin.bookkeeping.batch.scheduler). The operations"
    " are in pagetwin.reference and pagetwin.optimized"
)
