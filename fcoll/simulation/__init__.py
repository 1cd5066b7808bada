"""N ranks in one process: as threads, exactly, or batched."""
