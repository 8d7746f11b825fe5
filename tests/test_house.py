"""The map of the package: rooms in layers, no circles, an owner for each attribute. Read from the sources."""

import ast
import functools
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1] / "rowmesh"
# A room may import those further up, never those further down.
LIBRARY = (
    "errors",
    "_support",
    "ops",
    "sparse",
    "tables",
    "tensor_train",
    "mesh",
    "placement",
    "exchange",
    "collection",
    "checkpoint",
    "pipeline",
)
PROGRAM = ("models", "observe", "data", "publish", "run", "report", "doctor", "cli", "__main__")
LAYERS = (*LIBRARY, *PROGRAM)
# Assignments to attributes of objects other than self, and to their items: these numbers only fall.
FOREIGN_WRITES = {"exchange": 0, "collection": 8, "tables": 57, "ops": 41, "run": 22, "mesh": 19}


@functools.cache
def trees():
    """The syntax tree of each module, by its name without `rowmesh.`; a package is its `__init__`."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = ast.parse(path.read_text())
    return found


@functools.cache
def imports():
    """Module → modules that it imports, at the top, in functions and for type checkers alike.

    A name that a package's `__init__` hands on counts as an import of the module that has it; what an `__init__` takes
    from its own package does not count.
    """
    modules, handed_on = trees(), defaultdict(dict)
    for name, tree in modules.items():
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rowmesh."):
                handed_on[name] |= {alias.asname or alias.name: node.module[8:] for alias in node.names}
    edges = defaultdict(set)
    for name, tree in modules.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "rowmesh":
                for alias in node.names:
                    target = node.module[8:]
                    if f"{target}.{alias.name}".lstrip(".") in modules:
                        target = f"{target}.{alias.name}".lstrip(".")
                    while is_package(target) and alias.name in handed_on[target]:
                        target = handed_on[target][alias.name]
                    edges[name].add(target)
            elif isinstance(node, ast.Import):
                edges[name] |= {alias.name[8:] for alias in node.names if alias.name.startswith("rowmesh.")}
    return {
        name: {target for target in targets if target not in ("", name) and not target.startswith(f"{name}.")}
        for name, targets in edges.items()
    }


def is_package(name):
    return (ROOT.joinpath(*name.split(".")) / "__init__.py").exists()


def room(name):
    return name.split(".")[0]


def test_every_room_has_a_layer():
    assert {room(name) for name in trees() if name} == set(LAYERS)


def test_imports_point_down_the_layers():
    rank = {name: number for number, name in enumerate(LAYERS)}
    assert not [
        f"{name} imports {target}"
        for name, targets in imports().items()
        for target in targets
        if name and rank[room(target)] > rank[room(name)]
    ]


def test_files_import_each_other_in_no_circle():
    def reached(start):
        found, waiting = set(), [start]
        while waiting:
            new = imports().get(waiting.pop(), set()) - found
            found |= new
            waiting += new
        return found

    assert {name for name in imports() if name in reached(name)} == set()


def test_models_know_nothing_of_ranks():
    rooms = {
        room(target)
        for name, targets in imports().items()
        for target in targets
        if room(name) == "models" and name != "models.linear_layers"  # which measures, and has ranks agree
    }
    assert rooms - {"models"} <= {"errors", "ops", "_support"}


def test_the_root_has_three_files():
    assert {path.name for path in ROOT.glob("*.py")} == {"__init__.py", "__main__.py", "errors.py"}


def foreign_writes(tree):
    """Assignments to attributes of anything but self or cls, and to items of such attributes."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute | ast.Subscript) or not isinstance(node.ctx, ast.Store):
            continue
        leaf = node
        while isinstance(leaf, ast.Subscript):
            leaf = leaf.value
        if isinstance(leaf, ast.Attribute) and ast.unparse(leaf.value) not in ("self", "cls"):
            yield ast.unparse(node)


def test_writes_are_seen():
    own = "self.a = cls.a = a.b()[0] = 1; self.a[0] += 1; a[0] = b.c"
    assert not list(foreign_writes(ast.parse(own)))
    foreign = "a.b = 1; a.b[0] = 1; self.a.b[0][1:] += 1; x, (a.c, *y[a.d].e) = 1; a.f: int = 1\nfor a.g in (): ..."
    assert sorted(foreign_writes(ast.parse(foreign))) == sorted(
        ["a.b", "a.b[0]", "self.a.b[0][1:]", "a.c", "y[a.d].e", "a.f", "a.g"]
    )


def test_each_attribute_has_one_writer():
    found = defaultdict(list)
    for name, tree in trees().items():
        if (place := room(name)) in FOREIGN_WRITES:
            found[place] += [f"{name}: {written}" for written in foreign_writes(tree)]
    for place, most in FOREIGN_WRITES.items():
        assert len(found[place]) <= most, f"{len(found[place])}: " + "\n".join(found[place])


def test_the_page_for_contributors_lists_the_layers():
    text = (ROOT.parent / "CONTRIBUTING.md").read_text()
    for layers in (LIBRARY, PROGRAM[:-1]):  # all but __main__
        assert " → ".join(layers) in " ".join(text.split())
