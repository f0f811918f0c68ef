"""gtrace.report."""
