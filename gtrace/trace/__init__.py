"""gtrace.trace."""
