"""Data parallel training: gradients in buckets, reduced while the backward pass runs."""

from fcoll.training import logger as _logger  # noqa: F401  names of torch's are to know it, too
