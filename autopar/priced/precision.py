"""The precision in which a model is planned where layouts, and not options, say it."""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn

from autopar.layout import Layout
from autopar.precision import Precision

_NAMES: dict[torch.dtype, Precision] = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def planned_precision(model: nn.Module, wanted: Precision | None) -> tuple[Precision, Precision | None]:
    """The precision in which a model is planned for which ``wanted`` is asked (None: nothing is), and the option of the
    plan that says so: None if the model is planned as it is. It is if it has that dtype of 16 bits already or, where
    nothing is asked for, unless all its parameters are in fp32; these compute in the default of layouts."""
    elements = Counter[torch.dtype]()
    for parameter in model.parameters():
        elements[parameter.dtype] += parameter.numel() * parameter.is_floating_point()
    own = _NAMES.get(max(elements, key=elements.__getitem__, default=torch.float32), "fp32")
    if wanted is None and any(count for dtype, count in elements.items() if dtype != torch.float32):
        return own, None
    wanted = wanted or Layout().precision
    return wanted, None if wanted == own != "fp32" else wanted
