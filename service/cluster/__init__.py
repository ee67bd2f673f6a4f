"""What the control plane sees of the Ray cluster."""
