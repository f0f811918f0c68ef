"""The parts of a report: each with its words, tables and figures."""
