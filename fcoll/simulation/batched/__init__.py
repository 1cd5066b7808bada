"""SPMD programs of N ranks as one batched program: ranks are a leading dim that vmap hides."""
