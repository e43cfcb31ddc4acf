"""Sphinx's settings. `make docs` builds the pages into out/docs, with no network."""

import optax_offload

project = "optax_offload"
version = release = optax_offload.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
html_theme = "furo"
html_title = f"optax_offload {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
# What a block without a language shows is output, not Python.
highlight_language = "text"
# Lines of code on the pages have up to 88 columns, as in the repository.
_narrow = {"code-font-size": "var(--font-size--small--2)"}
html_theme_options = {"light_css_variables": _narrow, "dark_css_variables": _narrow}

# Programs are for copying, without prompts; output is not.
copybutton_selector = (
    "div:not(.highlight-text):not(.highlight-myst-ansi) > div.highlight > pre"
)
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True
copybutton_only_copy_prompt_lines = True

# Links to headings as GitHub makes them, which tests/system/test_docs.py follows.
myst_heading_anchors = 4
myst_enable_extensions = ["dollarmath"]

# The notebook is run in each build: what is kept would not see the library change.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 600
nb_merge_streams = True
# Compilers log there what they think of a program that is short of memory.
nb_output_stderr = "remove"

# Names in single backticks are the library's where it has one, as in JAX's docstrings.
default_role = "py:obj"
autodoc_member_order = "bysource"
# Types stand beside the arguments that docstrings tell of, and signatures stay short.
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
python_use_unqualified_type_names = True
autosummary_generate = False
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False

# Every name that a page refers to has to be there, but for those of other projects,
# which would have to be fetched, what docstrings have in single backticks, and types of
# attributes that are no public names.
nitpicky = True
nitpick_ignore_regex = [
    ("py:obj", r".*"),
    ("py:class", r"(collections\.abc|jax|optax|numpy|optax_offload(\.\w+)*\._\w+)\..*"),
    ("py:class", r"(os|re)\..*|~?P"),
]
