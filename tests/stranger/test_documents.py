"""Every block of code in README and docs runs as it stands, outside the checkout, with autopar from its wheel.

Blocks that are fragments follow a file of `setups/`, which gives them a model and data, without any seed. What readers
see is not changed, but for the word "cuda" where there is none."""

from __future__ import annotations

import fnmatch
import itertools
import runpy
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

import autopar
from autopar import Cluster
from autopar.runtime.launch import run_local
from benchmarks.gallery import EXHIBITS
from tests.helpers.built_wheel import ROOT
from tests.stranger.document_blocks import Block, blocks, commands
from tests.stranger.stranger_user import HERE, Stranger

# Rank 0 and the others end a run of blocks; torchrun's port is its own choice.
TORCHRUN = ["torchrun", "--standalone", "--nproc-per-node"]


@dataclass(frozen=True)
class Way:
    """How the Python blocks of ``document`` that contain ``text`` are run: after ``setup``, on ``ranks`` processes, 0
    for plain Python."""

    document: str
    text: str
    setup: str
    ranks: int


# The first that fits is taken.
WAYS = [
    Way("README.md", "autopar.verify(", "planning", 0),
    Way("docs/layouts.md", "autopar.price(", "layouts", 0),
    Way("docs/guards.md", "", "nothing", 0),
    Way("docs/module.md", "", "pair", 2),
    Way("docs/tutorial.md", "def make", "nothing", 0),
    Way("docs/tutorial.md", "", "nothing", 4),
    Way("docs/howto/does-not-trace.md", "", "nothing", 0),
    Way("docs/howto/from-megatron.md", "", "layouts", 0),
    Way("docs/howto/inference.md", "", "nothing", 2),
    *(
        Way(f"docs/howto/{name}.md", "", "planning", 0)
        for name in ("does-not-fit", "pins-and-layouts", "long-sequences", "unequal-machines")
    ),
    Way("*", "", "training", 4),
]

# Commands that are not run, by how they begin, and why.
NOT_RUN = {
    "autopar run --nproc 4 examples/train_llm.py": "tests/integrations/test_train_llm.py trains it",
    "pip install 'autopar[ray]'": "needs a package index",  # As commands() quotes it.
    "pip install submitit": "needs a package index",
    "python examples/ray_train.py": "tests/integrations/test_ray.py trains it",
    "python examples/submitit_train.py": "tests/integrations/test_submitit.py trains it",
    "make demo": "sets up an environment from a package index; tests/cli/test_command_line.py runs the demo's parts",
    "make test": "this is it",
    "autopar run --nproc 4 train.py": "test_blocks_of_training runs this file",
    "autopar calibrate": "measures for most of a minute; tests/calibration/test_machine.py does",
    "torchrun --nnodes 2": "needs two hosts; tests/calibration/test_job.py starts a job on one",
    "autopar run --nnodes 2": "needs two hosts; tests/cli/test_run.py emulates them",
    "make docs": "CI runs it",
    "python -m benchmarks.": "is for a checkout; tests/benchmarks runs parts of each",
    "autopar show plan.json --html plan.html --record": "reads the record of a run; tests/plans/test_page.py gives one",
}
# Blocks without a language that are no code.
NOT_CODE = ("model -> trace ->", "__main__\n")

ALL = blocks(ROOT)
PYTHON = [block for block in ALL if block.language == "python"]
SHELL = [block for block in ALL if block.language in ("sh", "bash") or block.text.startswith("autopar ")]
TOML = [block for block in ALL if block.language == "toml"]


def way_of(block: Block) -> Way:
    return next(w for w in WAYS if fnmatch.fnmatch(block.document, w.document) and w.text in block.text)


def setup_folder(folder: Path) -> Path:
    shutil.copytree(HERE / "setups", folder)
    shutil.copy(HERE / "run_blocks.py", folder)
    return folder


def program(block: Block, folder: Path) -> str:
    """A file in ``folder`` with the block after its setup."""
    name = f"{Path(block.document).stem}_line_{block.line}.py"
    setup = (HERE / "setups" / f"{way_of(block).setup}.py").read_text()
    (folder / name).write_text(setup + "\n" + block.text.replace('"cuda"', '"cpu"'))
    return name


def test_every_block_is_known() -> None:
    known = {*PYTHON, *SHELL, *TOML}
    printed = {block for block in ALL if block.language == "text"}
    unknown = [str(block) for block in {*ALL} - known - printed if not block.text.startswith(NOT_CODE)]
    assert unknown == [], "say how these are run, or in NOT_CODE that they are no code"
    assert len(PYTHON) >= 4 and len(SHELL) >= 4


