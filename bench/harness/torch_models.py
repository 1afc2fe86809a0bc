"""The models that are measured. cpp/models.h holds the same ones, built in the same order."""

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """Attention (four Linear) and an MLP (two), each after a LayerNorm: 16 parameters."""

    def __init__(self, width):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        h = self.norm1(x)
        x = x + self.out(F.scaled_dot_product_attention(self.query(h), self.key(h), self.value(h)))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Rows(nn.Module):
    """Four parameters of any number of rows and as little compute as a group can have, for the scale in the world."""

    def __init__(self, rows, columns):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Parameter(torch.rand(rows, columns)) for _ in range(4))

    def forward(self, x):
        return (x * self.a + self.b) * self.c + self.d


def make_model(args):
    torch.manual_seed(0)
    layer = {"rows": lambda: Rows(args.rows, args.columns), "norms": lambda: nn.LayerNorm(args.width),
             "block": lambda: Block(args.width)}[args.model]
    return nn.Sequential(*[layer() for _ in range(args.layers)])


def make_input(args, rank):
    torch.manual_seed(1000 + rank)
    return torch.randn(args.rows, args.columns) if args.model == "rows" else torch.randn(args.batch, args.seq, args.width)
