"""What users' models and optimizers look like: dtypes, strides, tied and frozen weights, hooks, closures, lanes."""

import pytest
import torch
from torch import nn

import gossamer
from gossamer.errors import GossamerError, InputError
from policies import policies


def cluster_of(models, optimizers, **settings):
    cluster = gossamer.VirtualCluster(len(models))
    gossips = cluster.decentralize(models, optimizers, **policies(**settings))
    return cluster, gossips


def sgd(models, lr=0.1):
    return [torch.optim.SGD(m.parameters(), lr=lr) for m in models]


def linear(n=2):
    torch.manual_seed(0)
    return [nn.Linear(4, 3) for _ in range(n)]


def fill_grads(model, value=1.0):
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.full_like(p, value)


def step_all(models, optimizers, value=0.0):
    for m, o in zip(models, optimizers, strict=True):
        fill_grads(m, value)
        for one in o if isinstance(o, list) else [o]:
            one.step()


def test_mixed_dtypes_are_mixed_each_in_its_own():
    models = []
    for i in range(3):
        m = nn.Module()
        m.a = nn.Parameter(torch.full((5,), float(i)))
        m.b = nn.Parameter(torch.full((5,), float(i), dtype=torch.bfloat16))
        m.c = nn.Parameter(torch.full((5,), i + 1e-12, dtype=torch.float64))
        models.append(m)
    optimizers = sgd(models, 0.0)
    cluster_of(models, optimizers, topology="complete", broadcast=False)
    for _ in range(2):
        step_all(models, optimizers)
    for m in models:
        assert (m.a.dtype, m.b.dtype, m.c.dtype) == (torch.float32, torch.bfloat16, torch.float64)
        assert m.a.tolist() == [1.0] * 5
        assert m.b.tolist() == [1.0] * 5
        assert m.c[0].item() == pytest.approx(1 + 1e-12, abs=1e-15)


def test_channels_last_keeps_its_strides_and_mixes_right():
    torch.manual_seed(0)
    models = [nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last) for _ in range(3)]
    strides, mean = models[0].weight.stride(), torch.stack([m.weight.detach() for m in models]).mean(dim=0)
    optimizers = sgd(models, 0.0)
    cluster, _ = cluster_of(models, optimizers, topology="complete", broadcast=False)
    for _ in range(2):
        step_all(models, optimizers)
    for m in models:
        assert m.weight.stride() == strides
        torch.testing.assert_close(m.weight.detach(), mean, rtol=1e-6, atol=1e-7)
    cluster.close()
    assert models[0].weight.stride() == strides


def test_odd_strides_empty_and_scalar_parameters():
    models = []
    for i in range(3):
        m = nn.Module()
        m.every_other = nn.Parameter((torch.arange(24.0).reshape(4, 6) + i)[:, ::2])
        m.transposed = nn.Parameter((torch.arange(6.0).reshape(2, 3) * i).t())
        m.expanded = nn.Parameter(torch.full((1,), float(i)).expand(4))
        m.nothing = nn.Parameter(torch.empty(0, 3))
        m.scalar = nn.Parameter(torch.tensor(float(i)))
        models.append(m)
    before = [[p.detach().clone() for p in m.parameters()] for m in models]
    optimizers = sgd(models, 0.0)
    cluster_of(models, optimizers, topology="complete", broadcast=False)
    for m, values in zip(models, before, strict=True):  # laying out changes no value
        assert all(torch.equal(p, v) for p, v in zip(m.parameters(), values, strict=True))
    for _ in range(2):
        step_all(models, optimizers)
    for m in models:
        for p, *values in zip(m.parameters(), *before, strict=True):
            torch.testing.assert_close(p.detach(), torch.stack(values).mean(dim=0))
    assert models[0].scalar.shape == ()
    assert models[0].nothing.shape == (0, 3)
    with torch.no_grad():
        models[0].expanded[0] = 9.0
    assert models[0].expanded[1] != 9.0


