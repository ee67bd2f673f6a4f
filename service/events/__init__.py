"""The timeline of a job."""
