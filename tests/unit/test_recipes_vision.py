"""The vision task: networks against published counts, readers against files made here, training that learns."""

import gzip
import os
import pickle
import struct

import numpy as np
import pytest
import torch

from gossamer import InputError
from gossamer.recipes.data import images
from gossamer.recipes.models.resnet import ResNet
from gossamer.recipes.task import make_task


def _parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


# Counts of the networks in He et al. 2015 as others published them (0.27, 0.46, 0.66, 0.85 and 23.5 million).
@pytest.mark.parametrize(
    ("depth", "count"), [(20, 269_722), (32, 464_154), (44, 658_586), (56, 853_018), (50, 23_520_842)]
)
def test_parameter_counts(depth, count):
    assert _parameters(ResNet(depth, channels=3, classes=10)) == count


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize(("channels", "side"), [(1, 8), (3, 32), (1, 28)])
def test_shapes(norm, channels, side):
    model = ResNet(8, channels=channels, classes=7, width=8, norm=norm)
    assert model(torch.zeros(2, channels, side, side)).shape == (2, 7)


def test_depth_counts_the_layers_with_weights():
    layers = [
        m for m in ResNet(20, channels=3, classes=10).modules() if isinstance(m, torch.nn.Conv2d | torch.nn.Linear)
    ]
    assert len(layers) == 20


def test_group_norm_does_not_mix_samples():
    model = ResNet(8, channels=1, classes=3, norm="group")
    x = torch.randn(4, 1, 8, 8)
    assert torch.allclose(model(x)[:1], model(x[:1]), atol=1e-5)