@pytest.mark.parametrize("bucket_mib", [None, 0.0001])
def test_a_dtype_with_only_empty_parameters(bucket_mib):
    """The empty parameters have no bucket, and the others are mixed as without them."""
    models, plain = linear(2), linear(2)
    for m in models:
        m.nothing = nn.Parameter(torch.empty(0, dtype=torch.float64))
    mean = torch.stack([m.weight.detach() for m in models]).mean(0)
    assert not torch.equal(models[0].weight, models[1].weight)
    gossips = []
    for ms in (models, plain):
        optimizers = sgd(ms, lr=0.0)
        _, made = cluster_of(ms, optimizers, bucket_mib=bucket_mib, topology="complete", broadcast=False)
        gossips.append(made[0])
        step_all(ms, optimizers)
        step_all(ms, optimizers)
    for m, other in zip(models, plain, strict=True):
        torch.testing.assert_close(m.weight.detach(), mean)
        assert torch.equal(m.weight, other.weight)
        assert m.nothing.shape == (0,)
    assert gossips[0].stats()["bytes_sent"] == gossips[1].stats()["bytes_sent"] > 0


def test_tied_weights_are_one_parameter():
    models = []
    for _ in range(2):
        m = nn.ModuleDict({"in": nn.Embedding(5, 4), "out": nn.Linear(4, 5, bias=False)})
        m["out"].weight = m["in"].weight
        models.append(m)
    optimizers = sgd(models)
    cluster, gossips = cluster_of(models, optimizers)
    step_all(models, optimizers, 1.0)
    step_all(models, optimizers, 1.0)
    assert models[0]["out"].weight is models[0]["in"].weight
    assert [p.name for p in gossips[0].lanes[0].flats[0].places] == ["in.weight"]
    assert list(models[0].state_dict()) == ["in.weight", "out.weight"]
    cluster.close()
    assert models[0]["out"].weight is models[0]["in"].weight


@pytest.mark.parametrize("case", ["one optimizer", "two optimizers", "one filtered out", "one frozen", "not dense"])
def test_overlapping_memory_is_refused(case):
    models, optimizers = [], []
    for _ in range(2):
        base = torch.zeros(40)
        m = nn.Module()
        if case == "not dense":
            m.a, m.b = nn.Parameter(base[::2]), nn.Parameter(base[38:39])
        else:
            m.a, m.b = nn.Parameter(base[:20]), nn.Parameter(base[10:30])
        if case == "one frozen":
            m.b.requires_grad_(False)
        models.append(m)
        if case == "two optimizers":
            optimizers.append([torch.optim.SGD([m.a], lr=0.1), torch.optim.SGD([m.b], lr=0.1)])
        else:
            optimizers.append(torch.optim.SGD([p for p in (m.a, m.b) if p.requires_grad], lr=0.1))
    keep = (lambda name, p: name == "a") if case == "one filtered out" else None
    with pytest.raises(InputError, match=r"parameters 'a' and 'b' share memory without being one object; tie them"):
        cluster_of(models, optimizers, parameters=keep)


def test_neighbors_in_one_storage_are_fine():
    """Slices of one storage that do not overlap, as fused weights split by a user."""
    models = []
    for _ in range(2):
        base = torch.arange(20.0) * (len(models) + 1)
        m = nn.Module()
        m.a, m.b = nn.Parameter(base[:10]), nn.Parameter(base[10:])
        models.append(m)
    optimizers = sgd(models)
    cluster_of(models, optimizers, topology="complete", broadcast=False)
    for _ in range(2):
        for m, o in zip(models, optimizers, strict=True):
            m.a.grad, m.b.grad = torch.full((10,), 1.0), torch.full((10,), -1.0)
            o.step()
    for m in models:  # the mean of both workers' values after the first step, and another step
        torch.testing.assert_close(m.a.detach(), torch.arange(10.0) * 1.5 - 0.2)
        torch.testing.assert_close(m.b.detach(), torch.arange(10.0, 20.0) * 1.5 + 0.2)


