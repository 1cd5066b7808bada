"""Sharded tensors in pickles, files and checkpoints."""
