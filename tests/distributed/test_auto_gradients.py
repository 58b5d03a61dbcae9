"""`gradients="auto"`, the default: what it chooses for a layout, and what users of the default meet then."""

from datetime import timedelta

import networkx as nx
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from workers import QUICK_NAMES, batch, error_of, loss_of, mlp, process_group, real, seeded, vector

import gossamer
from gossamer.engine.build import prepare
from gossamer.engine.node_gradients import PrivateDDP
from gossamer.engine.policies import Settings
from gossamer.lab import WorkerFailed, WorkerPool
from gossamer.topology import Layout

TIMEOUT = timedelta(seconds=60)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def not_the_last(name, parameter):
    return not name.startswith("2.")


def chosen(rank, settings):
    with process_group():
        model = seeded(rank, mlp)
        with gossamer.decentralize(model, sgd(model), timeout=TIMEOUT, **settings) as gossip:
            return gossip.gradients, gossip.replicas


@pytest.mark.parametrize(
    ("per_node", "settings", "expected"),
    [
        ((2, 2), {}, ("node", 2)),
        ((2, 2), {"algorithm": "atc"}, ("node", 2)),
        ((4,), {}, ("worker", 4)),
        ((1, 1), {}, ("worker", 2)),
        ((2, 1), {}, ("worker", 3)),
        ((2, 2), {"algorithm": "ad-psgd", "topology": "ring"}, ("worker", 4)),
        ((2, 2), {"topology": nx.cycle_graph(4)}, ("worker", 4)),  # a graph over workers
        ((2, 2), {"topology": nx.path_graph(2)}, ("node", 2)),  # a graph over nodes
        ((2, 2), {"parameters": not_the_last}, ("worker", 4)),  # the others stay local
    ],
    ids=["2x2", "2x2-atc", "1x4", "2x1", "unequal", "asynchronous", "graph-of-workers", "graph-of-nodes", "a-part"],
)
def test_the_choice_follows_from_layout_algorithm_and_topology(pools, per_node, settings, expected):
    assert pools(*per_node).run(chosen, settings) == [expected] * sum(per_node)


def test_elastic_and_virtual_workers_step_on_their_own_gradients():
    models = [mlp() for _ in range(4)]
    elastic = Settings.of(on_failure="continue")
    prepared = prepare(models[0], sgd(models[0]), "aer", elastic, None, Layout.of([2, 2]), 0, range(4))
    assert (prepared.gradients, prepared.schedule.topology.n) == ("worker", 4)
    with gossamer.VirtualCluster(per_node=[2, 2]) as cluster:
        handles = cluster.decentralize(models, [sgd(m) for m in models])
        assert [(g.gradients, g.replicas) for g in handles] == [("worker", 4)] * 4


def among_some(rank, members):
    with process_group():
        group, found = dist.new_group(members), None
        if rank in members:
            model = seeded(rank, mlp)
            with gossamer.decentralize(model, sgd(model), process_group=group, timeout=TIMEOUT) as gossip:
                found = gossip.gradients, gossip.replicas
        dist.barrier()
        return found


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ([1, 2, 4, 5], ("node", 2)),
        ([0, 3], ("worker", 2)),  # one of each node
        ([0, 1, 2], ("worker", 3)),  # one node
        ([0, 1, 2, 3, 4], ("worker", 5)),  # nodes of different sizes
    ],
)
def test_the_layout_is_that_of_the_process_group(pools, members, expected):
    found = pools(3, 3).run(among_some, members)
    assert found == [expected if rank in members else None for rank in range(6)]


def without_averages(rank):
    """A process group that cannot average on the model's device, as NCCL with a model on the CPU."""
    with process_group():
        model = seeded(rank, mlp)
        before, dist.get_backend_config = dist.get_backend_config, lambda group=None: "cuda:nccl"
        try:
            gossip = gossamer.decentralize(model, sgd(model), timeout=TIMEOUT)
        finally:
            dist.get_backend_config = before
        with gossip:
            return gossip.gradients


def test_a_process_group_of_other_devices_cannot_average(pools):
    assert pools(2, 2).run(without_averages) == ["worker"] * 4


