import contextlib
import json
import os
import shutil
from contextlib import ExitStack, nullcontext

import pytest

from rowmesh._support.faults import arm
from rowmesh.errors import RowmeshError
from rowmesh.run.run_folder import Claim, RunFolder, write_json, write_text


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path / "runs" / "a")


def begin(folder, **files):
    """A run that has written some files."""
    with Claim(folder, overwrite=False) as claim:
        claim.begin({"data.folder": "data"}, {"config.toml": "", **files})


def add_model(folder, text="{}"):
    """What stands for a model that is written."""
    folder.model.mkdir()
    (folder.model / "manifest.json").write_text(text)


def names(path):
    return sorted(each.name for each in path.iterdir())


def test_a_finished_run_stays_and_is_not_overwritten_by_accident(folder):
    begin(folder)
    assert names(folder.path) == ["config.toml", "manifest.json"]
    with (
        pytest.raises(RowmeshError, match=r"runs/a holds a run; .*run.folder=….*--overwrite"),
        Claim(folder, overwrite=False),
    ):
        pass
    assert folder.config.exists()
    with pytest.raises(RowmeshError, match="no data"), Claim(folder, overwrite=True):
        raise RowmeshError("no data")
    assert folder.config.exists(), "a run that cannot start takes nothing away"
    with Claim(folder, overwrite=True) as claim:
        claim.begin({}, {"environment.json": "{}"})
    assert names(folder.path) == ["environment.json", "manifest.json"]


def test_the_manifest_remembers_what_was_asked_for(folder):
    begin(folder)
    assert json.loads((folder.path / "manifest.json").read_text())["request"] == {"data.folder": "data"}


def stop_after(folder, *actions):
    with Claim(folder, overwrite=False) as claim:
        for action in actions:
            action(claim)
        raise RowmeshError("stopped")


def test_a_run_that_fails_before_it_starts_leaves_nothing(folder):
    with pytest.raises(RowmeshError, match="stopped"):
        stop_after(folder, lambda claim: folder.model.mkdir())
    assert not folder.path.parent.exists(), "the folders above were made for it"


def test_a_run_whose_first_files_cannot_be_written_leaves_nothing(folder):
    folder.path.parent.mkdir()
    with pytest.raises(UnicodeEncodeError):
        stop_after(folder, lambda claim: claim.begin({}, {"config.toml": "", "environment.json": "\ud800"}))
    assert names(folder.path.parent) == []


def test_a_run_that_fails_later_keeps_its_metrics(folder):
    with pytest.raises(RowmeshError, match="stopped"):
        stop_after(folder, lambda claim: claim.begin({}, {}), lambda claim: folder.metrics.write_text(""))
    assert names(folder.path) == ["manifest.json", "metrics.jsonl"]


def test_two_runs_exclude_each_other(folder):
    with (
        Claim(folder, overwrite=False),
        pytest.raises(RowmeshError, match="another run is writing"),
        Claim(folder, overwrite=True),
    ):
        pass
    with Claim(folder, overwrite=False):
        pass


def refused(folder, message):
    before = sorted(folder.path.rglob("*"))
    with pytest.raises(RowmeshError, match=message), Claim(folder, overwrite=True):
        pass
    assert sorted(folder.path.rglob("*")) == before


def test_only_runs_are_overwritten(folder):
    folder.path.mkdir(parents=True)
    folder.config.write_text("[tool]")
    folder.model.mkdir()
    refused(folder, "runs/a is no run, though its files have such names")
    (folder.path / "manifest.json").write_text('{"written_by": "a web app"}')
    refused(folder, "is no run")
    (folder.path / "thesis.tex").write_text("")
    refused(folder, r"what no run wrote \(thesis.tex\)")


@pytest.mark.parametrize("stranger", ["notes.md", "model/notes.md", "evaluation/plot.png"])
def test_what_somebody_put_into_a_run_is_not_removed(folder, stranger):
    begin(folder)
    (folder.path / stranger).parent.mkdir(exist_ok=True)
    (folder.path / stranger).write_text("")
    refused(folder, rf"what no run wrote \({stranger}\)")


