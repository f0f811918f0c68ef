"""gtrace.coding."""
