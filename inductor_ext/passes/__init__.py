"""Rewrites of a graph's collectives before Inductor lowers it: ``pipeline.PASSES``, in order."""
