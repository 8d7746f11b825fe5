"""Schemas: read from TOML, saved and read again, refused with the nearest name."""

import pytest

from rowmesh.data import Schema
from rowmesh.data.schema import AVAZU, CRITEO, criteo_schema
from rowmesh.errors import ConfigurationError

TOML = """
label = "clicked"
dense = ["price"]
dense_transform = "none"
categorical = [
    "user",
    { name = "tags", separator = "|" },
    { name = "weekday", column = "time", derive = "weekday", time_format = "%Y-%m-%d" },
]
"""


def test_toml(tmp_path):
    path = tmp_path / "shop.toml"
    path.write_text(TOML)
    schema = Schema.load(path)
    assert schema.features == ("user", "tags", "weekday")
    assert schema.source_columns == ("clicked", "price", "user", "tags", "time")


@pytest.mark.parametrize(
    "schema", [CRITEO, AVAZU, criteo_schema(3, "parquet"), Schema.parse({"label": "y", "categorical": ["a"]})]
)
def test_saved_schemas_come_back(tmp_path, schema):
    schema.save(tmp_path / "schema.toml")
    assert Schema.load(tmp_path / "schema.toml") == schema


def test_built_in():
    assert len(CRITEO.columns) == 40
    assert (len(CRITEO.dense), len(CRITEO.categorical)) == (13, 26)
    assert AVAZU.source_columns[:2] == ("click", "hour")
    assert "id" not in AVAZU.source_columns
    assert len(AVAZU.categorical) == 23


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("label = 'y'\ncategorical = ['a']\nlabl = 1", "unknown key 'labl'; did you mean 'label'?"),
        ("label = 'y'\ncategorical = [{name = 'a', seperator = '|'}]", "did you mean 'separator'?"),
        ("label = 'y'\ncategorical = []", "categorical is empty"),
        ("label = 'y'\ncategorical = ['a', 'a']", "named more than once: a"),
        ("label = 'y'\ndense = ['y']\ncategorical = ['a']", "named more than once: y"),
        ("categorical = ['a']", "label: Field required"),
        ("label = 'y'\ncategorical = [{name = 'a', separator = ''}]", "categorical.0.separator: separator is empty"),
        ("label = 'y'\ncategorical = [{name = 'a', separator = ' ', derive = 'weekday'}]", "both derive and separator"),
        (
            "label = 'y'\ncategorical = [{name = 'a', derive = 'weekday', time_format = '%s'}]",
            "'s' is a bad directive in format '%s'; for seconds since 1970 write 'unix'",
        ),
        ("label = 'y'\ncategorical = ['a']\ndelimiter = '§'", "delimiter must be one character of ASCII"),
        ("label = 'y'\ncategorical = ['a']\ndelimiter = ''", "delimiter must be one character of ASCII"),
        ('label = "y"\ncategorical = ["a"]\ndelimiter = "\\n"', "no line break"),
        ("label = 'y'\ncategorical = ['a']\nquote = '«'", "quote must be one character of ASCII"),
        ("label = 'y'\ncategorical = ['a']\ndelimiter = '|'\nquote = '|'", "both '|'; they must differ"),
        ("label = 'y'\ncategorical = ['a']\ndelimiter = '||'", "delimiter must be one character"),
        (
            "label = 'y'\ncategorical = ['user']\ncolumns = ['y', 'users']",
            "'user' is not among columns; did you mean 'users'?",
        ),
        ("label = ", "not valid TOML"),
    ],
)
def test_mistakes(tmp_path, toml, message):
    path = tmp_path / "bad.toml"
    path.write_text(toml)
    with pytest.raises(ConfigurationError) as error:
        Schema.load(path)
    assert message in str(error.value)
    assert str(path) in str(error.value)


def test_unknown_name():
    with pytest.raises(ConfigurationError, match=r"built in \(criteo, avazu\).*did you mean 'criteo'"):
        Schema.load("critteo")


def test_a_byte_order_mark_is_no_part_of_a_schema(tmp_path):
    path = tmp_path / "shop.toml"
    path.write_text('label = "y"\ncategorical = ["a"]\n', encoding="utf-8-sig")
    assert Schema.load(path).features == ("a",)