def train(stranger: Stranger, folder: Path, mine: list[Block]) -> None:
    """Runs blocks that train one after the other on the ranks they need."""
    (ranks,) = {way_of(block).ranks for block in mine}
    setup_folder(folder)
    files = [program(block, folder) for block in mine]
    stranger.command([*TORCHRUN, str(ranks), "run_blocks.py", *files], folder, says="fine")


def test_the_first_block_trains(tmp_path: Path) -> None:
    """The first that a reader tries, on two processes that have imported all it needs. The slow tests start it with all
    others, as a reader does."""
    block = next(block for block in PYTHON if way_of(block).ranks)
    file = setup_folder(tmp_path / "work") / program(block, tmp_path / "work")
    text = file.read_text()
    assert "(2, 2)" in block.text
    file.write_text(text.replace("(2, 2)", "(2,)"))
    run_local(lambda rank, world: runpy.run_path(str(file), run_name="__main__") and None, 2, timeout=200)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("document", "ranks"), sorted({(block.document, way_of(block).ranks) for block in PYTHON if way_of(block).ranks})
)
def test_blocks_of_training(stranger: Stranger, tmp_path: Path, document: str, ranks: int) -> None:
    mine = [block for block in PYTHON if block.document == document and way_of(block).ranks == ranks]
    train(stranger, tmp_path / "work", mine)


def documents_of_one_process() -> list[str]:
    """The documents with blocks for plain Python."""
    return sorted({block.document for block in PYTHON if not way_of(block).ranks})


@pytest.mark.slow
@pytest.mark.parametrize("document", documents_of_one_process())
def test_blocks_of_one_process(stranger: Stranger, tmp_path: Path, document: str) -> None:
    """A start of Python costs more than most blocks, so those of a document share one."""
    folder = setup_folder(tmp_path / "work")
    files = [program(block, folder) for block in PYTHON if block.document == document and not way_of(block).ranks]
    stranger.command(["python", "run_blocks.py", *files], folder, says="fine")


@pytest.mark.slow
@pytest.mark.parametrize("block", SHELL, ids=str)
def test_commands(stranger: Stranger, tmp_path: Path, block: Block) -> None:
    run = [command for command in commands(block) if not command.startswith(tuple(NOT_RUN))]
    if not run:
        pytest.skip("; ".join(f"{start}: {why}" for start, why in NOT_RUN.items() if start in block.text))
    folder = setup_folder(tmp_path / "work")
    before = [
        "autopar plan model.py:make --mesh 8,8 --cluster dgx-a100-80gb --output plan.json",
        "autopar plan model.py:make --mesh 8,8 --cluster dgx-a100-80gb --zero 3 --output other.json",
    ]
    made = [shlex.split(command)[-1] for command in before]
    needed = [
        c for c, file in zip(before, made, strict=True) if file in block.text and f"--output {file}" not in block.text
    ]
    for number, command in enumerate(itertools.chain(needed, run)):
        # As diff(1), it ends with 1 where the plans differ.
        differs = " || [ $? -eq 1 ]" if command.startswith("autopar diff") else ""
        (folder / f"{number}.sh").write_text(f"{command}{differs}\n")
        stranger.command(["bash", "-e", f"{number}.sh"], folder)


@pytest.mark.slow
def test_the_plan_in_the_readme_is_what_is_printed() -> None:
    (shown,) = (block for block in ALL if block.document == "README.md" and block.language == "text")
    exhibit = EXHIBITS["gpt2"]
    model, batch = exhibit.build()
    printed = str(autopar.plan(model, exhibit.mesh, batch, cluster=exhibit.cluster)).splitlines()
    lines = [line for line in shown.text.splitlines() if line not in ("", "…")]
    assert len(lines) > 20 and [line for line in lines if line not in printed] == []


@pytest.mark.parametrize("block", TOML, ids=str)
def test_clusters_can_be_read(block: Block) -> None:
    assert Cluster.from_toml(block.text, str(block)).name == "my-cluster"


@pytest.mark.slow
@pytest.mark.parametrize("block", TOML, ids=str)
def test_clusters(stranger: Stranger, tmp_path: Path, block: Block) -> None:
    folder = setup_folder(tmp_path / "work")
    (folder / "cluster.toml").write_text(block.text)
    command = ["autopar", "plan", "model.py:make", "--mesh", "2,2", "--cluster", "cluster.toml"]
    stranger.command(command, folder, says="my-cluster")
