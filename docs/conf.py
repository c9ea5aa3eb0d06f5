"""The settings of the site that `make docs` builds: Sphinx reads the same Markdown that lies in the repository.

Sphinx and MyST because they check links and anchors, those to files that are not pages too, take README.md where it
is, and search without a server.
"""

import re

from sphinx.application import Sphinx

project = "bigbatch"
root_doc = "README"
include_patterns = ["*.md", "docs/**.md", "examples/**.md", "benchmarks/results/*-summary.md"]
exclude_patterns = [".*", "bigbatch", "build", "data", "runs"]  # folders that need not be walked
extensions = ["myst_parser"]
myst_heading_anchors = 3  # as on GitHub
html_theme = "furo"
html_title = "bigbatch"

BELOW = {  # page: what hangs below it, beside the pages that README names
    "docs/design": "decisions/*",
    "docs/python": "/examples/text/*",
    "docs/measured": "/benchmarks/results/*",
}


def append_contents(app: Sphinx, name: str, source: list[str]) -> None:
    """Append what the sidebar lists to the pages that lead to others; a page in no list is a warning."""
    if name == "README":
        pages = dict.fromkeys(re.findall(r"\]\(([\w/-]+)\.md[)#]", source[0]))
        source[0] += "\n```{toctree}\n:hidden:\n" + "\n".join(pages) + "\n```\n"
    elif name in BELOW:
        source[0] += f"\n```{{toctree}}\n:glob:\n:hidden:\n{BELOW[name]}\n```\n"


def setup(app: Sphinx) -> None:
    """Let Sphinx call append_contents for each page that it reads."""
    app.connect("source-read", append_contents)
