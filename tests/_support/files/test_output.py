import os

import pytest

from rowmesh._support.files.output import check_output
from rowmesh.errors import RowmeshError


def test_what_may_not_be_written_is_refused_before_anything_is_done(tmp_path):
    read, other = tmp_path / "rows.csv", tmp_path / "scores.parquet"
    read.write_text("1,2\n")
    check_output(other, read=read, overwrite=False)
    hard, soft = tmp_path / "hard.csv", tmp_path / "soft.csv"
    os.link(read, hard)
    soft.symlink_to(read)
    for out in (read, hard, soft, tmp_path / "." / "rows.csv"):
        with pytest.raises(RowmeshError, match=r"is the file to read; name another"):
            check_output(out, read=read, overwrite=True)
    with pytest.raises(RowmeshError, match=r"is a folder; name a file in it"):
        check_output(tmp_path, read=read, overwrite=True)
    with pytest.raises(RowmeshError, match=r"no such folder"):
        check_output(tmp_path / "nowhere" / "scores.parquet", read=read, overwrite=True)
    other.write_text("")
    check_output(other, read=read, overwrite=True)
    with pytest.raises(RowmeshError, match=r"is there already; name another file with --out"):
        check_output(other, read=read, overwrite=False)
