"""Images: the digits' split, what a folder's images become, and one line for folders that cannot be used."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from mpidl.data import images
from mpidl.data.images import Digits, ImageFolder, image_folders
from mpidl.errors import UsageError

pillow = pytest.importorskip("PIL.Image")
FIRST_VALIDATED = [4, 5, 6, 9, 4, 7, 8, 9, 9, 6, 9, 9]
MEAN, DEVIATION = np.array(images.COLOUR_MEAN), np.array(images.COLOUR_DEVIATION)


def pixels_of(tensor: torch.Tensor) -> np.ndarray:
    """Colours of 0 to 255, [height, width, 3], from a normalised image."""
    return (tensor.numpy().transpose(1, 2, 0) * DEVIATION + MEAN) * 255


def write(path: Path, pixels: np.ndarray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pillow.fromarray(pixels.astype(np.uint8)).save(path)
    return path


def noise(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Images of several kinds and sizes in two classes, one of them nested."""
    write(tmp_path / "dog/0.png", noise(0, 40, 30, 3))
    write(tmp_path / "dog/1.PNG", noise(1, 30, 50))  # grey
    write(tmp_path / "dog/deeper/2.bmp", noise(2, 33, 33, 3))
    write(tmp_path / "cat/9.png", noise(3, 20, 20, 4))  # with transparency
    (tmp_path / "cat/notes.txt").write_text("no image")
    return tmp_path


# ---- digits ------------------------------------------------------------------------------------------------


def test_the_digits_are_those_of_scikit_learn() -> None:
    sklearn = pytest.importorskip("sklearn.datasets")
    found, labels = images.digits()
    assert (found.dtype, found.shape) == (torch.uint8, (1797, 1, 8, 8))
    assert labels.dtype == torch.int64
    expected = sklearn.load_digits()
    np.testing.assert_array_equal(found[:, 0].numpy(), expected.images)
    np.testing.assert_array_equal(labels.numpy(), expected.target)


def test_the_digits_are_split_without_overlap_into_parts_with_all_classes() -> None:
    pytest.importorskip("sklearn")
    train, validation = Digits(train=True), Digits(train=False)
    assert (len(train), len(validation)) == (1437, 360)
    pictures = [{tensor.numpy().tobytes() for tensor in part.images} for part in (train, validation)]
    assert not pictures[0] & pictures[1]
    for part in (train, validation):
        counts = torch.bincount(part.labels, minlength=10)
        assert counts.min() > 0.6 * counts.max()
    assert validation.labels[:12].tolist() == FIRST_VALIDATED  # the split is the same everywhere, for ever
    image, label = train[5]
    assert (image.shape, image.dtype, label) == ((1, 8, 8), torch.float32, int(train.labels[5]))
    deviation, mean = torch.std_mean(train.images)
    assert abs(mean) < 1e-5
    assert abs(deviation - 1) < 1e-5


def test_without_scikit_learn_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(UsageError, match="the digits need the package scikit-learn"):
        images.digits()


# ---- folders -----------------------------------------------------------------------------------------------


def test_a_folder_s_classes_and_files(folder: Path) -> None:
    dataset = ImageFolder(folder, 16, train=False)
    assert dataset.classes == ["cat", "dog"]
    assert [path.name for path in dataset.files] == ["9.png", "0.png", "1.PNG", "2.bmp"]
    assert dataset.labels == [0, 1, 1, 1]
    for i, label in enumerate(dataset.labels):
        image, own = dataset[i]
        assert (image.shape, image.dtype, own) == ((3, 16, 16), torch.float32, label)


def test_validation_takes_the_centre(tmp_path: Path) -> None:
    pixels = noise(0, 48, 64, 3)
    write(tmp_path / "a/0.png", pixels)
    found, _ = ImageFolder(tmp_path, 42, train=False)[0]  # 42 is 7/8 of 48: cut out as they are
    np.testing.assert_allclose(pixels_of(found), pixels[3:45, 11:53], atol=1e-3)


def test_an_even_colour_is_normalised_by_the_known_figures(tmp_path: Path) -> None:
    write(tmp_path / "a/0.png", np.full((20, 20, 3), (255, 0, 51)))
    for train in (False, True):
        found, _ = ImageFolder(tmp_path, 8, train)[0]
        expected = torch.tensor([(1 - 0.485) / 0.229, -0.456 / 0.224, (0.2 - 0.406) / 0.225])
        torch.testing.assert_close(found, expected[:, None, None].expand(3, 8, 8))


def test_training_images_depend_on_seed_epoch_and_index_alone(folder: Path) -> None:
    def all_of(dataset: ImageFolder) -> list[bytes]:
        return [dataset[i][0].numpy().tobytes() for i in range(4)]

    first = ImageFolder(folder, 16, train=True, seed=1)
    before = all_of(first)
    assert all_of(first) == before
    assert list(reversed([first[i][0].numpy().tobytes() for i in (3, 2, 1, 0)])) == before
    first.set_epoch(1)
    assert not set(all_of(first)) & set(before)
    first.set_epoch(0)
    assert all_of(first) == before == all_of(ImageFolder(folder, 16, train=True, seed=1))
    assert not set(all_of(ImageFolder(folder, 16, train=True, seed=2))) & set(before)


