"""Whether the service works, and how close it is to its limits."""
