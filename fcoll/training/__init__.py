"""Data parallel training: gradients in buckets, reduced while the backward pass runs."""
