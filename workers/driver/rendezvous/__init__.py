"""Where the workers of a job meet: who is alive, who is ready, and which of them train together next."""
