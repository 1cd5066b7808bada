"""Run: the table as torch ops, the ways of an eager call, results that wait at their first use."""
