"""Schedule: an order of steps and their costs -> a timeline."""
