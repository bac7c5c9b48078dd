"""FLOPs of a step as published figures count them: seconds follow from TFLOP/s only through the source's convention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .published_shape import NotExpressible

Row = Mapping[str, Any]
# Fields of what was measured that seconds of a step follow from.
RATES = ("iter_s", "iter_s_derived", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu")
Count = Callable[[Mapping[str, Any], float], float]


def _megatron(passes: float, head: float) -> Count:
    """``passes`` x 24 B s l h^2 (1 + s/6h + V/(head l h)): Narayanan et al. 2021, equation 3."""

    def count(model: Mapping[str, Any], tokens: float) -> float:
        layers, hidden, seq, vocab = (model[k] for k in ("layers", "hidden", "seq", "vocab"))
        body = 1 + seq / (6 * hidden) + vocab / (head * layers * hidden)
        return float(passes * 24 * tokens * layers * hidden**2 * body)

    return count


def _attention(model: Mapping[str, Any], tokens: float) -> float:
    """12 l a d s per token: both products of attention, forward and backward, not halved."""
    inner = model["heads"] * (model.get("head_dim") or model["hidden"] / model["heads"])
    return float(12 * model["layers"] * inner * model["seq"] * tokens)


def _weights(model: Mapping[str, Any]) -> float:
    """Weights that a token is multiplied with: of a mixture of experts those it goes to."""
    return float(model.get("active_params") or model["params"])


def _six_and_attention(model: Mapping[str, Any], tokens: float) -> float:
    return 6 * _weights(model) * tokens + _attention(model, tokens)


def _products(model: Mapping[str, Any]) -> float:
    """Elements of all weights that are multiplied with: all but the embedding's table."""
    return _weights(model) - float(model["vocab"] * model["hidden"])


def _parameters(model: Mapping[str, Any]) -> float:
    """Elements of all weights: as said, or of a dense decoder with its dims."""
    if model.get("params"):
        return _weights(model)
    hidden, inner = model["hidden"], model["heads"] * (model.get("head_dim") or model["hidden"] / model["heads"])
    products = 2 * hidden * inner * (1 + (model.get("kv_heads") or model["heads"]) / model["heads"])
    matrices = 3 if model.get("mlp") in ("swiglu", "geglu") else 2
    return float(model["layers"] * (products + matrices * hidden * model["ffn"]) + 2 * model["vocab"] * hidden)


def _grouped_experts(model: Mapping[str, Any], tokens: float) -> float:
    """Alpa's count of mixtures of experts (benchmark/util.py, compute_moe_tflops), forward counted four times: every
    other layer has experts 8 times as wide as the model, two for each token, and products with masks that bring the
    tokens of a group to slots and back."""
    layers, hidden, seq, experts = (model[k] for k in ("layers", "hidden", "seq", "experts_every_other_layer"))
    attention = 8 * hidden**2 + 4 * seq * hidden
    dense = attention + 4 * hidden * model["ffn"]
    slots = 2 * 4 * model["expert_group_size"] * hidden + 2 * hidden * experts
    sparse = attention + 2 * 4 * hidden * model["ffn"] + slots
    return float(tokens * (4 * layers / 2 * (dense + sparse) + 6 * hidden * model["vocab"]))


CONVENTIONS: Mapping[str, Count] = {
    "megatron_hw_full": _megatron(4, 16),
    "megatron_model": _megatron(3, 12),
    "6N+attn": _six_and_attention,
    "6N": lambda model, tokens: 6 * _weights(model) * tokens,
    "8N": lambda model, tokens: 8 * _weights(model) * tokens,
    "arch": lambda model, tokens: 6 * _products(model) * tokens + _attention(model, tokens),
    "arch_causal": lambda model, tokens: 6 * _products(model) * tokens + _attention(model, tokens) / 2,
    # The head counts 6 B s h V (benchmark/util.py of Alpa): of rows with seconds besides this is right within 0.3%.
    "alpa_remat": _megatron(4, 16),
    "alpa_moe_remat": _grouped_experts,
    # MaxText as of its tables (calculate_tflops_training_per_device): all weights, attention halved.
    "6N+causal": lambda model, tokens: 6 * _parameters(model) * tokens + _attention(model, tokens) / 2,
}


def published_seconds(row: Row) -> float:
    """Seconds per optimizer step that the row reports, or that follow from its tokens or FLOP/s. Raises
    :class:`NotExpressible` if none do."""
    measured = row["measured"]
    if measured.get("iter_s"):
        return float(measured["iter_s"])
    try:
        return _from_rates(row)
    except NotExpressible:
        if measured.get("iter_s_derived") is None:
            raise
        return float(measured["iter_s_derived"])


def _from_rates(row: Row) -> float:
    measured, rate = row["measured"], row["measured"].get("tokens_per_s_per_gpu")
    flops = measured.get("tflops_per_gpu") or _from_utilisation(measured)
    if not rate and not flops:
        has = f"measured has {', '.join(map(str, measured))[:200]}" if measured else "measured is empty"
        raise NotExpressible(f"neither seconds, tokens nor FLOP/s of a step: {has}, and none of {', '.join(RATES)}")
    asked = (("cluster", "n_gpus"), ("parallel", "global_batch"), ("model", "seq"))
    absent = [f"{part}.{name}" for part, name in asked if not row[part].get(name)]
    if absent:
        raise NotExpressible(f"seconds of a step do not follow from a rate where {' and '.join(absent)} are not given")
    tokens = row["parallel"]["global_batch"] * row["model"]["seq"]
    if rate:
        return float(tokens / rate / row["cluster"]["n_gpus"])
    return _counted(row, float(tokens)) / (float(flops or 0) * 1e12 * float(row["cluster"]["n_gpus"]))


def _counted(row: Row, tokens: float) -> float:
    """FLOPs of a step as the row's source counts them."""
    said = row["measured"].get("flops_convention")
    count = CONVENTIONS.get(said or "")
    if count is None:
        what = f"measured.flops_convention {said!r} is not known" if said else "measured.flops_convention is not given"
        raise NotExpressible(
            f"TFLOP/s without seconds, and not enough is said to know how FLOPs were counted: {what}; one of "
            f"{', '.join(CONVENTIONS)}"
        )
    try:
        return count({name: value for name, value in row["model"].items() if value is not None}, tokens)
    except KeyError as error:
        raise NotExpressible(
            f"TFLOP/s without seconds: FLOPs counted as {said!r} need model.{error.args[0]}, which is not given"
        ) from error


def _from_utilisation(measured: Mapping[str, Any]) -> float | None:
    """TFLOP/s per device from a utilisation of the A100's peak, or the one given."""
    share = measured.get("mfu")
    return float(share) * float(measured.get("mfu_peak", 312.0)) if share else None
