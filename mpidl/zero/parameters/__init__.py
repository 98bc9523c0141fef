"""Strategies for where the parameters live between steps, one for each stage, and the guards over them."""
