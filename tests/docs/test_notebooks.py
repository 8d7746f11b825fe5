"""The notebooks in examples/ run from their first cell to their last, and are kept without output."""

import json
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

from tests.support.pages import ROOT


def test_the_first_model_learns_what_it_was_not_told():
    scope, printed = run("first_model.ipynb")
    assert scope["aucs"][-1][1] > scope["best_auc"] - 0.05
    assert scope["same_genre"] > 0.8
    assert "the nearest video has the same genre" in printed
    assert scope["Picture"]("", [(0, 1), (2, 3)])._repr_svg_().startswith("<svg")


def run(name: str) -> tuple[dict[str, Any], str]:
    """What the cells define, and what they print."""
    notebook = json.loads((ROOT / "examples" / name).read_text(encoding="utf-8"))
    scope: dict[str, Any] = {}
    with redirect_stdout(StringIO()) as output:
        for number, cell in enumerate(notebook["cells"]):
            if cell["cell_type"] == "code":
                assert cell["outputs"] == [], f"cell {number} has output; clear it"
                exec(compile("".join(cell["source"]), f"{name}, cell {number}", "exec"), scope)
    return scope, output.getvalue()
