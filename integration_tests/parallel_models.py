"""The small models of parallel_jobs.py, whole and cut over tensor ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from jobs import VOCABULARY
from torch import nn
from torch.nn.utils import skip_init

WIDTH = 16


class Embedding(nn.Module):
    """Token embedding whose weight can be used as the output layer as well."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH) * 0.1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(tokens, self.weight)


def logits_of(module: Embedding, hidden: torch.Tensor) -> torch.Tensor:
    return hidden @ module.weight.t()


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.linear(hidden)


class Block(nn.Module):
    """Norm, a mixing over earlier positions, a two-layer perceptron; residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        steps = torch.arange(1, hidden.shape[1] + 1, dtype=hidden.dtype)[:, None]
        past = self.norm(hidden).cumsum(1) / steps
        return hidden + self.down(torch.tanh(self.up(past)))


class _SumForward(torch.autograd.Function):
    """All-reduce in forward, identity in backward: what a row-parallel layer ends with (Megatron-LM's g)."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class _SumBackward(torch.autograd.Function):
    """Identity in forward, all-reduce in backward: what a column-parallel layer begins with (Megatron-LM's f)."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class TensorBlock(nn.Module):
    """`Block` with its perceptron cut over the tensor ranks, as in Megatron-LM: up by columns, down by rows."""

    def __init__(self, group, mark: bool = True) -> None:
        super().__init__()
        self.group = group
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        whole = Block()
        self.norm = whole.norm
        self.up = skip_init(nn.Linear, WIDTH, 2 * WIDTH // size)  # draws nothing: all cuts start from the same values
        self.down = skip_init(nn.Linear, 2 * WIDTH // size, WIDTH, bias=False)
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        with torch.no_grad():
            self.up.weight.copy_(whole.up.weight.chunk(size, 0)[rank])
            self.up.bias.copy_(whole.up.bias.chunk(size, 0)[rank])
            self.down.weight.copy_(whole.down.weight.chunk(size, 1)[rank])
            self.bias.copy_(whole.down.bias)
        for p in (self.up.weight, self.up.bias, self.down.weight):
            p.tensor_model_parallel = mark

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        steps = torch.arange(1, hidden.shape[1] + 1, dtype=hidden.dtype)[:, None]
        past = _SumBackward.apply(self.norm(hidden).cumsum(1) / steps, self.group)
        return hidden + _SumForward.apply(self.down(torch.tanh(self.up(past))), self.group) + self.bias


def cross_entropy(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output[:, :-1].reshape(-1, VOCABULARY).float(), labels[:, 1:].reshape(-1))
