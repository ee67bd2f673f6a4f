"""The line between a driver and the control plane."""
