"""Chains of commands."""
