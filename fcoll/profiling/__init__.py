"""What a real run's collectives took, and what this machine can do."""
