from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmesh.errors import ConfigurationError
from rowmesh.run.resolve import anchored, parse_override, resolve, to_toml

MINIMAL = '[data]\nfolder = "data/criteo"\n'


@pytest.fixture
def write(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "clicks.toml"
        path.write_text(text)
        return path

    return write


def test_two_lines_are_enough(write):
    config = resolve(write(MINIMAL))
    assert config.data.batch_size == config.train.epochs == "auto"
    assert config.run.folder == "runs/clicks"


def test_overrides_win_and_are_typed(write):
    path = write(MINIMAL + "[train]\nepochs = 3\n")
    config = resolve(
        path, ["train.epochs=5", "model.top=[8]", "run.folder=out/x", "schedule.name=linear", "schedule.final=1e-1"]
    )
    assert config.train.epochs == 5
    assert config.model.top == [8]
    assert config.run.folder == "out/x"
    assert config.schedule.final == 0.1


def test_a_table_inherits_what_it_does_not_say(write):
    text = (
        MINIMAL
        + """
        [tables]
        dim = 8
        optimizer = { lr = 0.5, eps = 1e-3 }
        [tables.C3]
        optimizer.lr = 0.1
        [tables.C4]
        dim = 4
        optimizer = { name = "adam", beta1 = 0.8 }
    """
    )
    tables = resolve(write(text), ["tables.C5.dtype=bfloat16"]).tables
    assert (tables.of("C3").dim, tables.of("C3").optimizer.lr, tables.of("C3").optimizer.eps) == (
        8,
        0.1,
        1e-3,
    )
    assert (tables.of("C4").optimizer.name, tables.of("C4").optimizer.eps) == ("adam", None)
    assert (tables.of("C5").dtype, tables.of("C5").dim) == ("bfloat16", 8)
    assert tables.of("C9") is tables


def test_the_resolved_file_reads_back_equal(write, tmp_path):
    config = resolve(write(MINIMAL), ["tables.dim=8", "tables.C3.optimizer.lr=0.1", "tables.optimizer.eps=1e-3"])
    (tmp_path / "resolved.toml").write_text(to_toml(config))
    assert resolve(tmp_path / "resolved.toml") == config


def test_folders_mean_the_same_from_everywhere(write, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/home/ada")
    config = resolve(write(MINIMAL), ["run.folder=~/runs/a"])
    assert config.run.folder == "/home/ada/runs/a"
    assert config.data.folder == "data/criteo"
    monkeypatch.chdir(tmp_path)
    assert anchored(config).data.folder == str(tmp_path / "data/criteo")
    assert anchored(anchored(config)) == anchored(config)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.epoch=3", "train.epoch: unknown key; did you mean 'train.epochs'"),
        ("batch_size=3", "batch_size: unknown key; did you mean 'data.batch_size'"),
        ("tables.dimm=3", "tables.dimm: unknown key; did you mean 'tables.dim'"),
        ("tables.C3.dimm=3", "tables.C3.dimm: unknown key; did you mean 'tables.C3.dim'"),
        ("trian.steps=3", "trian.steps: unknown key; did you mean 'train.steps'"),
        ("tabels.C3.dim=3", "tabels: unknown key; did you mean the section 'tables'"),
        ("trian=3", "trian: unknown key; did you mean the section 'train'"),
        ("qqqq.x=3", "qqqq: unknown key; known sections: run, data, model"),
        ("train.qqqq=3", "train.qqqq: unknown key; known: train.epochs, train.steps"),
        ("train.epochs=0", "train.epochs: should be greater than or equal to 1, got 0"),
        ("train.epochs=many", "train.epochs: should be a valid integer, got 'many'"),
        ("schedule.name=cos", "schedule.name: should be 'constant', 'linear' or 'cosine', got 'cos'"),
        ("model.top=[8, -1]", "model.top: should be greater than or equal to 1, got -1"),
        ("tables.optimizer=adam", "is a section; give its keys, such as tables.optimizer.name"),
        ("train=3", "train: is a section; give its keys, such as train.epochs"),
        ("tables.out_of_range=-2", "tables.out_of_range: should be 'error', got -2"),
        ("optimizer.momentum=0.9", "optimizer: adam has no momentum; give optimizer.name=sgd"),
        ("train", "section.key=value, got 'train'"),
        ("a..b=3", "section.key=value"),
        ("data.folder.x=3", "data.folder is a value, not a section"),
        ("parallel.timeout_s=inf", "parallel.timeout_s: should be"),
        ("parallel.timeout_s=nan", "parallel.timeout_s: should be"),
        ("parallel.timeout_s=1e300", "parallel.timeout_s: should be less than or equal to 10000000"),
        ("parallel.timeout_s=0", "parallel.timeout_s: should be greater than or equal to 1"),
        ("tables.initializer.bound=nan", "tables.initializer.bound: should be a finite number, got nan"),
        ("tables.initializer.bound=-1", "tables.initializer.bound: should be greater than or equal to 0"),
        ("tables.initializer.mean=inf", "tables.initializer.mean: should be a finite number"),
        ("tables.initializer.std=nan", "tables.initializer.std: should be a finite number"),
        ("tables.initializer.value=-inf", "tables.initializer.value: should be a finite number"),
        ("tables.optimizer.beta1=nan", "tables.optimizer.beta1: should be"),
        ("tables.optimizer.beta2=1", "tables.optimizer.beta2: should be less than 1"),
        ("tables.optimizer.lr=inf", "tables.optimizer.lr: should be a finite number"),
        ("schedule.final=nan", "schedule.final: should be"),
        ("train.seed=9223372036854775808", "train.seed: should be less than 9223372036854775808"),
        ("train.steps=1e3", "train.steps: should be a valid integer, got 1000.0"),
        ("data.batch_size=9999999999", "data.batch_size: should be less than or equal to 2147483647"),
    ],
)
def test_mistakes_name_the_key_and_the_way_out(write, override, message):
    with pytest.raises(ConfigurationError) as error:
        resolve(write(MINIMAL), [override])
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("override", "other", "message"),
    [
        (
            "checkpoint.asynchronous=true",
            "checkpoint.every_steps=9",
            "checkpoint: asynchronous: there are no checkpoints",
        ),
        ("checkpoint.incremental=3", "checkpoint.every_minutes=0.5", "incremental: there are no checkpoints without"),
        ("schedule.final=0.1", "schedule.name=cosine", "schedule: final=0.1: constant does not fall; give name=linear"),
        ("pipeline.clustering=greedy", "pipeline.micro_batches=2", "pipeline: clustering: of micro-batches, and"),
        ("pipeline.sizes=light_ends", "pipeline.micro_batches=auto", "pipeline: sizes: of micro-batches, and"),
        ("tiers.folder=rows", "tables.storage=tiered", ": tiers.folder='rows' is of tiered tables, and there are none"),
        ("tiers.folder=rows", "tables.C3.storage=tiered", ": tiers.folder='rows' is of tiered tables"),
    ],
)
def test_what_would_do_nothing_is_refused(write, tmp_path, override, other, message):
    path = write(MINIMAL)
    with pytest.raises(ConfigurationError) as error:
        resolve(path, [override])
    assert message in str(error.value)
    assert ": : " not in str(error.value)
    (tmp_path / "resolved.toml").write_text(to_toml(resolve(path, [other])))  # all other keys at their defaults
    resolve(tmp_path / "resolved.toml", [override])


