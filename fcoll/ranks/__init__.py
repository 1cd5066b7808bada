"""Who is rank r, and what of torch is replaced while it runs."""
