"""gtrace.codecs."""
