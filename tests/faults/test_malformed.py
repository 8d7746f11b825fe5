"""Files of a run and a model that somebody or something changed: a clear error, or what they say."""

import copy
import json
import tomllib
from pathlib import Path

import hypothesis.strategies as st
import pytest
import tomli_w
import torch
from hypothesis import HealthCheck, assume, given, settings

from rowmesh._support.files.manifest import Manifest as FolderManifest
from rowmesh.checkpoint import CheckpointError, load, read_manifest
from rowmesh.checkpoint.manifest import Manifest
from rowmesh.checkpoint.rows import SavedRows
from rowmesh.errors import ConfigurationError, RowmeshError
from rowmesh.placement import Plan, TableShape
from rowmesh.placement.topology import Topology
from rowmesh.run.commands import run_evaluation, run_training
from rowmesh.run.export import export
from rowmesh.run.placement import Placement
from rowmesh.run.resolve import resolve, to_toml
from rowmesh.run.run_folder import Claim, RunFolder
from tests.faults.test_checkpoints import collection, rows, save
from tests.run import conftest as shared
from tests.support.clicks import write_config
from tests.support.prepared import sealed

clicks, config_file, _one_thread = shared.clicks, shared.config_file, shared._one_thread

MANY = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
SCALARS = [
    None,
    True,
    False,
    0,
    1,
    -1,
    7,
    2**31,
    2**53 + 1,
    2**62,
    2**63,
    -(2**63) - 1,
    10**30,
    0.5,
    -1e300,
    1e999,
    "",
    "x",
    "../x",
    "/etc/passwd",
    "..",
    "a/b",
    "a\0b",
    "item.0.values.npy",
    "float16",
    "int64",
    "Tensor",
    "auto",
    "cyclic",
]
VALUES = st.sampled_from(SCALARS) | st.lists(st.sampled_from(SCALARS), max_size=3) | st.builds(dict)
DEEP = "[" * 100_000


