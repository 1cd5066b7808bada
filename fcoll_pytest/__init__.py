"""fcoll's pytest plugin: a package of its own, so that pytest starts without importing torch."""
