"""Predicts memory and speed of training before it runs, and finds the layout to run with. Loads neither torch nor Ray."""
