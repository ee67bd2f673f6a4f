"""What training costs in memory, and the ways to pay less."""
