"""gtrace.fitting."""
