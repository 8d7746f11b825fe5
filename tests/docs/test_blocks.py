"""Every block of Python and of commands on README and the pages in docs/ runs, in order, one fresh folder a page.

What a page takes for granted (a model, a loader, a finished run) is in `NAMES` and `FILES`. A block that cannot run has
`<!-- not run: reason -->` and an empty line before it. Commands run in this process, and on one rank where the page has
torchrun. `test_tutorials` runs the tutorials.
"""

import gzip
import linecache
import re
import shlex
import shutil
import tomllib
from collections.abc import Callable, Mapping
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rowmesh
from rowmesh import EmbeddingCollection, EmbeddingOptimizer, JointOptimizer, Mesh, SparseBatch, TableSpec
from rowmesh.cli.__main__ import main
from rowmesh.data import Loader
from rowmesh.pipeline import Pipeline
from rowmesh.publish import PublishedReader
from rowmesh.sparse import take
from rowmesh.tables import Dynamic
from tests.support.pages import ROOT, Block, blocks, differing

RUN = ("python", "bash")
PAGES = [
    page
    for page in ("README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md")))
    if any(block.language in RUN and not block.not_run for block in blocks(page))
]
EVERY_PAGE = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]


@pytest.mark.filterwarnings("ignore:.*torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("page", PAGES)
def test_its_blocks_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(tmp_path))  # of what the page has as a module
    with chdir(tmp_path):
        for make in FILES.get(page, ()):
            make()
        scope = NAMES[page]() if page in NAMES else {}
        try:
            for block in blocks(page):
                if block.language in RUN and not block.not_run:
                    run(page, block, scope)
        finally:
            close(scope)


@pytest.mark.parametrize("page", EVERY_PAGE)
def test_its_blocks_say_what_they_are(page: str):
    """So that none is left out: commands and Python are called that, and TOML can be read."""
    for block in blocks(page):
        where = f"{page}:{block.line}"
        assert block.language, f"{where}: a block without a language; `text` for what is neither code nor commands"
        if block.language == "text":
            assert not re.match(r"(\$ |rowmesh \w+ [a-z./]+$|torchrun |pip |import |from )", block.text), where
        if block.language == "toml":
            tomllib.loads(block.text)


@pytest.mark.slow  # a million samples are drawn
@pytest.mark.timeout(900)
def test_plans_are_those_that_the_page_shows(tmp_path: Path):
    """Of the data of `make train`, to the digit; `differing` says what a page may leave out."""
    page, printed, num_shown = "docs/placement.md", "", 0
    with chdir(tmp_path):
        shutil.copytree(ROOT / "configs", "configs")
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            command("data synthesize raw --samples 1000000 --held-out 100000")
            command("data prepare raw --out data/generated/criteo --min-count 1")
        for block in blocks(page):
            if block.language == "text":
                assert differing(block.text, printed) == [], f"{page}:{block.line}\n{printed}"
                num_shown += 1
            elif block.not_run.startswith("refused"):
                with pytest.raises(AssertionError, match=" ended with 2:") as refusal:
                    run(page, block, {})
                printed = str(refusal.value)
            elif block.language == "bash" and not block.not_run:
                printed = run(page, block, {})
    assert num_shown == 4


def test_numbers_that_a_page_shows_are_compared():
    printed = " strategy   memory   look-ups   cost \n → cyclic   11.8 MB  2,151   6.60 µs \none two three\n"
    shown = " strategy  memory  cost\n → cyclic  11.8 MB  6.60 µs\n …\n"
    assert differing(shown, printed) == []
    assert differing("one two\nthree\n", printed) == []
    assert differing(shown.replace("6.60", "6.61"), printed) == [" → cyclic  11.8 MB  6.61 µs"]
    assert differing("one\n\ntwo\nfour", printed) == ["one", "two", "four"]


def test_a_failure_names_page_and_line():
    block = Block("python", "", "a = 1\nb = a / 0\n", line=40)
    with pytest.raises(AssertionError, match=r"docs/page\.md:41: ZeroDivisionError: division by zero"):
        run("docs/page.md", block, {})
    block = Block("bash", "", "# two\nrowmesh report nothing\n", line=7)
    with pytest.raises(AssertionError, match=r"docs/page\.md:8: .*nothing"):
        run("docs/page.md", block, {})
    with pytest.raises(AssertionError, match=r"docs/page\.md:1: .*'make' .* not run: reason"):
        run("docs/page.md", Block("bash", "", "make train\n"), {})


def run(page: str, block: Block, scope: dict[str, Any]) -> str:
    """Runs a block; returns what it printed.

    Raises:
        AssertionError: it failed; names page and line.
    """
    with redirect_stdout(StringIO()) as output, redirect_stderr(output):
        if block.language == "python":
            run_python(page, block, scope)
        else:
            run_commands(page, block, output)
    return output.getvalue()


