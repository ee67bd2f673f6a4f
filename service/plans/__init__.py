"""Plans: what a job would come to before it runs."""
