"""How the site is built: ``make docs``, or ``python -m sphinx -W -n -b html docs docs/_build/html``."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE.parent)]

import gtrace  # noqa: E402 - from the checkout that these pages belong to

project = "gtrace"
author = "The gtrace authors"
copyright = "the gtrace authors"  # noqa: A001 - Sphinx's name
version = release = gtrace.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "generated"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build", "_ext"]

myst_enable_extensions = ["dollarmath", "deflist", "attrs_block"]
myst_heading_anchors = 4

# What pages show is what is typed: no curly quotes, no dashes for hyphens.
smartquotes = False
html_math_renderer = "mathml"

html_theme = "furo"
html_title = f"gtrace {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}

# Names in signatures are those of the code (NDArray, Path, State); what docstrings refer to on purpose has to exist.
nitpick_ignore_regex = [("py:class", r"(?!gtrace\.).*")]
suppress_warnings = ["ref.python"]

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_use_ivar = True
