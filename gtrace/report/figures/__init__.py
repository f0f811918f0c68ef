"""Figures of a report, drawn by matplotlib."""
