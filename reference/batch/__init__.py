"""The metadata of one step in plain torch: batch order, start locations, micro-batches."""
