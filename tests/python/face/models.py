"""Small models of the shapes that sharding has to get right, and what feeds them."""

import torch
from torch import nn
from torch.nn import functional as F

WIDTH = 6  # of every input and output


class Block(nn.Module):
    """Rows that no number of ranks divides, and a parameter with fewer rows than ranks."""

    def __init__(self, width=WIDTH, hidden=7):
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)
        self.scale = nn.Parameter(torch.ones(1, width))

    def forward(self, x):
        return x + self.scale * self.down(torch.tanh(self.up(x)))


class Attention(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = Block(width, 4 * width)

    def forward(self, x):
        h = self.norm(x)
        return self.mlp(x + self.attention(h, h, h, need_weights=False)[0])


class Stack(nn.Module):
    """Blocks, and parameters of the root's own before and after them."""

    def __init__(self, depth=3, block=Block):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x):
        x = x + self.shift
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Tied(nn.Module):
    """A token model whose output layer is its embedding."""

    def __init__(self, vocabulary=11):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.out = nn.Linear(WIDTH, vocabulary, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, x):
        tokens = (x.abs() * 100).long() % self.embedding.num_embeddings
        h = self.embedding(tokens)
        for block in self.blocks:
            h = block(h)
        return self.out(h)


class Frozen(Stack):
    """All of one block and a part of another are frozen."""

    def __init__(self):
        super().__init__()
        self.blocks[1].requires_grad_(False)
        self.blocks[2].up.weight.requires_grad_(False)


class Unused(Stack):
    """A block and a parameter that no forward uses."""

    def __init__(self):
        super().__init__()
        self.spare = Block()
        self.lost = nn.Parameter(torch.ones(3))


class Recurrent(nn.Module):
    """Keeps references to its weights beside the table of parameters."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, 5, batch_first=True)
        self.blocks = nn.ModuleList([nn.Linear(5, WIDTH)])

    def forward(self, x):
        return self.blocks[0](self.lstm(x)[0])


class Convolution(nn.Module):
    """BatchNorm's buffers stay whole. In eval mode: the statistics of a batch are each rank's own."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Conv1d(4, 5, 3, padding=1), nn.BatchNorm1d(5), nn.Conv1d(5, 4, 1)])
        self.eval()

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


MODELS = {
    "stack": Stack,
    "transformer": lambda: Stack(2, Attention),
    "tied": Tied,
    "frozen": Frozen,
    "unused": Unused,
    "recurrent": Recurrent,
    "convolution": Convolution,
}


def make(name, seed=0):
    torch.manual_seed(seed)
    return MODELS[name]()


def batches(world, step, dtype=torch.float32):
    """What each rank gets in a step: (2, 4, WIDTH), different on each."""
    generator = torch.Generator().manual_seed(1000 + step)
    return [torch.randn(2, 4, WIDTH, generator=generator, dtype=dtype) for _ in range(world)]


def loss_of(output):
    return F.mse_loss(output.float(), torch.ones_like(output, dtype=torch.float32))
