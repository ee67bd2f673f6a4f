"""Replays traces of jobs through the policy of the queue on a simulated cluster: ``python -m benchmarks.scheduler``."""
