"""Projects: what their jobs may have at one time, and what they had of late."""
