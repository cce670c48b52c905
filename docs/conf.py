"""Sphinx configuration: the pages in MyST Markdown, and the API reference from docstrings. `make docs` treats every warning as an error.

Links between pages, and from a page to one of its headings, are checked by MyST. A link to a file of the repository outside of `docs` has no page to
lead to: `RepositoryFiles` shows its text, and its path as a tooltip.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.util import logging

from lrq_ha import __version__

project = "lrq-ha"
author = "the lrq-ha authors"
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
default_role = "code"
nitpicky = False

html_theme = "furo"
html_title = f"lrq-ha {release}"
html_show_sourcelink = False
html_copy_source = False

myst_heading_anchors = 4

autoclass_content = "both"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_use_type_comments = False
python_maximum_signature_line_length = 100
napoleon_numpy_docstring = False

REPOSITORY = Path(__file__).parents[1]
_LOG = logging.getLogger(__name__)


class RepositoryFiles(SphinxTransform):
    """Replaces each link to a file or folder outside of `docs` by its text. A path that does not exist is a warning."""

    default_priority = 400

    def apply(self, **kwargs: Any) -> None:
        for link in list(self.document.findall(self._is_outside)):
            path = self._path(link)
            if not (REPOSITORY / path).exists():
                _LOG.warning("the link leads to %s, which the repository does not have", path, location=link, type="lrq", subtype="outside")
            text = nodes.abbreviation("", "", *link.children, explanation=path)
            link.replace_self(text)

    def _is_outside(self, node: nodes.Node) -> bool:
        is_link = isinstance(node, addnodes.download_reference | addnodes.pending_xref)
        return is_link and node.get("reftype") == "myst" and not self._path(node).startswith("docs" + os.sep)

    def _path(self, link: nodes.Element) -> str:
        """The path from the repository's root that a link names."""
        docs = REPOSITORY / "docs"
        if link["refdomain"] == "doc":  # an existing page: its path from `docs`, or an absolute one, without the suffix
            target = docs / f"{link['reftarget']}.md"
        else:
            target = docs / os.path.dirname(link["refdoc"]) / link["reftarget"].partition("#")[0]
        return os.path.relpath(target, REPOSITORY)


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.add_transform(RepositoryFiles)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
