"""The axes a model is split along: data, tensor, pipeline, and the recipe that composes them."""
