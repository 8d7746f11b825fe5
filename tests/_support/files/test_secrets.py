import pytest

from rowmesh._support.files.secrets import masked, places_of_passwords


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("redis://:p@ss@h:1/0", "redis://:***@h:1/0"),
        ("rediss://ann:p%2Fq@h", "rediss://ann:***@h"),
        ("redis://:${NAME}@h redis://:x$NAME@h", "redis://:${NAME}@h redis://:***@h"),
        ("redis://h:6379/0?db=1&password=secret&a=b", "redis://h:6379/0?db=1&password=***&a=b"),
        ("redis://ann@h:6379/0", "redis://ann@h:6379/0"),
        ("redis://:@h", "redis://:@h"),
        ("parquet:/data/a:b@c", "parquet:/data/a:b@c"),
        ("could not reach redis://:secret@h:1, trying again", "could not reach redis://:***@h:1, trying again"),
    ],
)
def test_passwords_are_masked_and_names_of_variables_stay(text, shown):
    assert masked(text) == shown
    assert list(places_of_passwords({"a": {"b": text}})) == ([] if text == shown else ["a.b"])
