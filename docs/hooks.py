"""Hooks of mkdocs for `make docs`: the pages at the repository's root join docs/, and links follow them.

A link from a page to a file of the code becomes that file's name, since the site holds no code.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changes.md"}


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of the root to those of docs/."""
    from mkdocs.structure.files import File

    for name, page in PAGES.items():
        text = move_links((ROOT / name).read_text(encoding="utf-8"), "")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return a page of docs/ with links that hold in the site."""
    return markdown if page.file.src_uri in PAGES.values() else move_links(markdown, "docs")


def move_links(text: str, folder: str) -> str:
    """Return a page's text with links that hold in the site.

    :param folder: of the page, from the repository's root
    """

    def move(match: re.Match[str]) -> str:
        told, target, anchor = match[1], match[2], match[3] or ""
        if re.match(r"[a-z]+:", target) or not target:
            return match[0]
        place = posixpath.normpath(posixpath.join(folder, target))
        if place in PAGES:
            return f"{told}({PAGES[place]}{anchor})"
        if place.startswith("docs/"):
            return f"{told}({place.removeprefix('docs/')}{anchor})"
        if not (ROOT / place).is_file():
            return match[0]  # mkdocs says that it leads nowhere
        return told.lstrip("!")[1:-1]

    return re.sub(r"(!?\[[^\]]*\])\(([^)\s#]*)(#[^)\s]*)?\)", move, text)
