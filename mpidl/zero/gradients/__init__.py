"""Gradients reduced to shards, and the `.grad` that shows them."""
