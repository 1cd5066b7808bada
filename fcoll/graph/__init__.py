"""Read a graph: its collectives, who asked for them, what its steps take. Used by all below."""