def test_complex_is_refused():
    models = [nn.Linear(2, 2, dtype=torch.complex64) for _ in range(2)]
    with pytest.raises(InputError, match=r"parameter 'weight' is complex; store it as a real tensor"):
        cluster_of(models, sgd(models))


def test_lbfgs_foreign_and_repeated_parameters_are_refused():
    models = linear()
    with pytest.raises(InputError, match="LBFGS evaluates its closure several times"):
        cluster_of(models, [torch.optim.LBFGS(m.parameters()) for m in models])
    with pytest.raises(InputError, match=r"optimizer 0 \(SGD\) holds a parameter of shape \(3, 4\) that is not"):
        cluster_of(models, sgd(linear()))
    with pytest.raises(InputError, match="parameter 'weight' is held by optimizers 0 and 1; give it to one"):
        cluster_of(models, [[torch.optim.SGD([m.weight], lr=0.1), torch.optim.Adam([m.weight])] for m in models])
    with pytest.raises(InputError, match="needs at least one optimizer, got an empty list"):
        cluster_of(models, [[], []])
    with pytest.raises(InputError, match="takes a torch optimizer or a list of them, got str"):
        cluster_of(models, [["sgd"], ["sgd"]])
    with pytest.raises(InputError, match="has no parameter to mix; check parameters= and requires_grad"):
        cluster_of(models, sgd(models), parameters=lambda name, p: False)


def test_a_group_added_later_is_refused():
    models = linear()
    optimizers = [torch.optim.SGD([m.weight], lr=0.1) for m in models]
    cluster_of(models, optimizers)
    optimizers[0].add_param_group({"params": [models[0].bias]})
    fill_grads(models[0])
    with pytest.raises(GossamerError, match=r"parameter groups changed from \[1\] to \[1, 1\] .* add all groups first"):
        optimizers[0].step()


def reassign(model):
    model.weight.data = torch.zeros(3, 4)


@pytest.mark.parametrize("move", [lambda m: m.half(), lambda m: m.to(torch.float64), reassign])
def test_moving_the_model_later_is_noticed(move):
    models = linear()
    optimizers = sgd(models)
    cluster_of(models, optimizers)
    move(models[0])
    with pytest.raises(GossamerError, match=r"parameter 'weight' was moved to other storage .* then call decentralize"):
        optimizers[0].step()


def test_close_gives_storage_back_and_removes_the_hooks():
    models = linear(3)
    optimizers = sgd(models)
    cluster, gossips = cluster_of(models, optimizers)
    step_all(models, optimizers, 1.0)
    before = models[0].weight.data_ptr()
    values = [p.detach().clone() for p in models[0].parameters()]
    cluster.close(average=False)
    assert all(torch.equal(p, v) for p, v in zip(models[0].parameters(), values, strict=True))
    assert models[0].weight.data_ptr() != before  # no longer in the buffer
    assert models[0].weight.untyped_storage().resizable()  # but allocated by torch
    assert not optimizers[0]._optimizer_step_pre_hooks
    assert not optimizers[0]._optimizer_step_post_hooks
    for _ in range(3):  # a plain optimizer again: no peer is waited for
        fill_grads(models[0])
        optimizers[0].step()
    assert gossips[0].stats()["steps"] == 1
    with pytest.raises(GossamerError, match=r"consensus_distance\(\) after close\(\); call decentralize\(\) again"):
        gossips[0].consensus_distance()


def test_a_cluster_can_be_used_again_after_close():
    """Messages that no worker received before close() must not reach the next run."""
    models = linear(2)
    optimizers = sgd(models, 0.0)
    cluster, _ = cluster_of(models, optimizers, topology="complete")
    fill_grads(models[0])
    optimizers[0].step()  # worker 1 does not
    cluster.close()
    with torch.no_grad():
        models[0].weight.fill_(1.0)
        models[1].weight.fill_(3.0)
    cluster.decentralize(models, optimizers, topology="complete", broadcast=False)
    for _ in range(2):
        step_all(models, optimizers)
    assert models[0].weight.eq(2.0).all()
    assert models[1].weight.eq(2.0).all()


