"""What users and both sides of Rubato share: job spec, layout arithmetic, states, HTTP client, command line."""

__version__ = "0.1.0"
