"""Scripts in docs/site/ that draw."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

ROOT = Path(__file__).parents[2]
SITE = ROOT / "docs" / "site"


def load(name: str) -> ModuleType:
    """A script by its name; it imports its neighbours, as it does where it is run."""
    spec = importlib.util.spec_from_file_location(name, SITE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with patch.object(sys, "path", [str(SITE), *sys.path]):
        spec.loader.exec_module(module)
    return module
