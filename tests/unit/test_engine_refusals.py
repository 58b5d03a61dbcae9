"""Uses that would go wrong without a word are refused, or named by a warning."""

import warnings

import pytest
import torch
from torch import nn

import gossamer
from gossamer.errors import GossamerError, GossamerWarning, InputError


def start(n=2, make=lambda m: torch.optim.SGD(m.parameters(), lr=0.1), models=None, **settings):
    models = [nn.Linear(4, 3) for _ in range(n)] if models is None else models
    optimizers = [make(m) for m in models]
    cluster = gossamer.VirtualCluster(len(models))
    gossips = cluster.decentralize(models, optimizers, **settings)
    return cluster, gossips, models, optimizers


class ZeroRedundancyOptimizer(torch.optim.SGD):
    pass


class AdamWScheduleFree(torch.optim.AdamW):
    pass


class SAM(torch.optim.SGD):
    def first_step(self):
        pass

    def second_step(self):
        pass


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (ZeroRedundancyOptimizer, "updates a shard of the parameters on every worker"),
        (AdamWScheduleFree, "keeps the sequence that it optimizes in its state"),
        (SAM, "pass its base_optimizer to decentralize"),
        (torch.optim.LBFGS, "evaluates its closure several times per step"),
    ],
)
def test_optimizers_that_gossip_would_break_are_refused(kind, said):
    with pytest.raises(InputError, match=said):
        start(make=lambda m: kind(m.parameters(), lr=0.1))


def test_torch_own_zero_redundancy_optimizer_has_the_name_that_is_refused():
    from torch.distributed.optim import ZeroRedundancyOptimizer as Real

    assert Real.__name__ == ZeroRedundancyOptimizer.__name__


def test_steps_inside_averaged_are_refused():
    cluster, _, models, optimizers = start()
    with cluster.averaged():
        models[0](torch.ones(1, 4)).sum().backward()
        with pytest.raises(GossamerError, match=r"optimizer.step\(\) inside `with gossip.averaged\(\)`"):
            optimizers[0].step()
    for model, optimizer in zip(models, optimizers, strict=True):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()


def test_a_model_on_the_meta_device_is_named():
    with torch.device("meta"):
        models = [nn.Linear(4, 3) for _ in range(2)]
    with pytest.raises(InputError, match="parameter 'weight' is on the meta device and has no values; materialize"):
        start(models=models)


def test_a_second_decentralize_without_close_is_refused():
    cluster, _, models, _ = start()
    with pytest.raises(InputError, match=r"'weight' is mixed by an earlier decentralize\(\) call that is still open"):
        start(models=models)
    cluster.close()
    start(models=models)


@pytest.mark.parametrize("memory", [torch.channels_last, torch.contiguous_format])
def test_memory_formats_are_compared(memory):
    models = [nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3).to(memory_format=memory)]
    if memory is torch.contiguous_format:
        start(models=models)
        return
    with pytest.raises(
        InputError, match=r"worker 0 has \"strides \[27, 9, 3, 1\]\", worker 1 has \"strides \[27, 1, 9"
    ):
        start(models=models)


def test_one_channel_has_one_memory_format():
    """The strides of dimensions of size one mean nothing."""
    models = [nn.Conv2d(1, 4, 3), nn.Conv2d(1, 4, 3).to(memory_format=torch.channels_last)]
    weights = [m.weight.detach().clone() for m in models]
    start(models=models, broadcast=False)
    assert all(map(torch.equal, [m.weight for m in models], weights))


def test_parameters_that_change_without_a_step_are_named():
    """The optimizer that steps is not the one that was passed: a copy, a wrapper, an outer optimizer."""
    _, gossips, models, optimizers = start(1)
    other = torch.optim.SGD(models[0].parameters(), lr=0.1)
    models[0](torch.ones(1, 4)).sum().backward()
    other.step()
    with pytest.warns(GossamerWarning, match=r"no step of SGD was seen, so nothing has been exchanged"):
        gossips[0]._warn_if_unseen()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gossips[0]._warn_if_unseen()  # once
    optimizers[0].step()


def test_nothing_is_said_before_training_or_after_loading():
    _, gossips, models, _ = start(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gossips[0]._warn_if_unseen()
        models[0].load_state_dict({k: v + 1 for k, v in models[0].state_dict().items()})
        gossips[0]._warn_if_unseen()


def test_a_neighbor_guard_accepts_changes_of_a_bucket_that_is_zero():
    models = [nn.Linear(4, 3, bias=False) for _ in range(2)]
    with torch.no_grad():
        models[0].weight.zero_()
        models[1].weight.fill_(2.0)
    guard = gossamer.NeighborGuard(max_jump=10.0)
    make = lambda m: torch.optim.SGD(m.parameters(), lr=0.0)  # noqa: E731
    _, gossips, models, optimizers = start(make=make, models=models, guard=guard, topology="complete", broadcast=False)
    for _ in range(2):
        for model, optimizer in zip(models, optimizers, strict=True):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
    assert gossips[0].stats()["refused_by_peer"] == {}
    assert models[0].weight.eq(1.0).all()


def test_close_inside_averaged_is_refused():
    cluster, _, models, _ = start()
    before = models[1].weight.clone()
    with cluster.averaged(), pytest.raises(GossamerError, match="leave the block first"):
        cluster.close()
    assert torch.equal(models[1].weight, before)
    cluster.close()


def test_a_virtual_cluster_without_workers_says_so():
    with pytest.raises(InputError, match=r"call its decentralize\(\) first"):
        gossamer.VirtualCluster(2).consensus_distance()


def test_virtual_workers_are_not_elastic():
    with pytest.raises(InputError, match="leave on_failure out"):
        start(on_failure="continue")


def test_two_guards_of_one_kind_are_refused():
    guards = [gossamer.ConsensusGuard(), gossamer.ConsensusGuard(max_ratio=0.1)]
    with pytest.raises(InputError, match="two policies of one kind"):
        start(guard=guards)


def test_a_misspelled_on_failure_is_named_even_without_a_process_group():
    model = nn.Linear(2, 2)
    with pytest.raises(InputError, match="on_failure must be one of raise, continue, got 'contine'"):
        gossamer.decentralize(model, torch.optim.SGD(model.parameters(), lr=0.1), on_failure="contine")
