"""The list of slow cases names tests that there are, each case once."""

from pathlib import Path

from tests.support.slow import LIST, slow_cases

ROOT = Path(__file__).parents[2]


def test_every_line_is_a_case():
    lines = [line for line in LIST.read_text().splitlines() if line and not line.startswith("#")]
    assert lines == sorted(set(lines))
    for case in slow_cases():
        file, _, rest = case.partition("::")
        name = rest.split("::")[-1].partition("[")[0]
        assert f"def {name}(" in (ROOT / file).read_text(), case
