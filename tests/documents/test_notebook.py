"""The notebook runs from top to bottom, and shows a plan as its page."""

from __future__ import annotations

from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient", reason="pip install 'autopar[docs]'")
nbformat = pytest.importorskip("nbformat")

NOTEBOOK = Path(__file__).resolve().parent.parent.parent / "examples" / "plan.ipynb"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_notebook_runs(tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    pages = [output["data"]["text/html"] for output in shown if "text/html" in output.get("data", {})]
    assert any(page.startswith("<iframe") and "Who holds what" in page for page in pages)
    said = "".join(output.get("text", "") for output in shown)
    assert "predicted step" in said and "instead" in said


def test_it_is_kept_without_outputs() -> None:
    """Outputs are of one machine, and hide what changed."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert all(not cell.get("outputs") and not cell.get("execution_count") for cell in notebook.cells)
