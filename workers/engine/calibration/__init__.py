"""Measures what the planner's models rest on: products of matrices, kernels of a layer, links, the host's overheads."""
