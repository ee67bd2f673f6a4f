"""Commanded changes of a job, with timed phases."""
