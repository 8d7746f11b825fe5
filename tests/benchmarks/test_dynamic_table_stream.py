"""Training from raw files: all contestants read the same rows."""

import numpy as np

from benchmarks.dynamic_table_stream import NUM_IDS, run, write_rows
from rowmesh.data.quarantine import NoBadRows
from rowmesh.data.raw import FileSource, RawLoader


class Ratios:
    """A report that keeps ratios."""

    def __init__(self):
        self.ratios = {}

    def line(self, **record):
        assert record["samples_per_s"] > 0

    def ratio(self, case, ratio):
        self.ratios[case] = ratio


def test_files_have_the_same_rows(tmp_path):
    files = write_rows(tmp_path, 50)
    batches = {}
    for kind, (file, schema) in files.items():
        loader = RawLoader(FileSource([file], schema), schema, batch_size=50, quarantine=NoBadRows(), prefetch=0)
        (batches[kind],) = loader
    for batch in batches.values():
        assert np.array_equal(batch.dense.numpy(), batches["text"].dense.numpy())
        assert np.array_equal(batch.labels.numpy(), batches["text"].labels.numpy())
        assert batch.sparse.ids.numel() == 50 * NUM_IDS
    assert np.array_equal(batches["gzip"].sparse.ids.numpy(), batches["text"].sparse.ids.numpy())


def test_every_kind_of_file_is_beside_prepared_rows():
    report = Ratios()
    run(report, 400, 50, 1)
    whats, kinds = ("loader", "end to end"), ("text", "gzip", "Parquet")
    assert set(report.ratios) == {f"{what}: raw {kind} over prepared" for what in whats for kind in kinds}
