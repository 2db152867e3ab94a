"""The laws that the recorder checks: bookkeeping, schedule, cache writes, attention rows."""
