"""Why models of the zoo are refused microbatches, as people who read their code judge it, and what a user can do.

The benchmark finds which models are refused (:mod:`.refusals`); a refused model without a reason here is listed as not
judged, since it may be refused without one.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reason:
    """A class of refusals: what couples the ``models``' samples, and what can be done about it."""

    title: str
    why: str
    remedy: str
    models: tuple[str, ...]


OWN = '`Options(batch_statistics="microbatch")`'

REASONS = (
    Reason(
        "Batch norm in training",
        "A sample is normalised by the mean and the variance of all samples, in forward and in backward.",
        f"Group or layer norm in its place; `.eval()` on batch norms that are not to learn statistics; or {OWN}.",
        (
            "adversarial",
            "cumulative_batch_norm",
            "cvt",
            "dpt",
            "efficientnet",
            "glpn",
            "levit",
            "mobilenet_v1",
            "mobilenet_v2",
            "mobilevit",
            "patch_time_series",
            "regnet",
            "resnet",
            "segformer",
            "unet",
            "upernet",
        ),
    ),
    Reason(
        "A loss that compares samples",
        "The negatives of a sample are the other samples of the batch, so that every score needs two of them.",
        f"{OWN}, with the negatives of a microbatch only; or microbatches=1.",
        ("clip", "contrastive", "siglip"),
    ),
    Reason(
        "A loss that balances experts over the batch",
        "The load-balancing loss is a product of two averages over all tokens: how often an expert was chosen, and how "
        "probable it was. A product of sums is not the sum of the products of microbatches.",
        f"{OWN}, which balances each microbatch; or leave the loss out (`output_router_logits=False` or a coefficient "
        "of 0).",
        ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe"),
    ),
    Reason(
        "A capacity that tokens of all samples share",
        "Experts take tokens in the order of the batch until they are full, so that whether a token is dropped depends "
        "on the samples before it.",
        f"{OWN}, with a capacity for each microbatch; or a router without capacity.",
        ("nllb_moe",),
    ),
    Reason(
        "An average over samples that the loss reads",
        "A running average of activations over the batch is updated, and used, in the same forward.",
        f"{OWN}; or read the average of the step before.",
        ("step_counter",),
    ),
    Reason(
        "Dim 0 is not a batch of samples",
        "Inputs are divided along dim 0, but there it counts the nodes of one graph, the positions of a sequence "
        "(`batch_first=False`), the terms of one sum, or what a product runs along.",
        "Put samples into dim 0 (`batch_first=True`, a list of graphs as a padded batch); otherwise microbatches=1.",
        ("graph_attention", "one_dimensional", "ordering", "sequence_first"),
    ),
    Reason(
        "Rows of other samples",
        "The code takes the first rows of a tensor that has several rows for each sample "
        "(`embeddings[:batch_size]` of batch x frames rows), and so those of the first samples for all.",
        f"Take the rows of each sample (`embeddings[::frames]`); or {OWN}.",
        ("timesformer",),
    ),
    Reason(
        "Memory across samples",
        "`as_strided` and a reshape after a transposition read memory across the places where samples end.",
        "Index dims rather than memory.",
        ("memory_order",),
    ),
    Reason(
        "A Python loop over samples",
        "The loop is as many operations as the batch has samples, and the graph of a microbatch has fewer.",
        "Operations on the whole tensor in place of the loop; or microbatches=1.",
        ("sizes_in_arithmetic",),
    ),
    Reason(
        "Values decide what runs",
        "The model is not captured, with or without microbatches: its code makes decisions by values of tensors.",
        "What the error says of the line; most often `torch.where` or a mask.",
        ("led", "llava", "longformer", "vilt"),
    ),
)


def reason_for(model: str) -> Reason | None:
    """The reason for which a model is refused; None if nobody has judged it."""
    return next((reason for reason in REASONS if model in reason.models), None)