class Nested(torch.optim.SGD):
    """A subclass whose step calls super().step()."""

    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.parametrize("closure", [False, True])
def test_a_step_that_calls_super_step_is_one_step(closure):
    models = linear(2)
    optimizers = [Nested(m.parameters(), lr=0.0) for m in models]
    _cluster, gossips = cluster_of(models, optimizers, topology="complete", broadcast=False)
    mean = torch.stack([m.weight.detach() for m in models]).mean(dim=0)
    for _ in range(2):
        for m, o in zip(models, optimizers, strict=True):
            fill_grads(m)
            o.step(*([lambda: torch.tensor(0.0)] if closure else []))
    assert [g.stats()["rounds"] for g in gossips] == [2, 2]
    assert [g.stats()["steps"] for g in gossips] == [2, 2]
    torch.testing.assert_close(models[0].weight.detach(), mean)


class Failing(torch.optim.SGD):
    fail = False

    def step(self, closure=None):
        if self.fail:
            raise RuntimeError("out of memory")
        return super().step(closure)


def test_an_error_inside_step_leaves_the_worker_usable():
    models, twins = linear(2), linear(2)
    optimizers = [Failing(m.parameters(), lr=0.1) for m in models]
    twin_optimizers = [Failing(m.parameters(), lr=0.1) for m in twins]
    _cluster, gossips = cluster_of(models, optimizers, topology="complete", broadcast=False)
    cluster_of(twins, twin_optimizers, topology="complete", broadcast=False)
    for t in range(4):
        if t == 2:
            fill_grads(models[0], 5.0)
            optimizers[0].fail = True
            with pytest.raises(RuntimeError, match="out of memory"):
                optimizers[0].step()
            optimizers[0].fail = False
        step_all(models, optimizers, 1.0)
        step_all(twins, twin_optimizers, 1.0)
    assert [g.stats()["rounds"] for g in gossips] == [4, 4]
    assert torch.equal(models[0].weight, twins[0].weight)
    assert torch.equal(models[1].weight, twins[1].weight)


@pytest.mark.parametrize("keyword", [False, True])
def test_a_closure_computes_at_the_unmixed_point(keyword):
    """step(closure) equals backward(), step(): the gradient belongs to the parameters before mixing."""
    data = torch.randn(4, 3, 5, 4, generator=torch.Generator().manual_seed(0))
    runs = []
    for closed in (True, False):
        models = linear(3)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models]
        cluster_of(models, optimizers, topology="ring", broadcast=False)
        losses = []
        for t in range(4):
            for i, (m, o) in enumerate(zip(models, optimizers, strict=True)):

                def compute(m=m, o=o, batch=data[t, i]):
                    o.zero_grad()
                    loss = m(batch).square().mean()
                    loss.backward()
                    return loss

                if not closed:
                    losses.append(float(compute().detach()))
                    o.step()
                else:
                    losses.append(float((o.step(closure=compute) if keyword else o.step(compute)).detach()))
        runs.append((losses, [m.weight.detach().clone() for m in models]))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(a, b) for a, b in zip(runs[0][1], runs[1][1], strict=True))


def test_a_closure_that_raises_leaves_the_exchange_for_the_next_step():
    models = linear(2)
    optimizers = sgd(models, 0.0)
    _, gossips = cluster_of(models, optimizers, topology="complete", broadcast=False)
    mean = torch.stack([m.weight.detach() for m in models]).mean(dim=0)
    step_all(models, optimizers)
    before = models[0].weight.detach().clone()

    def broken():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        optimizers[0].step(broken)
    assert torch.equal(models[0].weight, before)
    step_all(models, optimizers)
    torch.testing.assert_close(models[0].weight.detach(), mean)
    assert gossips[0].stats()["steps"] == 2