def test_links_are_removed_and_what_they_lead_to_is_kept(folder, tmp_path):
    elsewhere = tmp_path / "large_disk"
    elsewhere.mkdir()
    begin(folder)
    (elsewhere / "manifest.json").write_text("{}")
    (elsewhere / "keep.txt").write_text("")
    folder.model.symlink_to(elsewhere)
    folder.metrics.symlink_to(elsewhere / "gone")
    with Claim(folder, overwrite=True) as claim:
        add_model(claim.begin({}, {}))
        claim.finish()
    assert names(folder.path) == ["manifest.json", "model"]
    assert names(elsewhere) == ["keep.txt", "manifest.json"]


def test_a_run_folder_may_be_a_link(folder, tmp_path):
    (tmp_path / "large_disk").mkdir()
    folder.path.parent.mkdir()
    folder.path.symlink_to(tmp_path / "large_disk")
    begin(folder)
    with Claim(folder, overwrite=True) as claim:
        claim.begin({}, {})
    assert names(tmp_path / "large_disk") == ["manifest.json"]
    assert folder.path.is_symlink()


def former_and_new(folder, *, is_written=True):
    """A claim on a folder with a run that has a model, where a new run has written its own, or is about to."""
    begin(folder, **{"first_plan.json": "former"})
    add_model(folder, "former")
    claim = Claim(folder, overwrite=True)
    claim.__enter__()
    new = claim.begin({}, {"config.toml": "new"})
    assert new.path == folder.path / "unfinished"
    if is_written:
        add_model(new, "new")
    return claim


def assert_is(folder, what):
    found = RunFolder(folder.path)
    assert (found.model / "manifest.json").read_text() == what
    assert (found.config.read_text() == "new") == (what == "new")


def test_a_run_with_a_model_stays_until_the_new_one_is_whole(folder):
    claim = former_and_new(folder)
    assert_is(folder, "former")
    assert claim.finish().path == folder.path
    claim.__exit__(None, None, None)
    assert_is(folder, "new")
    assert names(folder.path) == ["config.toml", "manifest.json", "model"]


def test_a_new_run_that_fails_leaves_the_former_and_its_own_metrics(folder):
    claim = former_and_new(folder, is_written=False)
    claim.__exit__(RowmeshError, RowmeshError("failed"), None)
    assert_is(folder, "former")
    with pytest.raises(RowmeshError, match="holds a run"), Claim(folder, overwrite=False):
        pass
    (folder.path / "unfinished" / "notes.md").write_text("")
    refused(folder, r"what no run wrote \(unfinished/notes.md\)")
    (folder.path / "unfinished" / "notes.md").unlink()
    with Claim(folder, overwrite=True) as claim:
        add_model(claim.begin({}, {"config.toml": "new"}), "new")
        claim.finish()
    assert_is(folder, "new")


POINTS = ["run.vacated", "run.exchanged", "run.former"]


@pytest.mark.parametrize("at", [*(f"run.exchange@{number}" for number in range(1, 8)), *POINTS])
def test_a_crash_amid_the_exchange_loses_no_run(folder, at):
    claim = former_and_new(folder)
    with arm(f"{at}=raise"), pytest.raises(RuntimeError, match="injected"):
        claim.finish()
    claim.__exit__(RuntimeError, RuntimeError(), None)
    assert_is(folder, "new")
    with pytest.raises(RowmeshError, match="holds a run"), Claim(folder, overwrite=False):
        pass
    assert_is(folder, "new")
    assert names(folder.path) == ["config.toml", "manifest.json", "model"]


def crash_at_the_end(folder, at):
    """Leaves what a process leaves that is killed at a point of `finish`."""
    claim = former_and_new(folder)
    with arm(f"{at}=raise"), pytest.raises(RuntimeError, match="injected"):
        claim.finish()
    claim.__exit__(RuntimeError, RuntimeError(), None)


