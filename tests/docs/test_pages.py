"""The pages lead to each other, name modules that exist, and become a site."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Final

import pytest

from tests.docs.test_reference import DOCS, ROOT
from tests.test_house import FLOORS, ORDER
from thunderagent.model.task import TRANSITIONS, Status

PAGES: Final = (ROOT / "README.md", ROOT / "examples" / "market-feed" / "README.md", *sorted(DOCS.rglob("*.md")))
each_page: Final = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))

LINK: Final = re.compile(r"\]\(([^)\s]+)\)")
FENCE: Final = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def text_of(page: Path) -> str:
    """The page without its code."""
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text(encoding="utf-8")))


def anchors(page: Path) -> set[str]:
    """The anchors of the headings of a page, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page
def test_every_link_leads_to_a_file_and_to_a_heading_in_it(page: Path) -> None:
    for link in LINK.findall(text_of(page)):
        target, _, anchor = link.partition("#")
        if "://" in link:
            continue
        file = (page.parent / target).resolve() if target else page
        assert file.is_file(), link
        assert not page.is_relative_to(DOCS) or file.is_relative_to(DOCS), f"{link} is not a part of the site"
        assert not anchor or anchor in anchors(file), link


def test_every_page_that_code_or_a_template_names_exists() -> None:
    files = [one for folder in ("thunderagent", "scripts", "infra", "systemd") for one in (ROOT / folder).rglob("*")]
    for file in files:
        if file.suffix in (".py", ".yaml", ".service", "") and file.is_file():
            for page, anchor in re.findall(r"\bdocs/([\w/-]+\.md)(?:#([\w-]+))?", file.read_text(encoding="utf-8")):
                assert (DOCS / page).is_file(), f"{file} names docs/{page}"
                assert not anchor or anchor in anchors(DOCS / page), f"{file} names docs/{page}#{anchor}"


def test_every_page_is_found_from_the_index() -> None:
    found, ahead = set[Path](), [DOCS / "index.md"]
    while ahead:
        page = ahead.pop()
        found.add(page)
        links = (page.parent / link.partition("#")[0] for link in LINK.findall(text_of(page)) if "://" not in link)
        ahead += {link.resolve() for link in links if link.suffix == ".md"} - found
    assert set(DOCS.rglob("*.md")) - found == set()


@each_page
def test_every_module_that_is_named_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for path in re.findall(r"\bthunderagent/[a-z_/]+\.(?:py|js)\b", text):
        assert (ROOT / path).is_file(), path
    for name in re.findall(r"(?:from|import) (thunderagent(?:\.[a-z_]+)+)|`(thunderagent(?:\.\w+){2,})`", text):
        assert resolve_name(name[0] or name[1]) is not None


def test_the_rooms_of_the_architecture_are_those_of_the_house() -> None:
    page = (DOCS / "inside" / "architecture.md").read_text(encoding="utf-8")
    rooms = re.findall(r"^\| (\d+) \| `(\w+)(?:/|\.py)` \|", page, re.MULTILINE)
    assert {room: int(floor) - 1 for floor, room in rooms} | {"__main__": len(ORDER) - 1} == FLOORS
    assert [int(floor) for floor, _ in rooms] == sorted(int(floor) for floor, _ in rooms)
    for module in re.findall(r"`([a-z_/]+\.py)`", page):
        assert (ROOT / module).is_file() or (ROOT / "thunderagent" / module).is_file(), module


def test_the_drawn_life_of_a_task_is_the_table_of_transitions() -> None:
    drawn = re.findall(r'id="([A-Z]+)-([A-Z]+)"', (DOCS / "inside" / "life-of-a-task.svg").read_text(encoding="utf-8"))
    assert sorted((Status(before), Status(after)) for before, after in drawn) == sorted(
        (before, after) for before, afters in TRANSITIONS.items() for after in afters
    )


def test_pictures_load_nothing_and_are_legible_on_dark_pages() -> None:
    for picture in DOCS.rglob("*.svg"):
        text = picture.read_text(encoding="utf-8")
        assert set(re.findall(r"https?://[^\"' )]+", text)) == {"http://www.w3.org/2000/svg"}, picture
        assert 'class="paper"' in text, f"{picture} has no background of its own"


@pytest.mark.processes
@pytest.mark.skipif(find_spec("mkdocs") is None, reason="needs the extra docs")
def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path))
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    for page in tmp_path.rglob("*.html"):
        loaded = re.findall(r'<(?:script|img|link|iframe)\b[^>]*(?:src|href)="(\w+:[^"]*)"', page.read_text())
        assert [one for one in loaded if not one.startswith("data:")] == [], page.name
