"""gtrace.online."""
