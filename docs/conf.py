"""The settings of the site that `make docs` builds: Sphinx reads the same Markdown that lies in the repository.

Sphinx and MyST because they check links and anchors, those to files that are not pages too, take README.md where it
is, and search without a server.
"""

import re
from pathlib import Path

from sphinx.application import Sphinx

project = "bigbatch"
root_doc = "README"
include_patterns = ["*.md", "docs/**.md", "docs/api.rst", "examples/**.md", "benchmarks/results/*-summary.md"]
exclude_patterns = [".*", "bigbatch", "build", "data", "runs"]  # folders that need not be walked
extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_heading_anchors = 3  # as on GitHub
html_theme = "furo"
html_title = "bigbatch"
# the public names are documented without torch, which a builder of pages need not install
autodoc_mock_imports = ["torch", "numpy", "psutil", "yaml", "rich"]
autodoc_typehints = "none"
autodoc_member_order = "bysource"

BELOW = {  # page: what hangs below it, beside the pages that docs/index.md names
    "docs/design": "decisions/*",
    "docs/python": "/examples/text/*",
    "docs/measured": "/benchmarks/results/*",
}


def append_contents(app: Sphinx, name: str, source: list[str]) -> None:
    """Append what the sidebar lists to the pages that lead to others; a page in no list is a warning."""
    if name == "README":
        listed: set[str] = set()
        for section in (Path(app.srcdir) / "docs/index.md").read_text().split("\n## ")[1:]:
            pages = dict.fromkeys(re.findall(r"\]\(([\w./-]+)\.(?:md|rst)[)#]", section))
            entries = "\n".join(f"/docs/{page}" for page in pages if page not in listed)
            listed.update(pages)
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {section.splitlines()[0]}\n{entries}\n```\n"
        source[0] += "\n```{toctree}\n:hidden:\n/docs/index\n```\n"
    elif name in BELOW:
        source[0] += f"\n```{{toctree}}\n:glob:\n:hidden:\n{BELOW[name]}\n```\n"


def as_plain(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Keep a docstring's text as it is: in reStructuredText the _ and * of names and shapes would be markup."""
    lines[:] = [re.sub(r"([\\`*_|])", r"\\\1", line) for line in lines]


def setup(app: Sphinx) -> None:
    """Let Sphinx call these for each page and docstring that it reads."""
    app.connect("source-read", append_contents)
    app.connect("autodoc-process-docstring", as_plain)
