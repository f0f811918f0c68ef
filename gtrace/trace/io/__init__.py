"""Exchange of traces with other programs and other machines."""
