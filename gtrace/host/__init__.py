"""gtrace.host."""