def test_same_seed_same_weights():
    task = make_task("vision")
    one, same, other = (task.model(seed) for seed in (1, 1, 2))
    pairs = list(zip(one.parameters(), same.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not torch.equal(one.stem[0].weight, other.stem[0].weight)


def test_training_learns_digits():
    task = make_task("vision", {"width": 8})
    model, stream = task.model(0), task.batches(0, 1, seed=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    before = task.evaluate(model)
    for _ in range(40):
        batch = next(stream)
        assert task.size(batch) == 32
        loss = task.loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    after = task.evaluate(model, final=True)
    assert after["loss"] < 0.5 * before["loss"]
    assert after["accuracy"] > 0.8
    assert model.training


def test_label_smoothing_is_in_the_training_loss_only():
    plain, smooth = make_task("vision"), make_task("vision", {"label_smoothing": 0.2})
    model = plain.model(0)
    batch = next(plain.batches(0, 1, seed=0))
    assert plain.loss(model, batch) != smooth.loss(model, batch)
    assert plain.evaluate(model) == smooth.evaluate(model)


def test_workers_share_the_images_and_a_resumed_stream_repeats_its_augmentation():
    task = make_task("vision", {"crop": 1, "flip": True, "batch": 8})
    first, second = task.batches(0, 2, seed=3), task.batches(1, 2, seed=3)
    assert not torch.equal(next(first).images, next(second).images)
    resumed = task.batches(0, 2, seed=3)
    resumed.load_state_dict(first.state_dict())
    expected, got = next(first), next(resumed)
    assert torch.equal(expected.images, got.images)
    assert torch.equal(expected.labels, got.labels)


def test_augmentation_moves_pixels_but_keeps_labels():
    plain, moved = make_task("vision"), make_task("vision", {"crop": 2, "flip": True})
    one, other = next(plain.batches(0, 1, seed=0)), next(moved.batches(0, 1, seed=0))
    assert torch.equal(one.labels, other.labels)
    assert one.images.shape == other.images.shape
    assert not torch.equal(one.images, other.images)


def test_normalized_images_have_mean_zero_and_deviation_one():
    task = make_task("vision", {"batch": 1438})
    pixels = next(task.batches(0, 1, seed=0)).images
    assert abs(pixels.mean().item()) < 1e-4
    assert abs(pixels.std().item() - 1) < 1e-3


def test_dirichlet_skews_the_workers_labels():
    task = make_task("vision", {"partition": "dirichlet:0.05", "batch": 64})
    shares = []
    for worker in range(4):
        labels = next(task.batches(worker, 4, seed=0)).labels
        shares.append(torch.bincount(labels, minlength=10).max().item() / 64)
    assert np.mean(shares) > 0.35


def test_more_workers_than_images_are_refused():
    with pytest.raises(InputError, match="1438 images do not give each of 2000 workers a batch of 1"):
        make_task("vision", {"batch": 1}).batches(0, 2000, seed=0)


@pytest.mark.parametrize("name", ["resnet", "resnet9", "vgg", "resnet-8"])
def test_unknown_models_are_refused(name):
    with pytest.raises(InputError, match=f"unknown model '{name}'"):
        make_task("vision", {"model": name})


def _idx(array):
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    return header + array.astype(np.uint8).tobytes()


def _write_mnist(root, *, pixels, labels, zipped=False):
    for part in ("train", "t10k"):
        for name, array in ((f"{part}-images-idx3-ubyte", pixels), (f"{part}-labels-idx1-ubyte", labels)):
            raw = _idx(array)
            (root / f"{name}{'.gz' if zipped else ''}").write_bytes(gzip.compress(raw) if zipped else raw)


@pytest.mark.parametrize("zipped", [False, True])
def test_idx_files(tmp_path, zipped):
    pixels = np.random.default_rng(0).integers(0, 256, size=(12, 9, 10))
    labels = np.arange(12) % 10
    _write_mnist(tmp_path, pixels=pixels, labels=labels, zipped=zipped)
    data = images.load(tmp_path)
    assert np.array_equal(data.train[0][:, 0], pixels)
    assert np.array_equal(data.test[1], labels)
    task = make_task("vision", {"data": tmp_path, "batch": 4})
    assert next(task.batches(0, 3, seed=0)).images.shape == (4, 1, 9, 10)
    assert task.describe()["image"] == [1, 9, 10]


def test_broken_idx_files_are_refused(tmp_path):
    _write_mnist(tmp_path, pixels=np.zeros((4, 8, 8)), labels=np.zeros(4))
    labels = tmp_path / "t10k-labels-idx1-ubyte"
    whole = labels.read_bytes()
    labels.write_bytes(whole[:-1])
    with pytest.raises(InputError, match="announces 4 = 4 bytes but holds 3"):
        images.load(tmp_path)
    labels.write_bytes(b"\x00\x00\x0d" + whole[3:])
    with pytest.raises(InputError, match="is not an IDX file"):
        images.load(tmp_path)
    labels.write_bytes(_idx(np.zeros(5)))
    with pytest.raises(InputError, match="has 4 test images but 5 labels"):
        images.load(tmp_path)
    labels.unlink()
    with pytest.raises(InputError, match="neither t10k-labels-idx1-ubyte nor"):
        images.load(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(whole)[:-6])
    with pytest.raises(InputError, match="cannot read"):
        images.load(tmp_path)


def test_tiny_images_are_refused(tmp_path):
    _write_mnist(tmp_path, pixels=np.zeros((4, 8, 7)), labels=np.zeros(4))
    with pytest.raises(InputError, match="images of 7x8 with 1 channels: the smallest size is 8x8"):
        images.load(tmp_path)


def _cifar_batch(seed, count=3):
    random = np.random.default_rng(seed)
    return random.integers(0, 256, size=(count, 3072), dtype=np.uint8), random.integers(0, 10, size=count)


CIFAR_NAMES = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]


def test_cifar_binary_and_python_batches_read_alike(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "py").mkdir()
    for seed, name in enumerate(CIFAR_NAMES):
        data, labels = _cifar_batch(seed)
        records = np.concatenate([labels[:, None].astype(np.uint8), data], axis=1)
        (tmp_path / "bin" / f"{name}.bin").write_bytes(records.tobytes())
        content = {b"data": data, b"labels": labels.tolist(), b"batch_label": b"some batch"}
        (tmp_path / "py" / name).write_bytes(pickle.dumps(content, protocol=2))
    binary, python = images.load(tmp_path / "bin"), images.load(tmp_path / "py")
    for one, other in zip((*binary.train, *binary.test), (*python.train, *python.test), strict=True):
        assert np.array_equal(one, other)
    assert binary.train[0].shape == (15, 3, 32, 32)
    data, _ = _cifar_batch(0)
    assert np.array_equal(binary.train[0][0].reshape(-1), data[0])


def test_a_pickle_of_python_2_is_read(tmp_path):
    """CIFAR-10 was pickled by Python 2, whose strings are bytes and whose numpy had other module names."""
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntS'b'\ntR"
    dtype = b"cnumpy\ndtype\n(S'u1'\nI0\nI1\ntR(I3\nS'|'\nNNNI-1\nI-1\nI0\ntb"
    pixels = b"S'" + b"a" * 3072 + b"'\n"
    raw = b"(dS'data'\n" + array + b"(I1\n(I1\nI3072\nt" + dtype + b"I00\n" + pixels + b"tbsS'labels'\n(lI7\nas."
    (tmp_path / "batch").write_bytes(raw)
    data, labels = images.read_cifar_python(tmp_path / "batch")
    assert data.shape == (1, 3, 32, 32)
    assert data.min() == data.max() == ord("a")
    assert labels.tolist() == [7]


class _Harmful:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_harmful_pickle_runs_nothing(tmp_path):
    (tmp_path / "batch").write_bytes(pickle.dumps({b"data": _Harmful(tmp_path / "made"), b"labels": []}))
    with pytest.raises(InputError, match=r"asks for posix\.mkdir"):
        images.read_cifar_python(tmp_path / "batch")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("content", [b"", b"garbage", pickle.dumps({b"data": 1}), pickle.dumps([1])])
def test_damaged_cifar_batches_are_refused(tmp_path, content):
    (tmp_path / "batch").write_bytes(content)
    with pytest.raises(InputError, match="not a CIFAR-10"):
        images.read_cifar_python(tmp_path / "batch")
    with pytest.raises(InputError, match="not a CIFAR-10"):
        images.read_cifar_binary(tmp_path / "batch")


def test_incomplete_cifar_is_refused(tmp_path):
    data, labels = _cifar_batch(0)
    records = np.concatenate([labels[:, None].astype(np.uint8), data], axis=1)
    (tmp_path / "data_batch_1.bin").write_bytes(records.tobytes())
    with pytest.raises(InputError, match=r"neither data_batch_2\.bin nor data_batch_2"):
        images.load(tmp_path)


def _write_folder(root, *, classes=("cat", "dog"), count=10, size=(12, 10)):
    image = pytest.importorskip("PIL.Image")
    for label, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for number in range(count):
            image.new("RGB", size, (label * 100, number, 0)).save(root / name / f"{number}.png")


def test_image_folder_without_a_test_part(tmp_path):
    _write_folder(tmp_path)
    data = images.load(tmp_path)
    assert data.classes == 2
    assert data.train[0].shape == (18, 3, 10, 12)
    assert data.test[1].tolist() == [0, 1]
    assert data.train[0][data.train[1] == 1][:, 0].min() == 100


def test_image_folder_with_a_test_part_and_a_size(tmp_path):
    _write_folder(tmp_path / "train")
    _write_folder(tmp_path / "val", count=2, size=(20, 20))
    data = images.load(tmp_path, size=16)
    assert data.train[0].shape == (20, 3, 16, 16)
    assert data.test[0].shape == (4, 3, 16, 16)


def test_image_folders_that_do_not_fit_are_refused(tmp_path):
    _write_folder(tmp_path / "train")
    _write_folder(tmp_path / "test", size=(11, 10))
    with pytest.raises(InputError, match=r"is 11x10 pixels but 0\.png is 12x10: .* set image_size"):
        images.load(tmp_path)
    (tmp_path / "train" / "cat" / "0.png").write_bytes(b"no image")
    with pytest.raises(InputError, match="cannot read the image"):
        images.load(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="is not a data set that this task reads"):
        images.load(tmp_path / "empty")