@pytest.mark.parametrize(
    ("text", "overrides", "source"),
    [
        ("", ["trian.steps=3"], "the command line: trian.steps: unknown key"),
        ("", ["train.steps=x", "tables.optimizer=adam"], "the command line: 2 mistakes"),
        ("", ["optimizer.momentum=0.9"], "the command line: optimizer: adam has no momentum"),
        ("optimizer.lr = 1\n", ["optimizer.momentum=0.9"], "{path} and the command line: optimizer: adam has no"),
        ("", ["tabels.C3.dim=3"], "the command line: tabels: unknown key"),
        ("train.steps = -1\n", [], "{path}: train.steps: should be"),
        ("train.steps = -1\n", ["train.epochs=3"], "{path}: train.steps: should be"),
        ("train.steps = -1\n", ["train.epochs=0"], "{path} and the command line: 2 mistakes"),
        ("train.steps = -1\n", ["train.steps=0.5"], "the command line: train.steps: "),
        ("tiers.folder = 'rows'\n", ["train.epochs=3"], "{path}: tiers.folder"),
    ],
)
def test_mistakes_say_where_they_were_made(write, text, overrides, source):
    path = write(f"{text}{MINIMAL}")
    with pytest.raises(ConfigurationError) as error:
        resolve(path, overrides)
    assert str(error.value).startswith(source.format(path=path)), error.value


