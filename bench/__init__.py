"""Benchmarks: what goes through a door beside the same thing without one, on private brokers. See docs/benchmarks.md."""