def test_local_parameters_stay_local():
    models = linear(3)
    optimizers = sgd(models, 0.0)
    cluster, _ = cluster_of(
        models, optimizers, topology="complete", broadcast=False, parameters=lambda name, p: name == "weight"
    )
    biases = [m.bias.detach().clone() for m in models]
    for _ in range(3):
        step_all(models, optimizers)
    assert torch.allclose(models[0].weight, models[2].weight, atol=1e-6)
    assert all(torch.equal(m.bias, b) for m, b in zip(models, biases, strict=True))
    with cluster.averaged():
        assert all(torch.equal(m.bias, b) for m, b in zip(models, biases, strict=True))


def test_start_from_worker_0_frozen_parameters_and_buffers_too():
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)) for _ in range(3)]
    for i, m in enumerate(models):
        m[0].bias.requires_grad_(False)
        m[1].running_mean.fill_(i)
        m[1].num_batches_tracked.fill_(i)
    first = {k: v.clone() for k, v in models[0].state_dict().items()}
    cluster_of(models, sgd(models))
    for m in models:
        assert all(torch.equal(v, first[k]) for k, v in m.state_dict().items())


def test_every_worker_may_keep_its_own_start():
    models = linear(3)
    before = [m.weight.detach().clone() for m in models]
    cluster_of(models, sgd(models), broadcast=False)
    assert all(torch.equal(m.weight, b) for m, b in zip(models, before, strict=True))


def test_two_optimizers_one_of_which_skips_steps():
    """Each optimizer has rounds of its own; stepping one half as often halves its rounds only."""
    torch.manual_seed(0)
    models = [nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(3, 2)}) for _ in range(3)]
    optimizers = [[torch.optim.SGD(m[k].parameters(), lr=0.0) for k in "ab"] for m in models]
    means = {k: torch.stack([m[k].weight.detach() for m in models]).mean(dim=0) for k in "ab"}
    cluster, gossips = cluster_of(models, optimizers, topology="complete", broadcast=False)
    for t in range(6):
        for m, (first, second) in zip(models, optimizers, strict=True):
            fill_grads(m)
            first.step()
            if t % 2:
                second.step()
    for gossip in gossips:
        assert [lane["rounds"] for lane in gossip.stats()["lanes"]] == [6, 3]
    for m in models:
        for k in "ab":
            torch.testing.assert_close(m[k].weight.detach(), means[k])
    with cluster.averaged():
        pass


def test_one_worker_skips_one_of_two_optimizers():
    """Worker 0 skips a step of the second optimizer; a collective call brings all workers to one round."""
    torch.manual_seed(0)
    models = [nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(3, 2)}) for _ in range(3)]
    optimizers = [[torch.optim.SGD(m[k].parameters(), lr=0.0) for k in "ab"] for m in models]
    cluster, gossips = cluster_of(models, optimizers, topology="ring", broadcast=False)
    for i, (m, (first, second)) in enumerate(zip(models, optimizers, strict=True)):
        fill_grads(m)
        first.step()
        if i != 0:
            second.step()
    cluster.consensus_distance()
    assert [[lane.k for lane in g.lanes] for g in gossips] == [[1, 1]] * 3
    assert [g.stats()["mix_only_rounds"] for g in gossips] == [1, 0, 0]


def test_a_parameter_unfrozen_later_is_refused():
    models = linear()
    for m in models:
        m.bias.requires_grad_(False)
    optimizers = sgd(models)
    cluster_of(models, optimizers)
    step_all(models, optimizers)
    models[0].bias.requires_grad_(True)
    fill_grads(models[0])
    with pytest.raises(GossamerError, match="unfrozen"):
        optimizers[0].step()


@pytest.mark.parametrize("per_node", [[1, 1], [2, 2], [3, 3]])
def test_the_averaged_model_has_the_same_bits_on_every_worker(per_node):
    models = linear(sum(per_node))
    cluster = gossamer.VirtualCluster(per_node=per_node)
    cluster.decentralize(models, sgd(models), broadcast=False)
    with cluster.averaged():
        for m in models[1:]:
            assert torch.equal(m.weight, models[0].weight)
