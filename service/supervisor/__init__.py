"""Compares what is wanted with what is seen, and acts."""
