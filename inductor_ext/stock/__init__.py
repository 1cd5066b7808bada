"""fcoll's ops under stock Inductor, without ``backend="fcoll"``: what torch has to know of them."""
