"""Sphinx's settings for the site that `make docs` builds."""

from importlib.metadata import version as installed

project = "Wardround"
author = "The Wardround developers"
version = release = installed("wardround")
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["results/*.txt"]
myst_heading_anchors = 4
suppress_warnings = ["myst.header"]  # a report begins at its own level
html_theme = "furo"
html_title = "Wardround"
html_copy_source = False
html_show_sphinx = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
highlight_language = "none"
pygments_style = "tango"