def run_python(page: str, block: Block, scope: dict[str, Any]) -> None:
    lines = block.text.splitlines()
    if all(line[:2] in ("+ ", "  ", "") for line in lines):  # shown as a change
        lines = [line[2:] for line in lines]
    source = "\n" * (block.line - 1) + "\n".join(lines)
    linecache.cache[page] = (len(source), None, source.splitlines(keepends=True), page)  # for classes' own sources
    try:
        exec(compile(source, page, "exec"), scope)
    except Exception as error:
        line, trace = block.line, error.__traceback__
        while trace is not None:
            line = trace.tb_lineno if trace.tb_frame.f_code.co_filename == page else line
            trace = trace.tb_next
        raise AssertionError(f"{page}:{line}: {type(error).__name__}: {error}") from error


def run_commands(page: str, block: Block, output: StringIO) -> None:
    number, lines = block.line, block.text.splitlines()
    while lines:
        first, command = number, lines.pop(0)
        while command.endswith("\\"):
            command = command[:-1] + lines.pop(0)
            number += 1
        number += 1
        words = shlex.split(command, comments=True)
        if not words:
            continue
        if words[0] == "torchrun" and words.count("-m") == 1:
            words = ["rowmesh", *words[words.index("-m") + 2 :]]
        assert words[0] == "rowmesh", (
            f"{page}:{first}: {words[0]!r} does not run here; put <!-- not run: reason --> before the block"
        )
        with pytest.raises(SystemExit) as stop:
            main(words[1:])
        assert not stop.value.code, f"{page}:{first}: {command} ended with {stop.value.code}:\n{output.getvalue()}"


def close(scope: dict[str, Any]) -> None:
    for value in scope.values():
        if isinstance(value, EmbeddingCollection | PublishedReader | Mesh):
            value.close()


# What pages take for granted: files, and names.


def command(words: str) -> None:
    run_commands("", Block("bash", "", f"rowmesh {words}\n"), StringIO())


def criteo() -> None:
    """Data of Criteo's shape, rows to score, and the configuration of `make train` for a smaller model."""
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        command("data synthesize raw --samples 3000 --held-out 300 --max-rows 100 --format text")
        command("data prepare raw --out data/generated/criteo --min-count 1")
    (rows,) = Path("raw").glob("test*")
    text = gzip.decompress(rows.read_bytes()) if rows.suffix == ".gz" else rows.read_bytes()
    Path("new.tsv.gz").write_bytes(gzip.compress(text))
    shutil.copytree("data/generated/criteo", "elsewhere/criteo")
    Path("configs").mkdir()
    text = (ROOT / "configs" / "criteo.toml").read_text()
    Path("configs/criteo.toml").write_text(f"{text.replace('[128, 64]', '[8]')}\n[run]\n[parallel]\n")


def clicks() -> None:
    """A finished run on a CSV, with checkpoints, and rows to score."""
    tags = ("new|red", "red", "")
    rows = [f"r{number},{number % 3 % 2},{number % 7 / 2},{number % 20},{tags[number % 3]}" for number in range(600)]
    header = "request_id,clicked,price,user,tags"
    Path("clicks.csv").write_text("\n".join([header, *rows, ""]))
    Path("new.csv").write_text("\n".join([header, *rows[:9], ""]))
    Path("new.csv.gz").write_bytes(gzip.compress(Path("new.csv").read_bytes()))
    Path("schema.toml").write_text(
        'label = "clicked"\ndense = ["price"]\ncategorical = ["user", { name = "tags", separator = "|" }]\n'
    )
    Path("clicks.toml").write_text(
        '[data]\nfolder = "prepared"\nbatch_size = 32\n[model]\nbottom = [4]\ntop = [4]\n[tables]\ndim = 4\n'
        "[train]\nsteps = 6\n[checkpoint]\nevery_steps = 2\nincremental = 4\n"
    )
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        command("data prepare clicks.csv --schema schema.toml --out prepared")
        command("train clicks.toml")


def watched() -> None:
    """Two labels, one of them a number of minutes, with weights."""
    rows = [f"{n % 3 % 2},{n % 5 % 2},{n % 4},{1 + n % 2},{n % 20}" for n in range(400)]
    Path("watched.csv").write_text("\n".join(["click,buy,watch_minutes,weight,user", *rows, ""]))
    label = next(block.text for block in blocks("docs/own_model.md") if "watch_minutes" in block.text)
    Path("schema.toml").write_text(f'{label}categorical = ["user"]\n')
    Path("watch.toml").write_text('[data]\nfolder = "prepared"\n[model]\nbottom = [4]\ntop = [4]\n[train]\nsteps = 4\n')
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        command("data prepare watched.csv --schema schema.toml --out prepared")


def raw_rows() -> None:
    """Raw rows in a folder that is complete."""
    Path("clicks").mkdir()
    Path("clicks/0.csv").write_text("click,price,user\n" + "1,2.5,a\n0,,b\n" * 10)
    Path("clicks/_END").touch()


