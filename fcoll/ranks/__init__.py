"""Ranks that share a process: patches of torch's names, and module globals of each rank."""
