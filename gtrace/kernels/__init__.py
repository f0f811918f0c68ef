"""Compiled loops: arrays in, arrays out, no objects and no errors.

The only place that imports numba. Callers check their input; a kernel trusts it.
"""