def test_a_crash_between_the_written_model_and_the_exchange_loses_no_model(folder):
    crash_at_the_end(folder, "run.settle")
    assert_is(folder, "former")
    said = []
    with Claim(folder, overwrite=False, resumes=True, log=said.append) as claim:
        assert claim.has_completed
        assert claim.unfinished.path == folder.path
    assert_is(folder, "new")
    assert names(folder.path) == ["config.toml", "manifest.json", "model"]
    assert said == [f"former    gone from {folder.path}: the run that replaces it had written its model"]
    with Claim(folder, overwrite=False, resumes=True) as claim:
        assert not claim.has_completed


@pytest.mark.parametrize("at", [*(f"run.exchange@{number}" for number in range(1, 8)), *POINTS])
def test_an_exchange_that_the_disk_refuses_is_tried_again(folder, at):
    claim = former_and_new(folder)
    with arm(f"{at}=EIO"), nullcontext() if at == "run.former" else pytest.raises(OSError, match="Input/output error"):
        claim.finish()
    assert claim.settle().path == folder.path
    assert claim.finish().path == folder.path
    claim.__exit__(None, None, None)
    assert_is(folder, "new")
    with Claim(folder, overwrite=False, resumes=True):
        assert not (folder.path / "unfinished").exists()


def test_before_the_exchange_nothing_changes_where_a_stranger_is_in_the_way(folder):
    crash_at_the_end(folder, "run.settle")
    (folder.path / "notes.md").write_text("")
    refused(folder, r"what no run wrote \(notes.md\)")
    assert_is(folder, "former")


def test_what_came_since_a_crash_is_not_replaced_by_a_file_of_the_run(folder):
    crash_at_the_end(folder, "run.exchange@1")
    (folder.path / "evaluation").mkdir()
    (folder.path / "evaluation" / "test.json").write_text("by hand")
    assert folder.evaluation("test").parent == folder.path / "unfinished" / "evaluation"
    folder.evaluations.mkdir()
    with pytest.raises(RowmeshError, match=r"runs/a holds evaluation, which came there while a run took"):
        Claim(folder, overwrite=True).__enter__()
    assert_is(folder, "new")
    assert (folder.path / "evaluation" / "test.json").read_text() == "by hand"
    shutil.rmtree(folder.path / "evaluation")
    with Claim(folder, overwrite=False, resumes=True):
        assert names(folder.path) == [".lock", "config.toml", "evaluation", "manifest.json", "model"]


@pytest.mark.parametrize("left", ["all", "some", "none"])
def test_what_is_left_of_the_former_run_is_removed_and_nothing_else(folder, left):
    crash_at_the_end(folder, "run.former")
    former = folder.path / "unfinished" / ".former"
    assert names(former) == ["config.toml", "first_plan.json", "manifest.json", "model"]
    if left == "some":
        (former / "manifest.json").unlink()
    elif left == "none":
        shutil.rmtree(former)
    folder.report.write_text("page")
    with Claim(folder, overwrite=False, resumes=True):
        pass
    assert_is(folder, "new")
    assert names(folder.path) == ["config.toml", "manifest.json", "model", "report.html"]


class Killed(BaseException):
    """As SIGKILL it comes between two operations on files, and none comes after it."""


OPERATIONS = ["mkdir", "rename", "replace", "unlink", "remove", "rmdir"]


@contextlib.contextmanager
def killed_after(num_operations):
    """Lets a block do so many operations that change names of files; yields a list, of those that it did."""
    done = []

    def counted(operation):
        def call(*args, **kwargs):
            if len(done) == num_operations:
                raise Killed
            done.append((operation.__name__, *args))
            return operation(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Killed):
        for name in OPERATIONS:
            patch.setattr(os, name, counted(getattr(os, name)))
        yield done


def run_with(folder, text):
    """What a run writes besides its first files, as `rowmesh train`, `evaluate` and `report` do."""
    folder.metrics.write_text(text)
    folder.checkpoints.mkdir()
    if text == "former":
        folder.first_plan.write_text(text)
        folder.trace.write_text(text)
        evaluate(folder, "validation", text)
    add_model(folder, text)


def evaluate(folder, split, text):
    folder.evaluations.mkdir(exist_ok=True)
    folder.evaluation(split).write_text(text)
    folder.report.write_text(text)


