"""What runs on real workers in the tests of Lightning: only workers import it, and with it lightning."""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import os
import signal
import warnings

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.strategies.ddp import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from workers import vector

import gossamer
from gossamer.integrations.lightning import FabricGossipStrategy, GossipStrategy

logging.getLogger("lightning").setLevel(logging.ERROR)
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
logging.getLogger("lightning.fabric").setLevel(logging.ERROR)

LIKE_DDP = {"topology": "complete", "algorithm": "atc"}


def dataset(seed: int, size: int = 64) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 6, generator=generator)
    return TensorDataset(x, torch.stack([x.sum(dim=1), x[:, 0] * x[:, 1]], dim=1))


def network(dropout: float = 0.0) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.BatchNorm1d(16), nn.Dropout(dropout), nn.Linear(16, 2))


def small(dropout: float = 0.0) -> nn.Sequential:
    """Without statistics of the batch, which DDP and gossip treat differently."""
    made = network(dropout)
    made[2] = nn.Identity()
    return made


class Regression(L.LightningModule):
    """Trains with one optimizer, and notes its parameters and losses."""

    def __init__(self, net: nn.Module, optimizer: str = "sgd"):
        super().__init__()
        self.net, self.kind = net, optimizer
        self.losses: list[float] = []
        self.stepped: list[torch.Tensor] = []  # own parameters after each batch
        self.began: list[torch.Tensor] = []  # own parameters before each batch
        self.validated: list[torch.Tensor] = []  # parameters in each validation
        self.norms: list[float] = []  # of the gradients of each step

    def loss(self, batch):
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def on_train_batch_start(self, batch, batch_idx):
        self.began.append(vector(self))

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.stepped.append(vector(self))
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        self.norms.append(float(torch.linalg.vector_norm(torch.cat([g.flatten() for g in grads]))) if grads else 0.0)

    def validation_step(self, batch, batch_idx):
        if batch_idx == 0:
            self.validated.append(vector(self))
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self):
        if self.kind == "sgd":
            optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        else:
            optimizer = gossamer.GossipAdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)]


class ByHand(Regression):
    """Manual optimization with two optimizers, of which the second one steps in every other batch."""

    def __init__(self, net: nn.Module):
        super().__init__(net)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.manual_backward(loss)
        self.clip_gradients(first, gradient_clip_val=1e6, gradient_clip_algorithm="norm")
        first.step()
        first.zero_grad()
        if batch_idx % 2:
            second.step()
            second.zero_grad()

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=0.05) for part in (self.net[0], self.net[4])]


class Stateful(DataLoader):
    """Continues in the middle of an epoch after a resume, as a StatefulDataLoader does."""

    start = position = 0

    def __iter__(self):
        self.position, self.start = self.start, 0
        return map(self.count, itertools.islice(super().__iter__(), self.position, None))

    def count(self, batch):
        self.position += 1
        return batch

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.start = state["position"]


@contextlib.contextmanager
def job():
    """Lightning makes the process group and leaves it to the end of the program."""
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def trainer(strategy, **options) -> L.Trainer:
    per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    return L.Trainer(
        accelerator="cpu",
        devices=per_node,
        num_nodes=int(os.environ["WORLD_SIZE"]) // per_node,
        plugins=[TorchElasticEnvironment()],
        strategy=strategy,
        **{
            "max_epochs": 2,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": any(isinstance(c, Checkpoint) for c in options.get("callbacks", [])),
            "num_sanity_val_steps": 0,
            **options,
        },
    )


def result(model: Regression, used: L.Trainer) -> dict:
    metrics = {name: float(value) for name, value in used.callback_metrics.items()}
    return {
        "final": vector(model),
        "state": {k: v.clone() for k, v in model.net.state_dict().items()},
        "losses": model.losses,
        "began": model.began,
        "stepped": model.stepped,
        "validated": model.validated,
        "norms": model.norms,
        "metrics": metrics,
        "steps": used.global_step,
    }


