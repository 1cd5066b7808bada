"""What each collective becomes in Inductor's IR: the code that a compiled graph runs."""
