"""Read a graph: its collectives, their origins, the costs of its steps. Used by all below."""