def places(value, path=()):
    """The paths of all values in nested lists and dictionaries."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        yield from places(each, (*path, key))


@st.composite
def mutations(draw, original):
    """The original with one to three changes."""
    value = copy.deepcopy(original)
    for _ in range(draw(st.integers(1, 3))):
        paths = [path for path in places(value) if path]
        if not paths:
            break
        *above, key = draw(st.sampled_from(paths))
        node = value
        for part in above:
            node = node[part]
        match draw(st.sampled_from(["set", "remove", "copy", "rename"])):
            case "set":
                node[key] = draw(VALUES)
            case "remove":
                del node[key]
            case "copy":
                other = draw(st.sampled_from(paths))
                found = value
                for part in other:
                    try:
                        found = found[part]
                    except (KeyError, IndexError, TypeError):
                        break
                node[key] = copy.deepcopy(found)
            case "rename":
                if isinstance(node, dict):
                    node[draw(st.sampled_from(["x", "../x", "item", "format", ""]))] = node.pop(key)
                else:
                    node.append(node[key])
    return value


@st.composite
def spoilt(draw, content):
    """The bytes of a file, cut off, or with some changed."""
    content = bytearray(content)
    if draw(st.booleans()):
        return bytes(content[: draw(st.integers(0, len(content)))])
    for _ in range(draw(st.integers(1, 3))):
        content[draw(st.integers(0, len(content) - 1))] = draw(st.integers(0, 255))
    return bytes(content)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save(folder, collection(1), {"seed": 1}, metadata={"steps": 3})
    return folder, (folder / "manifest.json").read_bytes()


def without_own_sum(content):
    """The values of a manifest, so that what is changed in them is looked at."""
    values = json.loads(content)
    del values["xxh3_64"]
    return values


def refusal(kind, action):
    """What an error of that kind says; None where there is none. Any other is one too many."""
    try:
        action()
    except kind as error:
        return str(error)
    return None


def check_model(folder, content):
    """Loads what can be loaded: it is either refused or the model that was saved."""
    (folder / "manifest.json").write_bytes(content)
    found = collection(99)

    def read():
        manifest = read_manifest(folder)
        load(folder, found)
        for name in manifest.tables:
            SavedRows(folder, manifest, name).read(range(min(5, manifest.tables[name].num_rows)))

    said = refusal(CheckpointError, read)
    assert torch.equal(rows(found), rows(collection(1))) if said is None else str(folder) in said or "table" in said


@MANY
@given(data=st.data())
def test_a_changed_manifest_of_a_model(model, data):
    folder, original = model
    check_model(folder, sealed(data.draw(mutations(without_own_sum(original)))).encode())


@MANY
@given(data=st.data())
def test_a_spoilt_manifest_of_a_model(model, data):
    folder, original = model
    check_model(folder, data.draw(spoilt(original)))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("folder",), "../../etc", "folder '../../etc' is no name that rowmesh gives"),
        (("tables", "item", "parts", 0, "files", "values"), "../../secret", "has a file '../../secret', which is no"),
        (("tables", "item", "num_rows"), 10**30, "tables.item.num_rows: "),
        (("tables", "item", "num_rows"), 2**62, "files hold 40 rows where each of 4611686018427387904 must be"),
        (("tables", "item", "parts", 0, "ranges", 0, "stride"), -1, "stride: Input should be greater than or equal"),
        (("tables", "item", "parts", 0, "ranges", 0, "stride"), 2, "'item' has 40 rows, and a file those up to 78"),
        (("tables", "item", "parts", 0, "ranges", 0, "count"), 39, "files hold 39 rows where each of 40 must be in"),
        (("tables", "item", "parts", 0, "ranges", 0, "count"), True, "count: Input should be a valid integer"),
        (("tables", "item", "dtype"), "Tensor", "dtype 'Tensor', which is none of rows"),
        (("checksums", "dense.pt"), None, "dense.pt"),
        (("checksums",), {}, "no checksum of dense.pt"),
        (("checksums",), {"x": {"size_bytes": 1, "block_bytes": 1, "xxh3_64": [""]}}, "no checksum of dense.pt"),
        (("world_size",), "2", "world_size: Input should be a valid integer"),
        (("format",), [1], r"has format \[1\]; this rowmesh reads 1"),
    ],
)
def test_what_no_writer_wrote_is_said(model, path, value, message):
    folder, original = model
    values = node = without_own_sum(original)
    for part in path[:-1]:
        node = node[part]
    node[path[-1]] = value
    with pytest.raises(CheckpointError, match=message):
        Manifest.from_json(sealed(values), folder / "manifest.json")


def test_rows_in_two_files_are_refused(model):
    folder, original = model
    values = without_own_sum(original)
    part = values["tables"]["item"]["parts"][0]
    part["ranges"] = [{"start": 0, "stride": 1, "count": 20}, {"start": 19, "stride": 1, "count": 20}]
    with pytest.raises(CheckpointError, match="files hold 40 rows where each of 40 must be in exactly one"):
        Manifest.from_json(sealed(values), folder / "manifest.json")


@pytest.mark.slow
@MANY
@given(data=st.data())
def test_a_spoilt_file_of_rows_that_is_not_verified(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("spoilt")
    save(folder, collection(1), {"seed": 1})
    path = data.draw(st.sampled_from(sorted(path for path in folder.rglob("*") if path.suffix in (".npy", ".pt"))))
    path.write_bytes(data.draw(spoilt(path.read_bytes()[:400])) + path.read_bytes()[400:])
    said = refusal(CheckpointError, lambda: load(folder, collection(99), verify=False))
    assert said is None or path.name in said


PLAN = Plan.cyclic([TableShape("item", 40, 16, 16, 4)], 4)


def check_plan(path):
    def read():
        plan = Plan.load(path)
        _ = Placement(plan, "file").text, plan.memory_bytes
        plan.check_fits([table.shape for table in PLAN.tables], 4, 4)

    refusal(ConfigurationError, read)


@MANY
@given(data=st.data())
def test_a_changed_plan(tmp_path, data):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data.draw(mutations(json.loads(PLAN.to_json())))))
    check_plan(path)
    path.write_bytes(data.draw(spoilt(PLAN.to_json().encode())))
    check_plan(path)


def toml(value):
    """TOML has no null, and its integers are short."""
    try:
        return tomli_w.dumps(value)
    except (TypeError, AttributeError, ValueError):
        return None


def topology_values():
    text = (Path(__file__).parents[2] / "rowmesh" / "placement" / "topologies" / "2x4.toml").read_text()
    matrix = {
        "num_nodes": 1,
        "ranks_per_node": 2,
        "cost_s_per_byte": [[0.0, 1.0], [1.0, 0.0]],
        "latency_s": [[0.0, 1.0]] * 2,
    }
    return [tomllib.loads(text), matrix]


@MANY
@given(data=st.data())
def test_a_changed_topology(tmp_path, data):
    path = tmp_path / "topology.toml"
    original = data.draw(st.sampled_from(topology_values()))
    text = toml(data.draw(mutations(original)))
    assume(text is not None)
    for content in (text.encode(), data.draw(spoilt(text.encode() or b" "))):
        path.write_bytes(content)
        said = refusal(ConfigurationError, lambda: Topology.load(path).is_uniform)
        assert said is None or "topology" in said


@MANY
@given(data=st.data())
def test_a_changed_configuration(config_file, tmp_path, data):
    path = tmp_path / "changed.toml"
    text = toml(data.draw(mutations(tomllib.loads(to_toml(resolve(config_file))))))
    assume(text is not None)
    for content in (text.encode(), data.draw(spoilt(text.encode() or b" "))):
        path.write_bytes(content)
        said = refusal(ConfigurationError, lambda: resolve(path))
        assert said is None or str(path) in said


@MANY
@given(data=st.data())
def test_a_changed_manifest_of_a_run(tmp_path_factory, data):
    folder = RunFolder(tmp_path_factory.mktemp("run"))
    folder.config.write_text("mine")
    FolderManifest(kind="run", request={"data": "x"}, files=("config.toml",)).write(folder.path)
    path = folder.path / "manifest.json"
    values, content = json.loads(path.read_text()), path.read_bytes()
    if data.draw(st.booleans()):
        path.write_text(json.dumps(data.draw(mutations(values))))
    else:
        path.write_bytes(data.draw(spoilt(content)))
    said = refusal(RowmeshError, lambda: Claim(folder, overwrite=True).__enter__().__exit__(None, None, None))
    assert said is None or str(folder.path) in said
    assert folder.config.read_text() == "mine"


@pytest.mark.parametrize("name", ["manifest.json", "plan.json", "topology.toml", "config.toml"])
def test_deeply_nested_files(tmp_path, name):
    path = tmp_path / name
    path.write_text(f"x = {DEEP}" if name.endswith("toml") else DEEP)
    with pytest.raises(RowmeshError, match=str(tmp_path)):
        {
            "manifest.json": lambda: read_manifest(tmp_path),
            "plan.json": lambda: Plan.load(path),
            "topology.toml": lambda: Topology.load(path),
            "config.toml": lambda: resolve(path),
        }[name]()
    assert FolderManifest.read(tmp_path) is None


@pytest.fixture(scope="module")
def run(tmp_path_factory, clicks):
    folder = tmp_path_factory.mktemp("evaluated")
    run_training(resolve(write_config(folder / "clicks.toml", folder / "run", clicks.folder, "[train]", "steps = 2")))
    return RunFolder(folder / "run")


@pytest.mark.parametrize("command", [run_evaluation, lambda run: export(run, run.parent / "out", overwrite=True)])
@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("model/manifest.json", lambda text: "", "is no checkpoint manifest"),
        ("model/manifest.json", lambda text: text.replace('"fingerprint"', '"finger"'), "does not say what it was tra"),
        ("model/manifest.json", lambda text: text.replace('"fingerprint": {', '"fingerprint": 3, "x": {'), "not say"),
        (
            "model/manifest.json",
            lambda text: text.replace('"data": "', '"x": "'),
            "does not say what it was",
        ),
        ("config.toml", lambda text: text[:40], "config.toml"),
        ("config.toml", lambda text: "", "config.toml"),
        ("plan.json", lambda text: "{", "plan.json: not a plan"),
    ],
)
def test_commands_say_which_file_is_malformed(run, command, name, change, message):
    path = run.path / name
    text = path.read_text()
    changed = change(text)
    path.write_text(sealed(json.loads(changed)) if path.name == "manifest.json" and changed else changed)
    try:
        if command is not run_evaluation and name == "plan.json":
            assert command(run.path)  # needs no plan
        else:
            with pytest.raises(RowmeshError, match=message):
                command(run.path)
    finally:
        path.write_text(text)


@pytest.mark.parametrize("command", [run_evaluation, lambda run: export(run, run.parent / "other")])
@pytest.mark.parametrize("size", [0, 40])
@pytest.mark.parametrize("name", ["C1.0.values.npy", "dense.pt"])
def test_commands_say_which_file_is_cut_off(run, command, name, size):
    path = next(run.path.rglob(name))
    content = path.read_bytes()
    path.write_bytes(content[:size])
    try:
        with pytest.raises(CheckpointError, match=rf"{name} has {size} bytes where {len(content):,} were written"):
            command(run.path)
    finally:
        path.write_bytes(content)


def test_a_network_that_is_none_is_said(run):
    manifest = read_manifest(run.model)
    path = run.model / manifest.folder / "dense.pt"
    content = path.read_bytes()
    for values in ({}, {"network": 3}, 3):
        torch.save(values, path)
        for command in (run_evaluation, lambda run, verify: export(run, run.parent / "more", verify=verify)):
            with pytest.raises(RowmeshError):
                command(run.path, verify=False)
    path.write_bytes(content)
