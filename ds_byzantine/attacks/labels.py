"""Poisoned labels: a fault in the data of a replica. A script makes it; a drill, which sees gradients only, cannot."""

from __future__ import annotations

import torch
from torch import Tensor


def flip_labels(labels: Tensor, classes: int, *, ignore_index: int = -100) -> Tensor:
    """Label y becomes classes - 1 - y.

    Call it on the batches of the replicas that shall be bad, after collation and before the forward pass:

        if torch.distributed.get_rank() == 4:  # with one rank per replica, replica 4
            batch["labels"] = flip_labels(batch["labels"], model.config.vocab_size)

    Args:
        labels: class or token numbers, any shape, integer dtype.
        classes: how many there are: labels are 0 to classes - 1.
        ignore_index: stays as it is, as in PyTorch's losses.

    Returns:
        A new tensor of the same shape, dtype and device.

    Raises:
        ValueError: labels that are not whole numbers or not in range, or fewer than 2 classes.

    Example:
        >>> flip_labels(torch.tensor([0, 3, -100, 9]), classes=10)
        tensor([   9,    6, -100,    0])

    Reference:
        Biggio, Nelson and Laskov (2012), Poisoning attacks against support vector machines; Tolpegin et al. (2020),
        Data poisoning attacks against federated learning systems.
    """
    if classes < 2:
        raise ValueError(f"classes: got {classes}, but flipping takes at least 2. Pass the number of labels.")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(f"labels: got {labels.dtype}, but labels are whole numbers. Flip them before any encoding.")
    wide = labels.long()
    counted = wide != ignore_index
    beyond = wide[counted & ((wide < 0) | (wide >= classes))]
    if beyond.numel():
        raise ValueError(
            f"labels: got {int(beyond[0])}, but with classes={classes} they are 0 to {classes - 1}. Pass the number of "
            "labels, for a language model the size of its vocabulary, and the ignore_index of the loss."
        )
    return torch.where(counted, classes - 1 - wide, wide).to(labels.dtype)
