"""Code on pages: the blocks of a Markdown file, and whether what a page shows is what is printed."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_FILE = re.compile(r"^`(\w+\.\w+)`:\n\n\Z", re.MULTILINE)
_NOT_RUN = re.compile(r"^<!-- not run: (.+) -->\n\n\Z", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        language: behind the fence.
        file: the name that the line before consists of, as in `` `schema.toml`: ``; else "".
        text: what is between the fences.
        line: of the page, from 1, on which the text begins.
        not_run: why it cannot run in a test, as in `<!-- not run: needs a GPU -->` before it; else "".
    """

    language: str
    file: str
    text: str
    line: int = 1
    not_run: str = ""

    @property
    def commands(self) -> list[str]:
        """The lines of a shell, joined where they are continued."""
        return self.text.replace("\\\n", " ").splitlines()


def blocks(page: str) -> list[Block]:
    """Those of a page, by its path in the repository."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = []
    for match in _BLOCK.finditer(text):
        before = text[: match.start()]
        file, reason = _FILE.search(before), _NOT_RUN.search(before)
        line = before.count("\n") + 2
        found.append(Block(match[1], file[1] if file else "", match[2], line, reason[1] if reason else ""))
    return found


def lacking(shown: str, printed: str) -> list[str]:
    """The lines of a page that were not printed, whatever the numbers, folders and widths of columns in them."""
    lines = {_form(line) for line in printed.splitlines()}
    return [line for line in shown.splitlines() if _form(line) not in lines]


def differing(shown: str, printed: str) -> list[str]:
    """The lines of a page that were not printed to the digit; columns, lines and spaces may have been left out.

    Args:
        shown: what the page has; text that was printed as one line may stand in several.
        printed: by the command.
    """
    if " ".join(shown.split()) in " ".join(printed.split()):
        return []
    lines = [_cells(line) for line in printed.splitlines()]
    return [
        line
        for line in shown.splitlines()
        if line.strip() not in ("", "…") and not any(_is_part(_cells(line), cells) for cells in lines)
    ]


def _cells(line: str) -> list[str]:
    return re.split(r"\s{2,}", line.strip())


def _is_part(some: list[str], cells: list[str]) -> bool:
    rest = iter(cells)
    return all(each in rest for each in some)


def shell(script: str, folder: Path, **variables: str) -> str:
    """What a script of bash prints in a folder; its rowmesh and torchrun are those of this interpreter and checkout."""
    functions = (
        f'rowmesh() {{ "{sys.executable}" -m rowmesh.cli "$@"; }}\n'
        f'torchrun() {{ "{sys.executable}" -m torch.distributed.run "$@"; }}\n'
    )
    command = ["bash", "-euo", "pipefail", "-c", functions + script]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | variables
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _form(line: str) -> str:
    line = re.sub(r"/\S*/", "/", line)
    line = re.sub(r"\d[\d.,]*", "0", line)
    return re.sub(r"[\s│]+", " ", line).strip()