def ddp_over_the_node(rank):
    with process_group():
        wrapped = DistributedDataParallel(seeded(rank, mlp), process_group=gossamer.node_group())
        with gossamer.decentralize(wrapped, sgd(wrapped), timeout=TIMEOUT) as gossip:
            return gossip.gradients, any(isinstance(i, PrivateDDP) for i in gossip._inside)


@pytest.mark.parametrize("per_node", [(2, 2), (2, 1)])
def test_a_model_in_ddp_stays_as_it_is(pools, per_node):
    assert pools(*per_node).run(ddp_over_the_node) == [("node", False)] * sum(per_node)


def trained(rank, settings):
    with process_group():
        model = seeded(rank, mlp)
        optimizer = gossamer.GossipAdamW(model.parameters(), lr=0.02)
        with gossamer.decentralize(model, optimizer, timeout=TIMEOUT, **settings):
            for step in range(6):
                loss_of(model, rank, step).backward()
                optimizer.step()
                optimizer.zero_grad()
            return vector(model), optimizer.replicas


def test_the_default_trains_as_with_averages_inside_the_node(pools):
    default, node, worker = (pools(2, 2).run(trained, s) for s in ({}, {"gradients": "node"}, {"gradients": "worker"}))
    for (ours, replicas), (theirs, _), (others, _) in zip(default, node, worker, strict=True):
        assert torch.equal(ours, theirs)
        assert not torch.allclose(ours, others)
        assert replicas == 2
    assert torch.equal(default[0][0], default[1][0])  # a node is one replica
    assert not torch.equal(default[0][0], default[2][0])


def saved_and_loaded(rank):
    with process_group():
        model = seeded(rank, mlp)
        with gossamer.decentralize(model, sgd(model), gradients="worker", timeout=TIMEOUT) as gossip:
            state = gossip.state_dict()
        with gossamer.decentralize(model, sgd(model), timeout=TIMEOUT) as gossip:
            assert not gossip.accepts(state)
            with pytest.raises(gossamer.InputError) as error:
                gossip.load_state_dict(state)
            return str(error.value)


def test_a_state_of_other_replicas_is_refused(pools):
    for said in pools(2, 2).run(saved_and_loaded):
        assert "saved with 4 replicas of the model and this run has 2, because gradients='node' here" in said


def resumed(rank, folder):
    """Train with a replica per worker, save, and continue with a replica per node."""
    with process_group():
        model = seeded(rank, mlp)
        with gossamer.decentralize(model, sgd(model), gradients="worker", timeout=TIMEOUT) as gossip:
            optimizer = gossip.lanes[0].optimizer
            loss_of(model, rank, 0).backward()
            optimizer.step()
            checkpoints = gossamer.Checkpoints(folder)
            checkpoints.save(gossip, model, optimizer)
            checkpoints.wait()
            own = vector(model)
        again = seeded(rank, mlp)
        optimizer = sgd(again)
        with gossamer.decentralize(again, optimizer, timeout=TIMEOUT) as gossip:
            loaded = gossamer.Checkpoints(folder).load(gossip, again, optimizer)
            return own, vector(again), loaded.resized, gossip.gradients


def test_a_checkpoint_of_workers_becomes_one_of_nodes(pools, tmp_path):
    owns, nodes, resized, gradients = zip(*pools(2, 2).run(resumed, tmp_path), strict=True)
    assert set(resized) == {True}
    assert set(gradients) == {"node"}
    assert not torch.equal(owns[0], owns[1])
    for node, first in enumerate((0, 2)):
        assert torch.equal(nodes[first], nodes[first + 1]), f"the workers of node {node} hold one replica"
        torch.testing.assert_close(nodes[first], (owns[first] + owns[first + 1]) / 2)


# -- what the default asks of users ----------------------------------------------------------------------------


def training(rank, decentralize, step):
    """`step` gets the model and an optimizer of it under the default gradients."""
    model = seeded(0, mlp)
    optimizer = sgd(model)
    gossip = gossamer.decentralize(model, optimizer, timeout=TIMEOUT)
    try:
        step(rank, model, optimizer)
    finally:
        dist.barrier()  # all workers fail alike
        gossip._stop(drain=0.0)


