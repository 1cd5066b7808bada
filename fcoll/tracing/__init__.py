"""Trace: a step run once without data or processes -> a graph and its collectives."""
