"""What the operators take of a manifest: the fields that we write, closed, so that a misspelt one is refused.

After the definitions of kubeflow/trainer (``trainer.kubeflow.org_trainjobs.yaml``, v2.2), kubeflow/training-operator
(``kubeflow.org_pytorchjobs.yaml``, v1.8) and Kubernetes' ``core/v1`` (v1.30).
"""

from __future__ import annotations

from typing import Any


def _object(required: str, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


_NAME = {"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
_TEXTS = {"type": "array", "items": {"type": "string"}}
_COUNT = {"type": "integer", "minimum": 1}
_ENV = {"type": "array", "items": _object("name value", name={"type": "string"}, value={"type": "string"})}
_RESOURCES = _object("limits", limits={"type": "object", "additionalProperties": {"type": ["integer", "string"]}})
_METADATA = _object("name", name=_NAME, namespace={"type": "string"})

TRAINJOB = _object(
    "apiVersion kind metadata spec",
    apiVersion={"const": "trainer.kubeflow.org/v1alpha1"},
    kind={"const": "TrainJob"},
    metadata=_METADATA,
    spec=_object(
        "runtimeRef trainer",
        runtimeRef=_object("name", name={"type": "string"}),
        trainer=_object(
            "image numNodes command",
            image={"type": "string"},
            command=_TEXTS,
            args=_TEXTS,
            env=_ENV,
            numNodes=_COUNT,
            numProcPerNode=_COUNT,
            resourcesPerNode=_RESOURCES,
        ),
    ),
)
_CONTAINER = _object(
    "name image command",
    name={"const": "pytorch"},
    image={"type": "string"},
    command=_TEXTS,
    args=_TEXTS,
    env=_ENV,
    resources=_RESOURCES,
    volumeMounts={"type": "array", "items": _object("name mountPath", name=_NAME, mountPath={"type": "string"})},
)
_VOLUME = _object(
    "name emptyDir", name=_NAME, emptyDir=_object("medium", medium={"const": "Memory"}, sizeLimit={"type": "string"})
)
_REPLICA = _object(
    "replicas template",
    replicas=_COUNT,
    restartPolicy={"enum": ["Always", "OnFailure", "Never", "ExitCode"]},
    template=_object(
        "spec",
        spec=_object(
            "containers",
            containers={"type": "array", "items": _CONTAINER, "minItems": 1},
            volumes={"type": "array", "items": _VOLUME},
        ),
    ),
)
PYTORCHJOB = _object(
    "apiVersion kind metadata spec",
    apiVersion={"const": "kubeflow.org/v1"},
    kind={"const": "PyTorchJob"},
    metadata=_METADATA,
    spec=_object(
        "pytorchReplicaSpecs",
        runPolicy=_object("backoffLimit", backoffLimit=_COUNT),
        nprocPerNode={"type": "string", "pattern": "^[0-9]+$"},
        pytorchReplicaSpecs=_object("Master", Master=_REPLICA, Worker=_REPLICA),
    ),
)
