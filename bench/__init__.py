"""Benchmarks: every figure is a ratio of two things measured in turns in one run."""
