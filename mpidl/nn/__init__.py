"""Modules that compute over all ranks."""
