"""The control plane: accepts jobs, queues them, hands them to a Ray cluster and supervises them."""
