"""C++: collectives over shared memory, and what compiles them."""
