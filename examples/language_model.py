"""A character-level language model: torchrun --nproc-per-node 4 examples/language_model.py

A transformer with warm-up, clipping and mixed precision. Only the lines with `gossip` are not those of a DDP script.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import gossamer

CONTEXT, WIDTH = 64, 64


class Model(nn.Module):
    def __init__(self, letters: int):
        super().__init__()
        self.letter, self.place = nn.Embedding(letters, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, letters)

    def forward(self, text: Tensor) -> Tensor:
        x = self.letter(text) + self.place.weight[: text.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1])
        return self.head(self.layers(x, mask=mask, is_causal=True))


def sums(count: int) -> str:
    draws = torch.randint(100, (count, 2), generator=torch.Generator().manual_seed(0)).tolist()
    return " ".join(f"{a} plus {b} is {a + b}." for a, b in draws)


def windows(text: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(text) - CONTEXT, (count, 1), generator=generator)
    cut = text[starts + torch.arange(CONTEXT + 1)]
    return cut[:, :-1], cut[:, 1:]


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):  # parameters stay float32: only the computation is bf16
        scores = model(x)
    return nn.functional.cross_entropy(scores.float().transpose(1, 2), y)


def main(text: Path | None, steps: int) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    content = sums(5000) if text is None else text.read_text(encoding="utf-8")
    letters = sorted(set(content))
    codes = torch.tensor([letters.index(letter) for letter in content])
    train, test = codes[: len(codes) * 9 // 10], codes[len(codes) * 9 // 10 :]
    model = Model(len(letters))
    optimizer = gossamer.GossipAdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98))
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=max(1, steps // 10))
    gossip = gossamer.decentralize(model, optimizer, topology="aer")  # instead of DDP(model)
    mine = torch.Generator().manual_seed(dist.get_rank())  # every worker reads its own windows of the text
    for _ in range(steps):
        loss_of(model, *windows(train, 16, mine)).backward()
        gossip.clip_grad_norm_(1.0)  # the threshold that suits all-reduce
        optimizer.step()
        warm_up.step()
        optimizer.zero_grad()
    with gossip.averaged(), torch.no_grad():
        loss = loss_of(model, *windows(test, 64, torch.Generator().manual_seed(0)))
    if dist.get_rank() == 0:
        print(f"{steps} steps on {gossip.replicas} replicas: test loss {loss:.3f} nats per letter", flush=True)
    gossip.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", type=Path, help="the text to learn; default: sums in words")
    parser.add_argument("--steps", type=int, default=200)
    main(**vars(parser.parse_args()))
