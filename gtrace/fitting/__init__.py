"""Levels fitted to a law or to data, as pure functions."""
