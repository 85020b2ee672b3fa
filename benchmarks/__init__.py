"""Benchmarks: each takes ``--quick`` and ``--json FILE``; see ``report.py``."""
