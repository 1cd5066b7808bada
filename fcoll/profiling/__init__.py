"""Measure: times of a real run's collectives, and calibration of this machine."""
