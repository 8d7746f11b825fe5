"""Files for clusters and their page: scripts and manifests parse, and the options and keys that they name exist."""

import json
import os
import re
import shlex
import subprocess
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from torch.distributed.run import get_args_parser

from rowmesh.run.config import Config

ROOT = Path(__file__).parents[1]
CLUSTER = ROOT / "examples" / "cluster"
PAGE = (ROOT / "docs" / "operating.md").read_text()
MANIFESTS = ["indexed_job", "pytorch_job"]
STAND_IN = """#!/bin/sh
printf '%s\\n' "$@" > {folder}/{name}
echo node7
"""


def torchrun(words: list[str]) -> Namespace:
    """What torchrun makes of its arguments; it ends the test where it knows one not."""
    assert words[0] == "torchrun"
    return get_args_parser().parse_args(words[1:])


def check_keys(settings: list[str]) -> None:
    """Every `a.b=value` is a key of the configuration."""
    for key in (word.partition("=")[0] for word in settings if "=" in word):
        assert_is_key(key)


def assert_is_key(key: str) -> None:
    model: Any = Config
    for name in key.split("."):
        assert issubclass(model, BaseModel), key
        assert name in model.model_fields, key
        model = model.model_fields[name].annotation


def command(manifest: str) -> list[str]:
    """The words behind `exec` in a manifest, with the variables that are set in a pod."""
    (text,) = re.findall(r"exec (torchrun.*?)\n\s+env:", (CLUSTER / f"{manifest}.yaml").read_text(), re.DOTALL)
    pod = {"JOB_COMPLETION_INDEX": "1", "RANK": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
    return shlex.split(re.sub(r"\$(\w+)", lambda found: pod[found[1]], text))


def test_the_batch_script_starts_a_torchrun_on_every_node(tmp_path: Path):
    script = CLUSTER / "train.sbatch"
    subprocess.run(["bash", "-n", script], check=True)
    for name in ("srun", "scontrol"):
        (tmp_path / name).write_text(STAND_IN.format(folder=tmp_path, name=f"{name}.args"))
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "77"}
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_CPUS_PER_TASK": "16", **slurm}
    subprocess.run(["bash", script, "a.toml", "run.folder=two words"], env=environment, check=True)
    assert (tmp_path / "scontrol.args").read_text().split() == ["show", "hostnames", "node[7-8]"]
    option, *words = (tmp_path / "srun.args").read_text().splitlines()
    assert option == "--kill-on-bad-exit=1"
    options = torchrun(words)
    assert (options.nnodes, options.nproc_per_node, options.rdzv_endpoint) == ("2", "4", "node7:29500")
    assert (options.max_restarts, options.module, options.training_script) == (0, True, "rowmesh.cli")
    assert options.training_script_args == ["train", "a.toml", "run.folder=two words"]


@pytest.mark.parametrize("manifest", MANIFESTS)
def test_the_command_of_a_manifest_is_one_that_torchrun_and_rowmesh_take(manifest: str):
    options = torchrun(command(manifest))
    assert (options.node_rank, options.master_port, options.max_restarts) == (1, 29500, 0)
    assert (options.module, options.training_script) == (True, "rowmesh.cli")
    verb, config, *settings = options.training_script_args
    assert verb == "train"
    assert (ROOT / config).exists()
    check_keys(settings)


def test_manifests_fit_together():
    """One pod for each node; names of containers, services and volumes that others refer to."""
    yaml = pytest.importorskip("yaml")
    service, job = yaml.safe_load_all((CLUSTER / "indexed_job.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    assert torchrun(command("indexed_job")).master_addr == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert (service["metadata"]["name"], service["spec"]["clusterIP"]) == (pod["subdomain"], "None")
    assert job["spec"]["template"]["metadata"]["labels"].items() >= service["spec"]["selector"].items()
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2
    (operated,) = yaml.safe_load_all((CLUSTER / "pytorch_job.yaml").read_text())
    replicas = operated["spec"]["pytorchReplicaSpecs"]
    assert sum(each["replicas"] for each in replicas.values()) == 2
    pods = [pod, *(each["template"]["spec"] for each in replicas.values())]
    assert json.dumps(pods[1]) == json.dumps(pods[2])
    assert [each["containers"][0]["name"] for each in pods] == ["rowmesh", "pytorch", "pytorch"]
    for each in pods:
        (container,) = each["containers"]
        assert container["command"][:2] == ["/bin/sh", "-c"]
        assert shlex.split(container["command"][2])[:4] == ["exec", "torchrun", "--nnodes", "2"]
        assert [mount["name"] for mount in container["volumeMounts"]] == [each["volumes"][0]["name"]]


def test_the_image_has_what_it_copies_and_the_torch_of_the_makefile():
    text = (ROOT / "examples" / "Dockerfile").read_text()
    copied = [word for line in re.findall(r"^COPY (.*)$", text, re.MULTILINE) for word in line.split()[:-1]]
    assert {"rowmesh", "pyproject.toml"} <= set(copied)
    assert [path for path in copied if not (ROOT / path).exists()] == []
    (version,) = set(re.findall(r"torch==[\d.]+", text))
    assert version in (ROOT / "Makefile").read_text()
    assert set(re.findall(r"MALLOC_\w+=\d+", text)) == set(
        re.findall(r"MALLOC_\w+=\d+", (ROOT / "docs" / "command_line.md").read_text())
    )


def test_keys_options_and_files_on_the_page_exist():
    keys = set(re.findall(r"`((?:run|data|train|parallel|placement|checkpoint)\.\w+)[`=]", PAGE))
    assert keys >= {"run.retry_s", "parallel.timeout_s", "run.prometheus_file", "run.trackers", "train.steps"}
    for key in keys:
        assert_is_key(key)
    (example,) = re.findall(r"^(torchrun .*?)\n```", PAGE, re.MULTILINE | re.DOTALL)
    check_keys(torchrun(shlex.split(example.replace("\\\n", " "))).training_script_args[2:])
    known = get_args_parser().format_help()
    ours = {"--overwrite", "--resume", "--save", "--load", "--ranks", "--topology"}
    others = {"--requeue", "--no-requeue", "--nodes", "--file", "--tag", "--rm"}  # of SLURM and docker
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", PAGE)) - ours - others
    assert [option for option in named if f"{option} " not in known and f"{option}\n" not in known] == []
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", PAGE)]
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []
