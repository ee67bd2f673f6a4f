"""Predicts memory and speed of training before it runs, and picks layouts; loads neither torch nor Ray.

Covered are dense decoders in 16 or 32 bits. Mixtures of experts, 8-bit products and offloading to the host are not: a
prediction for them would be a guess, so there is none.
"""
