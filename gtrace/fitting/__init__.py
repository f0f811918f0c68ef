"""Levels fitted to a law or to data, as pure functions."""

from gtrace.fitting.alq import alq_levels
from gtrace.fitting.amq import amq_levels, amq_multiplier
from gtrace.fitting.optimal import certified_levels, objective, optimal_levels
from gtrace.fitting.variance import expected_variance

__all__ = [
    "alq_levels",
    "amq_levels",
    "amq_multiplier",
    "certified_levels",
    "expected_variance",
    "objective",
    "optimal_levels",
]
