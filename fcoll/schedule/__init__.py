"""Steps in an order -> when each runs, what is exposed, how much memory it takes."""
