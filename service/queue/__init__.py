"""Who may start, as arithmetic without input or output."""
