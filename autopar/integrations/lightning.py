"""Lightning: Fabric by its ``ModelParallelStrategy``, and a strategy for its Trainer.

.. code-block:: python

    fabric = Fabric(strategy=ModelParallelStrategy(parallelize_fn(options=options), data_parallel_size=1))
    trainer = Trainer(strategy=AutoparStrategy(options=options))

Every process passes the same global batch to the model, so ``data_parallel_size`` is 1: Lightning's samplers then give
every process the same samples, and what is logged is that of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.api import LossFunction, Mesh, parallelize
from autopar.arguments import Batch
from autopar.cluster.description import Cluster
from autopar.errors import OptionsError
from autopar.options import Options
from autopar.plans.plan import Plan
from autopar.runtime.module.parallel_module import ParallelModule


def parallelize_fn(
    *,
    mesh: Mesh | None = None,
    options: Options | None = None,
    cluster: str | Cluster | None = None,
    plan: Plan | None = None,
    loss_fn: LossFunction | None = None,
    example_inputs: Batch | None = None,
) -> Callable[[nn.Module, DeviceMesh], ParallelModule]:
    """What ``ModelParallelStrategy(parallelize_fn=...)`` of Fabric takes; the arguments are those of
    :func:`autopar.parallelize`. ``mesh``: by default all processes in one axis, which the planner may divide. Give
    ``example_inputs``, a global batch, if ``fabric.load`` restores an optimizer: its state then has its places."""

    def apply(module: nn.Module, device_mesh: DeviceMesh) -> ParallelModule:
        shape = (device_mesh.size(),) if mesh is None else mesh
        return parallelize(module, shape, example_inputs, options=options, cluster=cluster, plan=plan, loss_fn=loss_fn)

    return apply


class AutoparStrategy(ModelParallelStrategy):  # type: ignore[misc]
    """For ``lightning.Trainer``: the module called ``module`` of the LightningModule (``self.model``) becomes parallel
    before optimizers are configured. ``configure_optimizers`` may take torch's optimizers, or
    ``self.model.optimizer(...)``, which steps on shards.

    A checkpoint is a folder of ``torch.distributed.checkpoint``, which fits any mesh; ``save_distributed_checkpoint=
    False`` writes one file. The other arguments are those of :func:`autopar.parallelize`. Raises :class:`OptionsError`
    if there is no such module.
    """

    def __init__(
        self,
        module: str = "model",
        *,
        mesh: Mesh | None = None,
        options: Options | None = None,
        cluster: str | Cluster | None = None,
        plan: Plan | None = None,
        save_distributed_checkpoint: bool = True,
        **others: Any,
    ) -> None:
        super().__init__(data_parallel_size=1, save_distributed_checkpoint=save_distributed_checkpoint, **others)
        self._parallel_name = module
        self._parallelized = parallelize_fn(mesh=mesh, options=options, cluster=cluster, plan=plan)

    def connect(self, model: Any) -> None:
        """Has the module made parallel where Lightning configures models."""
        configure = model.configure_model

        def configure_model() -> None:
            configure()
            self._make_parallel(model)

        model.configure_model = configure_model
        super().connect(model)

    def _make_parallel(self, model: Any) -> None:
        module = getattr(model, self._parallel_name, None)
        if not isinstance(module, nn.Module):
            raise OptionsError(
                f"{type(model).__name__} has no module called {self._parallel_name!r}: name the one to make parallel, "
                'AutoparStrategy(module="model")'
            )
        if not isinstance(module, ParallelModule):
            setattr(model, self._parallel_name, self._parallelized(module, self.device_mesh))

    def setup_environment(self) -> None:
        """Starts the processes' group, with all processes on one batch."""
        self._tensor_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()
