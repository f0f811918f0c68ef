"""Results summed up, as numbers: sweeps, run logs, traces, and what is compared in them. Nothing here formats."""