def test_known_keys_are_listed_once(write):
    with pytest.raises(ConfigurationError, match=r"tables\.qqqq: unknown key; known: ") as error:
        resolve(write(MINIMAL), ["tables.qqqq=3"])
    assert str(error.value).count("tables.dim,") == 1


def test_a_byte_order_mark_is_no_part_of_a_configuration(write, tmp_path):
    path = write(MINIMAL)
    (tmp_path / "marked.toml").write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert resolve(tmp_path / "marked.toml", ["run.folder=a"]) == resolve(path, ["run.folder=a"])


def test_every_mistake_is_reported_once(write):
    with pytest.raises(ConfigurationError) as error:
        resolve(write(MINIMAL), ["tables.dim=x", "tables.C3.optimizer.lr=0.1", "train.steps=-1"])
    assert str(error.value).count("tables.dim: ") == 1
    assert "2 mistakes" in str(error.value)
    assert "tables.C3" not in str(error.value)


def test_files_that_cannot_be_read(write, tmp_path):
    with pytest.raises(ConfigurationError, match=r"nowhere.toml: No such file"):
        resolve(tmp_path / "nowhere.toml")
    with pytest.raises(ConfigurationError, match=r"clicks.toml is not TOML: Unclosed array"):
        resolve(write("data = [1"))
    with pytest.raises(ConfigurationError, match=r"data: missing; .* data.folder="):
        resolve(write(""))


@given(st.one_of(st.integers(-(2**60), 2**60), st.booleans(), st.floats(allow_nan=False, allow_infinity=False)))
def test_override_values_are_toml(value):
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    assert parse_override(f"a.b={text}") == (("a", "b"), value)


def test_another_model_takes_none_of_the_keys_of_the_one_in_the_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('data.folder = "clicks"\n[model]\nbottom = [8]\ntop = [4]\n')
    config = resolve(path, ["model.name=dcn_v2", "model.options.rank=3"])
    assert (config.model.name, config.model.options) == ("dcn_v2", {"rank": 3})
    assert resolve(path, ["model.name=dlrm"]).model.bottom == [8]
    with pytest.raises(ConfigurationError, match="model: top: of dlrm alone"):
        resolve(path, ["model.name=dcn_v2", "model.top=[3]"])


@pytest.mark.parametrize("given, other", [("plan", "strategy"), ("strategy", "plan")])
def test_a_plan_takes_the_place_of_a_strategy(write, given, other):
    path = write(f'{MINIMAL}[placement]\n{other} = "auto"\n')
    placement = resolve(path, [f"placement.{given}=balanced"]).placement
    assert (getattr(placement, given), getattr(placement, other)) == ("balanced", "")
    with pytest.raises(ConfigurationError, match="not both"):
        resolve(path, ["placement.plan=a", "placement.strategy=auto"])
