"""A report as a page, as text, Markdown, LaTeX and records."""
