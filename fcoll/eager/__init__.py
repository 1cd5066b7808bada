"""Run: the table as torch ops, the paths of an eager call, results that wait at their first use."""