def strategy_of(settings):
    """DDP, a registered name, or a GossipStrategy with these settings."""
    if isinstance(settings, dict):
        return GossipStrategy(**{"timeout": 60.0, "gradients": "worker", **settings})
    return DDPStrategy() if settings == "ddp" else settings


def fit(rank, settings, *, model="automatic", save=None, folder=None, resume=None, seed=0, test=False, **options):
    """Fit on this worker's part of the data; `save` are options of ModelCheckpoint."""
    loader = {None: DataLoader, "stateful": Stateful}[options.pop("loader", None)]
    torch.manual_seed(seed + rank)
    net = {
        "automatic": lambda: Regression(small()),
        "by hand": lambda: ByHand(small()),
        "random": lambda: Regression(network(dropout=0.3), "gossip-adam"),
    }[model]()
    if save is not None:
        options["callbacks"] = [ModelCheckpoint(dirpath=folder, filename="{epoch}-{step}", **save)]
    with job():
        used = trainer(strategy_of(settings), **options)
        train, valid = loader(dataset(1), 4, shuffle=loader is DataLoader), DataLoader(dataset(2), 8)
        used.fit(net, train, valid, ckpt_path=resume)
        made = result(net, used)
        if test:
            made["metrics"] |= used.test(net, DataLoader(dataset(2), 8), verbose=False)[0]
    return made


def warned(rank, *args, **kwargs):
    """What `fit` returns, and the texts of the GossamerWarnings on this worker."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = fit(rank, *args, **kwargs)
    return made, [str(w.message) for w in caught if issubclass(w.category, gossamer.GossamerWarning)]


def fit_until(rank, settings, where, who=1, after=3, on_exception=None):
    """Fit; worker `who` raises in the middle. Returns the type and text of the error on this worker."""

    class Fails(Regression):
        def fail(self, place):
            if rank == who and place == where and self.trainer.global_step >= after:
                if where == "signal":
                    os.kill(os.getpid(), signal.SIGTERM)
                else:
                    raise ValueError("this batch cannot be read")

        def training_step(self, batch, batch_idx):
            self.fail("training_step")
            self.fail("signal")
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            self.fail("validation_step")
            super().validation_step(batch, batch_idx)

    model = Fails(small())
    callbacks = [OnExceptionCheckpoint(on_exception)] if on_exception else []
    with job():
        try:
            trainer(strategy_of(settings), callbacks=callbacks).fit(
                model, DataLoader(dataset(1), 4), DataLoader(dataset(2), 8)
            )
        except BaseException as error:
            return type(error).__name__, str(error)
    return None


def collectives(rank, settings):
    """How many collectives of the default process group each batch called."""
    counts: list[int] = []

    class Counts(Regression):
        def on_train_batch_start(self, batch, batch_idx):
            counts.append(0)

    def counted(original):
        def collective(*args, **kwargs):
            if counts:
                counts[-1] += 1
            return original(*args, **kwargs)

        return collective

    names = ("broadcast", "all_reduce", "all_gather", "barrier")
    originals = {name: getattr(dist, name) for name in names}
    with job():
        try:
            for name, original in originals.items():
                setattr(dist, name, counted(original))
            trainer(strategy_of(settings), max_epochs=1).fit(Counts(small()), DataLoader(dataset(1), 4))
        finally:
            for name, original in originals.items():
                setattr(dist, name, original)
    return counts[1:-1]  # the first one includes the start, the last one the end of the epoch


def handle(rank):
    """What the handle tells inside hooks of the model."""
    seen = {}

    class Looks(Regression):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            seen["distance"] = self.trainer.strategy.gossip.consensus_distance()
            seen["stats"] = self.trainer.strategy.gossip.stats()["steps"]

    with job():
        used = trainer("gossamer", max_epochs=1)
        used.fit(Looks(small()), DataLoader(dataset(1), 4))
        try:
            used.strategy.gossip  # noqa: B018
        except gossamer.GossamerError as error:
            seen["after"] = str(error)
    return seen


def plain_model(rank, path):
    """The parameters of a checkpoint, as a user without Gossamer loads them."""
    loaded = Regression.load_from_checkpoint(path, net=small(), weights_only=False)
    return vector(loaded)


def validate(rank, path):
    """The metrics of a checkpoint that is validated by Gossip's strategy, on all workers."""
    with job():
        used = trainer(strategy_of({}))
        return used.validate(Regression(small()), DataLoader(dataset(2), 8), ckpt_path=path, verbose=False)[0]


