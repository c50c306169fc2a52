"""Sphinx configuration. Builds from the installed package; needs neither a GPU nor the network."""

import sys
from importlib.metadata import version as installed_version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "spattn"
author = "the spattn developers"
project_copyright = "the spattn developers"
release = version = installed_version("spattn")

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.doctest",
    "sphinx.ext.viewcode",
    "numpydoc",
    "myst_parser",
    "matplotlib.sphinxext.plot_directive",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_llm.txt",
    "gallery",
    "notebooks",
    "public",
    "results",
    "twins",
]
source_suffix = {".rst": "restructuredtext", ".md": "markdown"}
templates_path = ["_templates"]
exclude_patterns = ["_build", "_templates", "README-build.md"]
default_role = "literal"  # `x` in a docstring is a parameter
nitpicky = False
suppress_warnings = ["toc.empty_glob"]  # index.rst lists performance pages by pattern

autosummary_generate = True
# Apart from spattn.plan also where file names ignore case.
autosummary_filename_map = {"spattn.Plan": "spattn.Plan-class"}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
numpydoc_show_class_members = False
# Every parameter under its name and in its order, and what is returned. With -W a missing one ends the build.
numpydoc_validation_checks = {"PR01", "PR02", "PR03", "PR05", "PR10", "RT01", "YD01"}
myst_heading_anchors = 3

# Every example on every page and in every docstring runs: sphinx-build -b doctest. Pages import what they use;
# docstrings may use the names of their own module.
doctest_test_doctest_blocks = "default"
doctest_global_setup = """
import numpy as np
import spattn
from spattn.index_set import *
from spattn.patterns import *
from spattn.testing import *
"""

plot_formats = [("png", 110)]
plot_html_show_formats = False
plot_html_show_source_link = False
plot_include_source = False
plot_basedir = plot_working_directory = str(Path(__file__).parent / "figures")

# Copies the code of an example without its prompts and its output.
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# llms.txt, and a Markdown twin of each page beside it: PAGE.html.md. A second builder reads the same doctrees.
llms_txt_build_parallel = False
llms_txt_suffix_mode = "append"
llms_txt_nested_enabled = False
llms_txt_description = (
    "Exact sparse softmax attention on CPUs and NVIDIA GPUs: the allowed (query, key) pairs are a pattern."
)

html_theme = "pydata_sphinx_theme"
html_theme_options = {
    "show_nav_level": 2,
    "navbar_align": "left",
    "header_links_before_dropdown": 8,
    "secondary_sidebar_items": ["page-toc", "twins"],
    "footer_start": ["copyright"],
    "footer_end": [],
}
html_context = {"default_mode": "auto"}
html_title = f"spattn {release}"
html_sidebars = dict.fromkeys(("index", "install", "quickstart", "benchmarks", "compare"), [])  # nothing below
html_domain_indices = False  # of modules: docs/api/index.rst lists more
html_static_path = ["_static"]
html_favicon = "_static/favicon.svg"
html_css_files = ["spattn.css"]
html_js_files = ["pattern_view.js"]
html_search_scorer = str(Path(__file__).parent / "_static" / "scorer.js")
html_show_sphinx = False
html_copy_source = False
