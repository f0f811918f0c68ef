"""gtrace.capture."""