def save_inside(rank, folder):
    """The error of a checkpoint inside the user's own averaged() block."""

    class Saves(Regression):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            with self.trainer.strategy.gossip.averaged():
                self.trainer.save_checkpoint(f"{folder}/inside.ckpt")

    with job():
        try:
            trainer(strategy_of({})).fit(Saves(small()), DataLoader(dataset(1), 4))
        except gossamer.GossamerError as error:
            return str(error)
    return None


# -- bad input ---------------------------------------------------------------------------------------------------------


def refused(rank, what):
    """The sentence with which a strategy refuses."""

    class Wrapped(Regression):
        def configure_model(self):
            if not isinstance(self.net, nn.parallel.DistributedDataParallel):
                self.net = nn.parallel.DistributedDataParallel(self.net)

    class Sharded(Regression):
        def configure_model(self):
            fully_shard(self.net[0], mesh=init_device_mesh("cpu", (dist.get_world_size(),)))

    data = DataLoader(dataset(1), 4)
    cases = {
        "asynchronous": lambda: GossipStrategy(algorithm="ad-psgd"),
        "a policy": lambda: FabricGossipStrategy(algorithm=gossamer.A2CiD2(rate=2.0)),
        "elastic": lambda: GossipStrategy(on_failure="continue"),
        "elastic in Fabric": lambda: FabricGossipStrategy(on_failure=gossamer.Continue()),
        "process group": lambda: GossipStrategy(process_group=None),
        "timeout": lambda: GossipStrategy(timeout="soon"),
        "unknown": lambda: GossipStrategy(find_unused_parameters=True),
        "topology": lambda: trainer(strategy_of({"topology": "donut"})).fit(Regression(small()), data),
        "wrapped": lambda: trainer(strategy_of({})).fit(Wrapped(small()), data),
        "sharded": lambda: trainer(strategy_of({})).fit(Sharded(small()), data),
        "wrapped in Fabric": lambda: fabric(FabricGossipStrategy()).setup(
            nn.parallel.DistributedDataParallel(small()), torch.optim.SGD(small().parameters(), lr=0.1)
        ),
        "sync_batchnorm": lambda: trainer(strategy_of({}), sync_batchnorm=True).fit(Regression(network()), data),
        "optimizer alone": lambda: fabric(FabricGossipStrategy()).setup_optimizers(
            torch.optim.SGD(small().parameters(), lr=0.1)
        ),
        "model alone": lambda: fabric(FabricGossipStrategy()).strategy.gossip,
    }
    with job():
        try:
            cases[what]()
        except gossamer.InputError as error:
            return str(error)
    return None


def beside_pytorch_lightning(rank):
    """The warning of a strategy in a program that has imported pytorch_lightning."""
    import sys

    absent = "pytorch_lightning" not in sys.modules
    sys.modules.setdefault("pytorch_lightning", sys)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            GossipStrategy()
        return [str(w.message) for w in caught if issubclass(w.category, gossamer.GossamerWarning)]
    finally:
        if absent:
            del sys.modules["pytorch_lightning"]


# -- Fabric ------------------------------------------------------------------------------------------------------------


def fabric(strategy) -> L.Fabric:
    per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    made = L.Fabric(
        accelerator="cpu",
        devices=per_node,
        num_nodes=int(os.environ["WORLD_SIZE"]) // per_node,
        plugins=[TorchElasticEnvironment()],
        strategy=strategy,
    )
    made.launch()
    return made


def fabric_strategy_of(settings):
    if isinstance(settings, dict):
        return FabricGossipStrategy(**{"timeout": 60.0, "gradients": "worker", **settings})
    return FabricDDPStrategy() if settings == "ddp" else settings


def fabric_loop(rank, settings, **options):
    """What a loop of Fabric computed. Its DDP model is gone before the process group: torch may hang otherwise."""
    with job():
        return _fabric_loop(rank, settings, **options)


