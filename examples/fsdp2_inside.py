"""A model sharded by FSDP2 inside each node, and gossip between the nodes, as torchtitan builds its meshes.

On two machines with 2 devices each:  torchrun --nnodes 2 --nproc-per-node 2 ... examples/fsdp2_inside.py
On one machine, as two nodes of 2:    torchrun --nproc-per-node 4 examples/fsdp2_inside.py --per-node 2

Inside a node FSDP2 gathers parameters and averages gradients exactly, over fast links. Between nodes each worker
exchanges its own shards with its counterparts, over slow links and while it computes. No worker ever holds the whole
model, so models larger than one device can train by gossip.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import gossamer

LETTERS, LENGTH = 16, 24


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, num_heads=2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        y = self.norm1(x)
        x = x + self.attention(y, y, y, attn_mask=mask, is_causal=True, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, width: int = 32, depth: int = 2):
        super().__init__()
        self.embed = nn.Embedding(LETTERS, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, LETTERS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x).clone()  # FSDP2 warns about views


def batch(generator: torch.Generator, size: int = 16) -> Tensor:
    """Sequences that count up from a random letter by a random step: the model has to find the step."""
    start = torch.randint(LETTERS, (size, 1), generator=generator)
    step = torch.randint(1, 4, (size, 1), generator=generator)
    return (start + step * torch.arange(LENGTH)) % LETTERS


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:])


def build(mesh: DeviceMesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model, sharded over the workers of this node."""
    torch.manual_seed(0)
    model = Transformer()
    for block in model.blocks:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    return model, gossamer.GossipAdamW(model.parameters(), lr=3e-3)


def save(folder: Path, mesh: DeviceMesh, model: nn.Module, optimizer: torch.optim.Optimizer, gossip: gossamer.Gossip):
    """What an exact resume needs: each node's model and optimizer, and each worker's gossip state."""
    node = folder / f"node-{mesh.get_local_rank('replicate')}"
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(states, checkpoint_id=node, process_group=mesh["shard"].get_group())
    torch.save(gossip.state_dict(), node / f"gossip-{mesh.get_local_rank('shard')}.pt")


def load(folder: Path, mesh: DeviceMesh, model: nn.Module, optimizer: torch.optim.Optimizer, gossip: gossamer.Gossip):
    node = folder / f"node-{mesh.get_local_rank('replicate')}"
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(states, checkpoint_id=node, process_group=mesh["shard"].get_group())
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    gossip.load_state_dict(torch.load(node / f"gossip-{mesh.get_local_rank('shard')}.pt", weights_only=True))


def main(steps: int, per_node: int, out: Path, resume: bool) -> None:
    dist.init_process_group("gloo")
    rank, nodes = dist.get_rank(), dist.get_world_size() // per_node
    if per_node < int(os.environ["LOCAL_WORLD_SIZE"]):  # several nodes on one machine, to try this out
        os.environ["GOSSAMER_NODE"] = f"node-{rank // per_node}"

    mesh = init_device_mesh("cpu", (nodes, per_node), mesh_dim_names=("replicate", "shard"))
    model, optimizer = build(mesh)
    gossip = gossamer.decentralize(model, optimizer, topology="aer")  # between the nodes
    if resume:
        load(out, mesh, model, optimizer, gossip)

    done = gossip.steps[0]
    for step in range(done, steps):
        loss = loss_of(model, batch(torch.Generator().manual_seed(1 + rank + 1000 * step)))
        loss.backward()
        gossip.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 == steps // 2:
            save(out, mesh, model, optimizer, gossip)

    tokens = batch(torch.Generator().manual_seed(0), size=256)
    with gossip.averaged(), torch.no_grad():  # every node holds the mean of all nodes
        loss = loss_of(model, tokens)
        whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        torch.save(whole, out / "model.pt")  # a plain state_dict, without shards
        print(f"{gossip.replicas} nodes of {per_node}: steps {done} to {steps}, test loss {loss:.6f}", flush=True)
    gossip.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--per-node", type=int, default=int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    parser.add_argument("--out", type=Path, default=Path("runs/fsdp2"))
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in the middle of a run")
    arguments = parser.parse_args()
    main(arguments.steps, arguments.per_node, arguments.out, arguments.resume)
