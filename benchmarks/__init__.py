"""Programs that measure Rubato and print figures; each ends with one JSON line."""