def events() -> None:
    """Ratings, all good, and a run on events whose users have a history."""
    ratings = [(user, (user + step) % 9, 5, 100 * user + step) for user in range(12) for step in range(8)]
    Path("ratings.dat").write_text("".join("::".join(map(str, row)) + "\n" for row in ratings))
    Path("events.csv").write_text("user,item,time\n" + "".join(f"{u},{i},{t}\n" for u, i, _, t in ratings))
    Path("events.toml").write_text('user = "user"\nitem = "item"\ntime = "time"\n')
    Path("hstu.toml").write_text(
        '[data]\nfolder = "events"\nbatch_size = 4\n[model]\nname = "hstu"\n[tables]\ndim = 8\n[train]\nsteps = 2\n'
    )
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        command("data prepare events.csv --schema events.toml --out events")
        command("train hstu.toml")


FILES: Mapping[str, tuple[Callable[[], None], ...]] = {
    "docs/command_line.md": (criteo, clicks),
    "docs/data.md": (raw_rows,),
    "docs/durability.md": (clicks,),
    "docs/own_model.md": (watched,),
    "docs/placement.md": (criteo,),
    "docs/predicting.md": (clicks,),
    "docs/sequence_models.md": (events,),
}


class Network(nn.Module):
    """The dense part of a model: of `[B, 13]` and `[B, F, D]`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(13 + width, 1)

    def forward(self, dense: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
        """`[B]`."""
        return self.linear(torch.cat([dense, vectors.flatten(1)], dim=1)).squeeze(1)


@dataclass
class Item:
    """A batch as the loader of a program has it."""

    sparse: SparseBatch
    dense: torch.Tensor
    labels: torch.Tensor

    def take(self, samples: torch.Tensor) -> "Item":
        return Item(take(self.sparse, samples), self.dense[samples], self.labels[samples])


def program() -> dict[str, Any]:
    """Tables, a network, their optimizers, and batches."""
    tables = [TableSpec(name=name, num_rows=50, dim=8) for name in ("user", "item")]
    embeddings = EmbeddingCollection(tables)
    network = Network(2 * 8)
    sparse = EmbeddingOptimizer(embeddings)
    ids = torch.arange(12).view(2, 6)
    items = [Item(SparseBatch.from_dense(["user", "item"], ids), torch.rand(6, 13), torch.ones(6)) for _ in range(2)]
    return {
        "rowmesh": rowmesh,
        "torch": torch,
        "nn": nn,
        "EmbeddingCollection": EmbeddingCollection,
        "JointOptimizer": JointOptimizer,
        "Pipeline": Pipeline,
        "binary_cross_entropy_with_logits": nn.functional.binary_cross_entropy_with_logits,
        "mesh": embeddings.mesh,
        "tables": tables,
        "embeddings": embeddings,
        "network": network,
        "model": nn.ModuleDict({"embeddings": embeddings, "network": network}),
        "sparse_optimizer": sparse,
        "dense_optimizer": torch.optim.Adam(network.parameters()),
        "schedule": torch.optim.lr_scheduler.StepLR(sparse, 10),
        "loader": items,
        "step": 7,
    }


def loop() -> dict[str, Any]:
    names, rows = ["user", "item"], {"user": 50, "item": 9}
    model = Network(2 * 64)
    ids = torch.stack([torch.arange(6), torch.arange(6)])
    return {
        "names": names,
        "rows": rows,
        "loader": [(torch.rand(6, 13), ids, torch.ones(6))] * 3,
        "model": model,
        "loss_function": nn.BCEWithLogitsLoss(),
        "dense_optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
    }


def durability() -> dict[str, Any]:
    return program() | {"loader": Loader("prepared", "train", batch_size=32)}


def promises() -> dict[str, Any]:
    scope = program()
    item = scope["loader"][0]
    loss = scope["network"](item.dense, scope["embeddings"](item.sparse).stacked()).sum()
    return scope | {"scaler": torch.amp.GradScaler("cpu"), "loss": loss}


def publishing() -> dict[str, Any]:
    ids = torch.tensor([3, 4, 5])
    whole = [(ids.numpy(), torch.rand(3, 64).numpy())]
    network = nn.Linear(64, 1)
    names = {"everything": whole, "changed": whole[:0], "gone": ids[:0].numpy(), "ids": ids.numpy()}
    return {
        "torch": torch,
        "mesh": Mesh(),
        "model": network,
        "step": 1,
        "network": network,
        "network_of": lambda number: network,
    } | names


def dynamic_tables() -> dict[str, Any]:
    return {"rowmesh": rowmesh, "Dynamic": Dynamic}


def torch_tools() -> dict[str, Any]:
    return program() | {"tables": [TableSpec(name="clicked", num_rows=50, dim=64)]}


def ranks() -> dict[str, Any]:
    return {"rank": 0, "world_size": 1}


NAMES: Mapping[str, Callable[[], dict[str, Any]]] = {
    "docs/data.md": ranks,
    "docs/durability.md": durability,
    "docs/dynamic_tables.md": dynamic_tables,
    "docs/loop.md": loop,
    "docs/nestpipe.md": program,
    "docs/predicting.md": lambda: {"rowmesh": rowmesh},
    "docs/promises.md": promises,
    "docs/publishing.md": publishing,
    "docs/saving.md": program,
    "docs/sequence_models.md": ranks,
    "docs/torch.md": torch_tools,
}
