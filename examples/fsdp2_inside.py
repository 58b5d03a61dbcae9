"""A model sharded by FSDP2 inside each node, and gossip between the nodes, as torchtitan builds its meshes.

On two machines with 2 devices each:  torchrun --nnodes 2 --nproc-per-node 2 ... examples/fsdp2_inside.py
On one machine, as two nodes of 2:    torchrun --nproc-per-node 4 examples/fsdp2_inside.py --per-node 2
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as states
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gossamer


def network() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.TransformerEncoderLayer(32, 2, 128, dropout=0.0, batch_first=True, norm_first=True) for _ in range(2)]
    return nn.Sequential(nn.Embedding(16, 32), *blocks, nn.Flatten(), nn.Linear(8 * 32, 16))


def loss_of(model: nn.Module, generator: torch.Generator, size: int = 32) -> Tensor:
    """Eight numbers count up from a random start by a random step, modulo 16: which one is next?"""
    start, step = (torch.randint(low, 16, (size, 1), generator=generator) for low in (0, 1))
    numbers = (start + step * torch.arange(9)) % 16
    return nn.functional.cross_entropy(model(numbers[:, :8]), numbers[:, 8])


def main(steps: int, per_node: int, out: Path, resume: bool) -> None:
    dist.init_process_group("gloo")
    rank, nodes = dist.get_rank(), dist.get_world_size() // per_node
    if per_node < int(os.environ["LOCAL_WORLD_SIZE"]):  # several nodes on one machine, to try this out
        os.environ["GOSSAMER_NODE"] = f"node-{rank // per_node}"
    mesh = init_device_mesh("cpu", (nodes, per_node), mesh_dim_names=("replicate", "shard"))
    for part in (*(model := network())[1:-2], model):
        fully_shard(part, mesh=mesh["shard"])
    optimizer = gossamer.GossipAdamW(model.parameters(), lr=3e-3)
    gossip = gossamer.decentralize(model, optimizer, topology="aer")  # between the nodes
    node = out / f"node-{mesh.get_local_rank('replicate')}"  # each node has its own model and optimizer,
    mine = node / f"gossip-{mesh.get_local_rank('shard')}.pt"  # each worker its own gossip state and rounding
    where = {"checkpoint_id": node, "process_group": mesh["shard"].get_group()}
    if resume:
        dcp.load(kept := dict(enumerate(states.get_state_dict(model, optimizer))), **where)
        states.set_state_dict(model, optimizer, model_state_dict=kept[0], optim_state_dict=kept[1])
        saved, normalized = torch.load(mine, weights_only=True)
        optimizer.load_state_dict({**optimizer.state_dict(), "normalized": normalized})
        gossip.load_state_dict(saved)
    for step in range(done := gossip.steps[0], steps):
        loss_of(model, torch.Generator().manual_seed(1 + rank + 1000 * step)).backward()
        gossip.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 == steps // 2:
            dcp.save(dict(enumerate(states.get_state_dict(model, optimizer))), **where)
            torch.save((gossip.state_dict(), optimizer.state_dict().get("normalized", {})), mine)  # not in DCP

    with gossip.averaged(), torch.no_grad():  # every node holds the mean of all nodes
        loss = loss_of(model, torch.Generator().manual_seed(0), size=256)
        whole = states.get_model_state_dict(model, options=states.StateDictOptions(full_state_dict=True))
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
    main(**vars(parser.parse_args()))