def _fabric_loop(rank, settings, *, steps=12, accumulate=1, clip=None, save=None, resume=None, dropout=0.0):
    """Saves after half of the steps, and starts from a checkpoint if `resume` is given."""
    torch.manual_seed(50 + rank)
    made: dict = {"losses": [], "norms": []}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        used = fabric(fabric_strategy_of(settings))
        model = small(dropout)
        model, optimizer = used.setup(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5))
        batches = list(used.setup_dataloaders(DataLoader(dataset(1), 4)))
        state = {"model": model, "optimizer": optimizer, "step": 0}
        if resume:
            made["rest"] = used.load(resume, state)
        for step in range(state["step"], steps):
            x, y = batches[step % len(batches)]
            stepping = (step + 1) % accumulate == 0
            with used.no_backward_sync(model, enabled=not stepping):
                loss = nn.functional.mse_loss(model(x), y)
                used.backward(loss)
            made["losses"].append(loss.item())
            if stepping:
                if clip is not None:
                    used.clip_gradients(model, optimizer, max_norm=clip)
                    made["norms"].append(float(torch.linalg.vector_norm(vector_of_gradients(model))))
                optimizer.step()
                optimizer.zero_grad()
            if save and step + 1 == steps // 2:
                state["step"] = step + 1
                made["own"] = vector(model)
                used.save(save, state)
                made["after save"] = vector(model)
        made["final"] = vector(model)
        if settings != "ddp":
            used.strategy.gossip.close()
        if save:
            used.save(f"{save}.closed", {"model": model})
    made["warnings"] = [str(w.message) for w in caught if "synchronization" in str(w.message)]
    return made


def fabric_inside(rank, folder):
    """The error of a checkpoint inside an averaged() block."""
    with job():
        used = fabric(fabric_strategy_of({}))
        model = small()
        model, _ = used.setup(model, torch.optim.SGD(model.parameters(), lr=0.05))
        with used.strategy.gossip as gossip, gossip.averaged():
            try:
                used.save(f"{folder}/inside.ckpt", {"model": model})
            except gossamer.GossamerError as error:
                return str(error)
    return None


def vector_of_gradients(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def fabric_pair(rank, folder):
    """Two models, each with its optimizer, as in adversarial training."""
    with job():
        used = fabric(fabric_strategy_of({}))
        pairs = []
        for _ in range(2):
            model = small()
            pairs.append(used.setup(model, torch.optim.SGD(model.parameters(), lr=0.05)))
        x, y = dataset(10 + rank).tensors
        for _ in range(4):
            for model, optimizer in pairs:
                used.backward(nn.functional.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
        (first, _), (second, _) = pairs
        used.save(f"{folder}/pair.ckpt", {"first": first, "second": second})
        own = vector(first)
        rest = used.load(f"{folder}/pair.ckpt", {"first": first, "second": second})
        restored = torch.equal(own, vector(first))
        handles = [used.strategy.gossip_of(model) for model, _ in pairs]
        distances = [gossip.consensus_distance() for gossip in handles]
        try:
            used.strategy.gossip  # noqa: B018
            error = ""
        except gossamer.InputError as refused:
            error = str(refused)
        for gossip in handles:
            gossip.close()
    return {"distances": distances, "restored": restored, "error": error, "rest": rest}


# -- documentation -----------------------------------------------------------------------------------------------------


def run_blocks(rank, blocks, folder):
    """Execute the blocks one after another, as one program that torchrun started; return what it printed."""
    torch.manual_seed(rank)
    back, environ, printed = os.getcwd(), dict(os.environ), io.StringIO()
    os.environ["TORCHELASTIC_RUN_ID"] = "docs"
    os.chdir(folder)
    try:
        with job(), contextlib.redirect_stdout(printed):
            names = {"__name__": "__main__"}
            for block in blocks:
                exec(compile(block, "block", "exec"), names)
    finally:
        os.chdir(back)
        os.environ.clear()
        os.environ.update(environ)
    return printed.getvalue()