def what_is_read(folder):
    """Which run a reader finds: all of one."""
    found = RunFolder(folder.path)
    text = (found.model / "manifest.json").read_text()
    assert found.config.read_text() == found.metrics.read_text() == text
    assert found.first_plan.exists() == found.trace.exists() == (text == "former")
    assert found.checkpoints.is_dir()
    return text


def replace_and_die(folder, kills):
    """Replaces a run, and dies after so many operations, then again amid what is left to do, …; between two deaths the
    run that is found is evaluated, and its page is made. Returns splits that were evaluated of the new run, and whether
    all was done before the last death.
    """
    with Claim(folder, overwrite=False) as claim:
        run_with(claim.begin({}, {"config.toml": "former"}), "former")
    evaluated, is_done = [], False
    for number, kill in enumerate(kills):
        claim = Claim(folder, overwrite=True)
        if not number:
            claim.__enter__()
            run_with(claim.begin({}, {"config.toml": "new"}), "new")
        with killed_after(kill) as did:
            claim.finish() if not number else claim.__enter__()
        claim.__exit__(Killed, Killed(), None)
        found, is_done = what_is_read(folder), len(did) < kill
        evaluate(RunFolder(folder.path), f"split{number}", found)
        evaluated += [f"split{number}.json"] * (found == "new")
    return evaluated, is_done


def check_replaced(folder, kills):
    """Replaces a run with these deaths on the way; returns whether all was done before the last."""
    evaluated, is_done = replace_and_die(folder, kills)
    with Claim(folder, overwrite=False, resumes=True):
        pass
    assert what_is_read(folder) == "new"
    expected = {"checkpoints", "config.toml", "manifest.json", "metrics.jsonl", "model"}
    if evaluated:
        expected |= {"evaluation", "report.html"}
        assert names(folder.evaluations) == evaluated
        assert folder.report.read_text() == "new"
    assert {*names(folder.path)} == expected
    shutil.rmtree(folder.path)
    return is_done


