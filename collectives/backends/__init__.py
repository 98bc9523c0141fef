"""The ways to carry out a collective, and the choice among them."""
