"""Traces and the rest of the world: files of other programs, and other machines."""