def test_a_crash_between_any_two_operations_loses_nothing(folder, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    num_operations = 0
    while not check_replaced(folder, [num_operations]):
        num_operations += 1
    assert num_operations > 20


@pytest.mark.slow
def test_nor_does_another_crash_between_any_two_of_those_that_are_left(folder, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    num_cases, first, is_last = 0, 0, False
    while not is_last:
        second = 0
        while not check_replaced(folder, [first, second]):
            second += 1
        num_cases, first = num_cases + second, first + 1
        is_last = check_replaced(folder, [first])
    assert num_cases > 400


@pytest.mark.parametrize("former", ["nothing", "no model", "a model"])
def test_a_run_that_is_killed_while_it_begins_can_be_started_again(tmp_path, monkeypatch, former):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    number, is_done = 0, False
    while not is_done:
        folder = RunFolder(tmp_path / f"{number}")
        if former != "nothing":
            begin(folder, **{"plan.json": "", "first_plan.json": ""})
        if former == "a model":
            add_model(folder)
        claim = Claim(folder, overwrite=True)
        claim.__enter__()
        with killed_after(number) as did:
            claim.begin({}, {"config.toml": "new"})
        claim._has_begun = True  # what is dead tidies nothing
        claim.__exit__(Killed, Killed(), None)
        with Claim(folder, overwrite=True) as claim:
            begun = claim.begin({}, {"config.toml": "new"}).path
        assert names(begun) == ["config.toml", "manifest.json"]
        number, is_done = number + 1, len(did) < number
    assert number > 2


def test_what_a_model_needs_beside_it_is_written_again(folder):
    said = []
    with Claim(folder, overwrite=False, log=said.append) as claim:
        claim.begin({}, {"config.toml": "", "plan.json": ""})
        folder.plan.unlink()
        (folder.path / "manifest.json").unlink()
        assert claim.settle({"first_plan.json": "first"}).path == folder.path
    assert names(folder.path) == ["config.toml", "first_plan.json", "manifest.json", "plan.json"]
    assert said == [f"{folder.path} lacked manifest.json, plan.json; written again"]


@pytest.mark.parametrize("is_overwritten", [False, True])
@pytest.mark.parametrize(("left", "place"), [("nothing", "a"), ("other files", "a-2"), ("another run", "a-2")])
def test_a_folder_that_is_gone_is_made_again(folder, tmp_path, left, place, is_overwritten):
    if is_overwritten:
        begin(folder)
        add_model(folder)
    with Claim(folder, overwrite=True) as claim, ExitStack() as others:
        claim.begin({}, {"config.toml": "mine"})
        folder.path.rename(tmp_path / "renamed")
        if left == "other files":
            folder.path.mkdir()
            (folder.path / "notes.md").write_text("")
        elif left == "another run":
            others.enter_context(Claim(folder, overwrite=False)).begin({}, {"config.toml": "theirs"})
        settled = claim.settle()
        assert settled.path == folder.path.with_name(place)
        assert settled.config.read_text() == "mine"
        add_model(settled)
        assert claim.finish().path == settled.path
        if left == "another run":
            with pytest.raises(RowmeshError, match="another run is writing"), Claim(folder, overwrite=True):
                pass


def test_a_model_that_is_removed_while_it_is_written_is_written_again(folder):
    with Claim(folder, overwrite=False) as claim:
        claim.begin({}, {"config.toml": ""})
        with pytest.raises(FileNotFoundError, match="removed while it was written"):
            claim.finish()


def test_what_a_crash_left_in_the_middle_of_a_write_is_overwritten(folder):
    begin(folder)
    (folder.path / ".environment.json.partial").write_text("{")
    (folder.path / ".lock").write_text("")
    with Claim(folder, overwrite=True) as claim:
        claim.begin({}, {})
    assert names(folder.path) == ["manifest.json"]


@pytest.mark.parametrize("where", ["", "unfinished"])
@pytest.mark.parametrize("goes_on", [True, False])
def test_what_a_killed_run_left_in_the_middle_of_a_write_goes_with_the_next(folder, goes_on, where):
    begin(folder)
    if where:
        add_model(folder)
        with Claim(folder, overwrite=True) as claim:
            claim.begin({}, {})
    others = [".test.json.4711.0.partial", ".report.html.4711.0.partial"]  # of commands that may be at work
    for name in (".manifest.json.4711.0.partial", ".config.toml.4711.2.partial", *others):
        (folder.path / where / name).write_text("{")
    with Claim(folder, overwrite=not goes_on, resumes=goes_on) as claim:
        assert sorted(path.name for path in (folder.path / where).glob("*.partial")) == sorted(others)
        (claim.resume if goes_on else claim.begin)({}, {})


def test_a_write_that_fails_leaves_what_was_there(folder):
    begin(folder)
    (folder.path / "evaluation").mkdir()
    write_json(folder.evaluation("test"), {"auc": 0.5})
    with pytest.raises(TypeError):
        write_json(folder.evaluation("test"), {"auc": object()})
    with pytest.raises(UnicodeEncodeError):  # fails in the middle, as a full disk does
        write_text(folder.evaluation("test"), "{" * 100_000 + "\ud800")
    assert json.loads(folder.evaluation("test").read_text()) == {"auc": 0.5}
    assert names(folder.path / "evaluation") == ["test.json"]


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(RowmeshError, match="Not a directory"),
        Claim(RunFolder(tmp_path / "file/x"), overwrite=True),
    ):
        pass


@pytest.mark.parametrize("whole", ["[]", "5", '{"a": 1}', '{"former": [1]}', '{"former": []}', "{"])
def test_what_no_run_wrote_is_not_removed_with_an_interrupted_run(tmp_path, whole):
    """Nor is a damaged list of files a traceback."""
    unfinished = tmp_path / "run" / "unfinished"
    unfinished.mkdir(parents=True)
    (unfinished / "whole.json").write_text(whole)
    (unfinished / "notes.txt").write_text("mine")
    with pytest.raises(RowmeshError, match=r"unfinished/whole.json is damaged|holds what no run wrote"):
        Claim(RunFolder(tmp_path / "run"), overwrite=False).__enter__()
    assert (unfinished / "notes.txt").read_text() == "mine"
