"""Cost of the proxy as ratios to a minimal relay: ``python -m tests.bench`` and ``python -m tests.bench.prefix``."""
