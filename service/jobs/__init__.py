"""Jobs: what was submitted, with its history."""
