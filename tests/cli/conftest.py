"""A planted data set with counts, and `rowmesh plan` on it."""

import pytest

from rowmesh.cli.__main__ import main
from rowmesh.data import PlantedConfig
from tests.support.clicks import prepare_clicks


@pytest.fixture(scope="session")
def config_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clicks")
    prepared = prepare_clicks(folder, {"train": 20_000}, PlantedConfig(num_rows=(900, 40, 3), bag_sizes={1: 3}))
    path = folder / "clicks.toml"
    path.write_text(f'[data]\nfolder = "{prepared.folder}"\nbatch_size = 800\n')
    return path


@pytest.fixture
def run(config_file, capsys, monkeypatch):
    """Runs `rowmesh plan` in a process that no launcher started; returns its output, or its errors."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)

    def run(*arguments, status=0):
        with pytest.raises(SystemExit) as stop:
            main(["plan", str(config_file), *map(str, arguments)])
        captured = capsys.readouterr()
        assert stop.value.code == status, captured.err
        return captured.out if status == 0 else captured.err

    return run
