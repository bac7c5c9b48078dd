"""How Sphinx builds these documents: ``make docs``."""

from importlib.metadata import version as version_of

project = "autopar"
author = "the authors of autopar"
copyright = "the authors of autopar"
release = version = version_of("autopar")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx.ext.mathjax",
    "sphinx_argparse_cli",
]
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
# Links to headings, as in `[Memory](cost-model.md#memory)`.
myst_heading_anchors = 3
exclude_patterns = ["_build"]
# Blocks without a language are printouts.
highlight_language = "none"

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_use_ivar = True

html_theme = "furo"
html_title = f"autopar {release}"
html_show_sphinx = False
# GitHub renders headings and lines of files with scripts, in which no anchors can be found.
linkcheck_anchors = False
linkcheck_timeout = 20
