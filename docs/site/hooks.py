"""What `mkdocs build` does beside rendering: pages from the root of the repository, links into it, and checks.

Pages link as the repository host needs it, by the path from file to file. Here a link to what is a page of the site
leads there, one to any other file of the repository leads to the repository host, and one to nothing is a warning.
"""

import logging
import posixpath
import re
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

from markdown_it import MarkdownIt
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Link, Navigation, Section
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
CONFIGURATION_KEYS = "command_line.html#configuration-keys"

logger = logging.getLogger("mkdocs.hooks.rowmesh")
_CODE = re.compile(r"^(```|~~~).*?^\1|``.+?``|`[^`\n]+`", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\[([^\[\]]*)\]\(([^)\s]+)\)")
_FILE = re.compile(r"[\w./]+\.md")
_TITLE = re.compile(r"^# (.+)$", re.MULTILINE)
_FETCHED = re.compile(r"<(?:script|img|iframe|source)\b[^>]* src=\"?(?:https?:)?//[^>]*>")
_LINKED = re.compile(r"<link\b[^>]* href=\"?(?:https?:)?//[^>]*>")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds pages from the root of the repository."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:
    """Puts the table of configuration keys, a part of a page, into the navigation."""
    (reference,) = [item for item in nav.items if isinstance(item, Section) and item.title == "Reference"]
    reference.children.insert(1, Link("Configuration keys", CONFIGURATION_KEYS))
    return nav


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Makes links lead to pages of the site or to the repository host."""
    sources = {page: source for source, page in PAGES.items()}
    source = sources.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    if source in PAGES:
        page.edit_url = f"{config.repo_url}/blob/main/{source}"
    codes = [match.span() for match in _CODE.finditer(markdown)]

    def replace(match: re.Match[str]) -> str:
        if any(begin <= match.start() < end for begin, end in codes):
            return match[0]
        path, target = _target(match[2], source, page.file.src_uri, config)
        text = _TITLE.search(path.read_text(encoding="utf-8")) if path and _FILE.fullmatch(match[1]) else None
        return f"[{text[1] if text else match[1]}]({target})"

    return _LINK.sub(replace, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Warns where a page has another structure than CommonMark, which the repository host shows, gives it."""
    if page.markdown and ":::" not in page.markdown:
        expected = _structure(MarkdownIt("commonmark").enable("table").render(page.markdown))
        found = _structure(html)
        if differing := {tag: (expected[tag], found[tag]) for tag in expected | found if expected[tag] != found[tag]}:
            logger.warning(
                "%s: the repository host and the site have other numbers of elements: %s; is a blank line missing "
                "before a list, or its indentation less than four spaces?",
                page.file.src_uri,
                differing,
            )
    elif "<blockquote" in html:
        logger.warning("%s has a docstring with >>> outside of its section Example:", page.file.src_uri)
    return html


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Warns of what a browser would fetch from another host."""
    for tag in _FETCHED.findall(output) + _LINKED.findall(output):
        logger.warning("%s would have a browser fetch %s from another host", page.file.src_uri, tag)
    return output


def _structure(html: str) -> Counter[str]:
    """How many elements of each kind a page has."""
    return Counter(re.findall(r"<(h[1-6]|ul|ol|li|tr|td|th|pre|blockquote|em|strong|br)\b", html))


def _target(link: str, source: str, page: str, config: MkDocsConfig) -> tuple[Path | None, str]:
    """The file that is meant by a link of a file of the repository, if it is one, and where to find it on the site."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc or not parts.path:
        return None, link
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), parts.path))
    anchor = f"#{parts.fragment}" if parts.fragment else ""
    if path.startswith("../") or not (ROOT / path).exists():
        logger.warning("%s links to %s, which is not in the repository", source, link)
        return None, link
    inside = PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else "")
    if inside.endswith((".md", ".svg", ".png")):
        return ROOT / path, posixpath.relpath(inside, posixpath.dirname(page) or ".") + anchor
    kind = "tree" if (ROOT / path).is_dir() else "blob"
    return ROOT / path, f"{config.repo_url}/{kind}/main/{path}{anchor}"
