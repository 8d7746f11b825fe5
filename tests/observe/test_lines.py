import io

from rowmesh.observe.lines import fitted, folded

LINE = "plan      cyclic, made for topology 1x2: rows hot 15,322, warm 0, cold 1,312,230; hot rows get 74 %"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_long_lines_go_on_below_their_text():
    parts = folded(LINE, 50)
    assert all(len(part) <= 50 for part in parts)
    assert parts[0].startswith("plan      cyclic, ")
    assert all(part.startswith(" " * 10) and part[10] != " " for part in parts[1:])
    assert " ".join(part.strip() for part in parts) == LINE


def test_a_word_that_is_too_long_stays_whole():
    path = "/" + "x" * 90
    assert path in folded(f"run       {path} is there", 40)[0] + folded(f"run       {path} is there", 40)[1]


def test_only_terminals_have_a_width(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert fitted([LINE], io.StringIO()) == [LINE]
    assert len(fitted([LINE], Terminal())) == 2