def test_training_parts_lie_in_the_image_and_half_are_mirrored(tmp_path: Path) -> None:
    across = np.tile(np.arange(0, 250, 5), (50, 1))  # brighter from left to right
    write(tmp_path / "a/0.png", np.stack([across, across.T, 0 * across], 2))
    dataset = ImageFolder(tmp_path, 8, train=True)
    mirrored, areas = 0, []
    for epoch in range(200):
        dataset.set_epoch(epoch)
        red, green, _ = pixels_of(dataset[0][0]).transpose(2, 0, 1)
        steps, down = np.diff(red, axis=1), np.diff(green, axis=0)
        assert (steps > 0).all() or (steps < 0).all()
        assert (down > 0).all()  # never upside down
        mirrored += bool((steps < 0).all())
        areas.append(abs(steps).mean() * down.mean())
    assert 70 < mirrored < 130
    assert max(areas) > 5 * min(areas)


@pytest.mark.parametrize(("width", "height"), [(100, 100), (300, 20), (1, 500), (1, 1)])
def test_random_parts_fit(width: int, height: int) -> None:
    random = np.random.default_rng(0)
    for _ in range(300):
        left, top, right, bottom = images.random_part(random, width, height)
        assert 0 <= left < right <= width
        assert 0 <= top < bottom <= height
        if min(width, height) >= 100:
            assert 0.07 < (right - left) * (bottom - top) / (width * height) <= 1
            assert 0.7 < (right - left) / (bottom - top) < 1.45


def test_workers_that_outlive_an_epoch_see_the_next_one(folder: Path) -> None:
    dataset = ImageFolder(folder, 8, train=True)
    loader = torch.utils.data.DataLoader(dataset, 4, num_workers=1, persistent_workers=True)
    for epoch in range(2):
        dataset.set_epoch(epoch)
        ((found, _),) = loader
        assert torch.equal(found, torch.stack([dataset[i][0] for i in range(4)]))


def test_a_held_out_share_and_the_rest_are_the_whole(tmp_path: Path) -> None:
    for i in range(20):
        write(tmp_path / f"{'ab'[i % 2]}/{i}.png", noise(i, 4, 4, 3))
    train, validation = image_folders(tmp_path, 4)
    assert (len(train), len(validation)) == (18, 2)
    assert (train.train, validation.train) == (True, False)
    assert {*train.files} | {*validation.files} == {*ImageFolder(tmp_path, 4, train=True).files}
    assert all(path.parent.name == "ab"[label] for path, label in zip(train.files, train.labels, strict=True))
    assert image_folders(tmp_path, 4)[1].files == validation.files


def test_train_and_val_inside_a_folder(tmp_path: Path) -> None:
    for name in ("train/a/0.png", "train/b/1.png", "val/a/2.png", "val/b/3.png"):
        write(tmp_path / name, noise(0, 4, 4, 3))
    train, validation = image_folders(tmp_path, 4)
    assert [path.name for part in (train, validation) for path in part.files] == ["0.png", "1.png", "2.png", "3.png"]
    write(tmp_path / "val/c/4.png", noise(0, 4, 4, 3))
    with pytest.raises(UsageError, match="different classes, such as c"):
        image_folders(tmp_path, 4)


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nowhere: No such file or directory"):
        ImageFolder(tmp_path / "nowhere", 8, train=True)
    with pytest.raises(UsageError, match="holds no folders; needs one a class"):
        ImageFolder(tmp_path, 8, train=True)
    (tmp_path / "a").mkdir()
    with pytest.raises(UsageError, match=r"a: holds no images \(\.bmp, \.gif, \.jpeg"):
        ImageFolder(tmp_path, 8, train=True)
    write(tmp_path / "a/0.png", noise(0, 4, 4, 3))
    with pytest.raises(UsageError, match="1 images are too few"):
        image_folders(tmp_path, 8)


def test_an_image_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    whole = write(tmp_path / "a/0.png", noise(0, 64, 64, 3)).read_bytes()
    (tmp_path / "a/1.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "a/2.jpg").write_bytes(b"no image")
    (tmp_path / "a/3.png").mkdir()
    dataset = ImageFolder(tmp_path, 8, train=True)
    dataset[0]
    for i, name in enumerate(["1.png", "2.jpg", "3.png"], 1):
        with pytest.raises(UsageError, match=rf"{name}: cannot be read"):
            dataset[i]


def test_without_pillow_it_is_asked_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(UsageError, match="folders of images need the package pillow"):
        ImageFolder(folder, 8, train=True)
