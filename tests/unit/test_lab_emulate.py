"""The emulated accelerator: real parameters and gradients, the given compute time, layer by layer."""

import copy
import time

import pytest
import torch

from gossamer import InputError
from gossamer.lab.emulate import EmulatedModel


@pytest.mark.parametrize(("mb", "layers"), [(4, 8), (0.001, 3), (1.234, 7), (0.00001, 1)])
def test_parameters_add_up(mb, layers):
    model = EmulatedModel(mb, layers, 0.0)
    assert model.parameter_bytes == 4 * round(mb * 1e6 / 4)
    assert len(model.layers) == layers


def test_every_parameter_gets_its_own_gradient():
    model = EmulatedModel(0.1, 4, 0.0, gradient=0.5)
    model().backward()
    model().backward()
    grads = [p.grad for p in model.parameters()]
    assert all((g == 1.0).all() for g in grads)  # accumulated as in any model
    assert len({g.data_ptr() for g in grads}) == len(grads)


def test_busy_compute_uses_the_core():
    model = EmulatedModel(0.01, 4, 0.2, busy=True)
    before = time.process_time()
    model().backward()
    assert time.process_time() - before > 0.05  # sleeping would use none
    assert all(p.grad is not None for p in model.parameters())


def test_a_real_optimizer_trains_it():
    model = EmulatedModel(0.01, 2, 0.0, gradient=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    before = copy.deepcopy(model.state_dict())
    model().backward()
    optimizer.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name] - 0.25)


def test_gradients_come_last_layer_first():
    model = EmulatedModel(0.01, 4, 0.0)
    order = []
    for layer in model.layers:
        for p in layer.parameters():
            p.register_post_accumulate_grad_hook(lambda _, index=layer.index: order.append(index))
    model().backward()
    assert order == sorted(order, reverse=True)
    assert set(order) == {0, 1, 2, 3}


def test_layers_sleep_to_evenly_spaced_deadlines(monkeypatch):
    now, slept = [100.0], []

    def sleep(seconds):
        slept.append(seconds)
        now[0] += seconds

    monkeypatch.setattr("gossamer.lab.emulate.time.perf_counter", lambda: now[0])
    monkeypatch.setattr("gossamer.lab.emulate.time.sleep", sleep)
    model = EmulatedModel(0.01, 2, [0.3, 0.6])
    loss = model()
    assert slept == pytest.approx([0.05, 0.05])
    now[0] += 1.0  # a pause between the passes is not part of the compute time
    loss.backward()
    assert slept == pytest.approx([0.05, 0.05, 0.1, 0.1])
    model().backward()
    assert sum(slept[4:]) == pytest.approx(0.6)
    model.reset()
    model().backward()
    assert sum(slept[8:]) == pytest.approx(0.3)


def test_a_step_takes_at_least_its_compute_time_and_little_cpu():
    model = EmulatedModel(0.1, 4, 0.2)
    wall, cpu = time.perf_counter(), time.process_time()
    model().backward()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    assert wall >= 0.2
    assert cpu < wall / 2


def test_evaluation_does_not_advance_the_step():
    model = EmulatedModel(0.01, 1, [0.0, 0.0])
    model()
    model.eval()
    model()
    assert model.step == 0


@pytest.mark.parametrize(
    ("mb", "layers", "seconds"),
    [(0, 1, 0.1), (-1, 1, 0.1), (1, 0, 0.1), (1e-6, 4, 0.1), (1, 1, -0.1), (1, 1, []), (1, 1, float("nan"))],
)
def test_bad_arguments_are_refused(mb, layers, seconds):
    with pytest.raises(InputError):
        EmulatedModel(mb, layers, seconds)
