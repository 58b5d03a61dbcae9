"""A task that trains in milliseconds: a small network on made-up numbers."""

import torch
from torch import nn
from torch.nn import functional as F

from gossamer.recipes.task import Batches, evaluating, seeded


class Toy:
    name, unit, metric, higher_is_better = "toy", "samples", "loss", False

    def __init__(self, batch=4, dropout=0.0, norm=False):
        self.batch, self.dropout, self.norm = batch, dropout, norm

    def model(self, seed):
        with seeded(seed):
            middle = [nn.BatchNorm1d(8)] if self.norm else []
            return nn.Sequential(nn.Linear(6, 8), *middle, nn.Tanh(), nn.Dropout(self.dropout), nn.Linear(8, 2))

    def batches(self, worker, workers, *, seed):
        def batch(i):
            generator = torch.Generator().manual_seed(seed * 7919 + i * workers + worker)
            x = torch.randn(self.batch, 6, generator=generator)
            return x, torch.stack([x.sum(1), (x[:, 0] * x[:, 1]).sin()], 1)

        return Batches(batch)

    def loss(self, model, batch):
        x, y = batch
        return F.mse_loss(model(x), y)

    def size(self, batch):
        return len(batch[0])

    def evaluate(self, model, *, final=False):
        torch.randn(3)  # an evaluation may draw random numbers; training must not notice
        x, y = next(self.batches(0, 1, seed=999))
        with evaluating(model) as bare:
            return {"loss": float(F.mse_loss(bare(x), y))}

    def describe(self):
        return {"data": "made up"}
