"""Price: what collectives and compute cost on a machine."""
