"""gtrace.workflows."""