def unused_parameter(rank, model, optimizer):
    model[0](batch(rank, 0)[0]).square().mean().backward()
    optimizer.step()


def written_gradients(rank, model, optimizer):
    parameters = list(model.parameters())
    for p, gradient in zip(parameters, torch.autograd.grad(loss_of(model, rank, 0), parameters), strict=True):
        p.grad = gradient
    optimizer.step()


def sparse_gradient(rank, model, optimizer):
    nn.functional.embedding(torch.tensor([0, 1]), model[2].weight, sparse=True).sum().backward()


@pytest.mark.parametrize(
    ("step", "says"),
    [
        (sparse_gradient, "parameter '2.weight' got a sparse gradient"),
        (unused_parameter, "parameters '2.bias', '2.weight' got no gradient in the backward pass"),
        (written_gradients, "the gradients of this node's workers differ"),
    ],
)
def test_errors_name_the_remedy(pools, step, says):
    for kind, text in pools(2, 2).run(error_of, training, step):
        assert kind == "GossamerError"
        assert says in text
        assert text.endswith("or use gradients='worker'")


def parts(rank, decentralize):
    """Two optimizers, each of a part of the model, of which one has no gradient."""
    model = seeded(0, mlp)
    first, second = sgd(model[0]), sgd(model[2])
    gossip = gossamer.decentralize(model, [first, second], timeout=TIMEOUT)
    try:
        for _ in range(2):
            model[2].bias.square().sum().backward()
        second.step()
    finally:
        dist.barrier()
        gossip._stop(drain=0.0)


def test_several_optimizers_name_the_remedy(pools):
    for kind, text in pools(2, 2).run(error_of, parts):
        assert kind == "GossamerError"
        assert "parameter '2.bias' got a second gradient before parameter '2.weight' got the first" in text
        assert text.endswith("or use gradients='worker'")


def uneven(rank, decentralize):
    """Worker 0 has one batch less than the others."""
    model = seeded(0, mlp)
    optimizer = sgd(model)
    with gossamer.decentralize(model, optimizer, timeout=TIMEOUT):
        for step in range(4 - (rank == 0)):
            loss_of(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()


def test_uneven_data_inside_a_node_is_an_error():
    with (
        WorkerPool(per_node=[2, 2], timeout=300, grace=1.0, env=QUICK_NAMES) as pool,
        pytest.raises(WorkerFailed) as failed,
    ):
        pool.run(real, uneven)
    said = str(failed.value)
    assert "worker 0 is in close() after 3 backward passes, and worker 1 of the same node waits for it in" in said
    assert "give each of them the same number of batches, or use gradients='worker'" in said


def uneven_nodes(rank):
    """The workers of a node have equally many batches, those of the other node have more."""
    with process_group():
        model = seeded(0, mlp)
        optimizer = sgd(model)
        with gossamer.decentralize(model, optimizer, timeout=TIMEOUT) as gossip:
            for step in range(3 if rank < 2 else 6):
                loss_of(model, rank, step).backward()
                optimizer.step()
                optimizer.zero_grad()
            own = vector(model)
            with gossip.averaged():
                return own, vector(model), gossip.steps


def test_nodes_may_have_different_numbers_of_batches(pools):
    owns, means, steps = zip(*pools(2, 2).run(uneven_nodes), strict=True)
    assert steps == ([3], [3], [6], [6])
    assert torch.equal(owns[2], owns[3])  # the last to step
    assert all(torch.equal(mean, means[0]) for mean in means)


def waiting(rank):
    with process_group():
        model = seeded(rank, mlp)
        with gossamer.decentralize(model, sgd(model), timeout=TIMEOUT) as gossip:
            return gossip._inside[0]._group._get_backend(torch.device("cpu")).options._timeout


def test_backward_passes_wait_no_longer_than_the_timeout(pools):
    assert pools(2, 2).run(waiting) == [TIMEOUT] * 4
