"""How bytes move: one protocol of a few primitives, and the carriers that implement it."""
