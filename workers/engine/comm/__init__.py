"""What travels over the data axis in a step, when, and in how many pieces."""
