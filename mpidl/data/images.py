"""Labelled images: the small digits that scikit-learn brings along, and folders with one subfolder a class.

Both are datasets of (float32 image [channels, height, width], normalised; label), indexed from 0. What is random in an
image depends on the seed, the epoch and the image's index alone: not on the rank, the worker or the order that read it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import UsageError
from ..optional_packages import import_optional

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
# Mean and deviation of ImageNet's colours, with which networks for photographs are customarily trained.
COLOUR_MEAN, COLOUR_DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
DIGITS_HELD_OUT = 360


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """All 1,797 digits: images, uint8 [1797, 1, 8, 8] of 0 to 16, and labels, int64 [1797].

    Handwritten by 13 people; the test part of UCI's "Optical Recognition of Handwritten Digits", bundled with
    scikit-learn. Raises UsageError without scikit-learn.
    """
    datasets = import_optional(
        "sklearn.datasets", "the digits need the package scikit-learn (pip install 'mpidl[examples]')"
    )
    images, labels = datasets.load_digits(return_X_y=True)
    return torch.from_numpy(images.astype(np.uint8)).view(-1, 1, 8, 8), torch.from_numpy(labels.astype(np.int64))


class Digits(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """The 1,437 digits to train on, or the 360 others; the split is fixed.

    Attributes: images, float32 [n, 1, 8, 8] normalised by the training part's mean and deviation; labels, int64 [n];
    classes, the labels' names.
    """

    def __init__(self, train: bool) -> None:
        images, labels = digits()
        # RandomState's numbers are the same in every version of numpy.
        order = torch.from_numpy(np.random.RandomState(0).permutation(len(labels)))
        held_out, kept = order[:DIGITS_HELD_OUT].sort().values, order[DIGITS_HELD_OUT:].sort().values
        deviation, mean = torch.std_mean(images[kept].float())
        part = kept if train else held_out
        self.images, self.labels = (images[part] - mean) / deviation, labels[part]
        self.classes = [str(digit) for digit in range(10)]

    def __len__(self) -> int:
        return len(self.labels)

    def set_epoch(self, epoch: int) -> None:
        """Does nothing, as nothing is random here; ImageFolder has the method too."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.images[index], int(self.labels[index])


class ImageFolder(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """The images in `path`, each in the folder of its class: path/cat/1.jpg, path/dog/2.jpg; colour, [3, size, size].

    size: height and width, in pixels.
    train: a random part of the image, of 8 to 100 % of its area and with sides of 3:4 to 4:3, mirrored in half of the
        cases; as Szegedy et al. 2014, "Going Deeper with Convolutions", section 6. Else the centre.
    seed: of these parts; `set_epoch` gives others.
    held_out: the share of the images that is for validation, by a fixed random choice: with train=True the dataset is
        the others, with train=False these; 0: all of them in both.

    Attributes: classes, the folders' names in their order, in which they are numbered; files and labels, a path and
    a number each image. Raises UsageError for folders without images; reading an image that cannot be read raises
    one with its path.
    """

    def __init__(self, path: str | Path, size: int, train: bool, seed: int = 0, held_out: float = 0.0) -> None:
        _pillow()
        self.size, self.train, self._seed = size, train, seed
        # In shared memory, so that workers which outlive an epoch see the next one's number.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()
        folder = Path(path)
        try:
            self.classes = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
        except OSError as error:
            raise UsageError(f"{folder}: {error.strerror}") from None
        if not self.classes:
            raise UsageError(f"{folder}: holds no folders; needs one a class, with its images")
        self.files: list[Path] = []
        self.labels: list[int] = []
        for label, name in enumerate(self.classes):
            found = sorted(file for file in (folder / name).rglob("*") if file.suffix.lower() in SUFFIXES)
            if not found:
                raise UsageError(f"{folder / name}: holds no images ({', '.join(SUFFIXES)})")
            self.files += found
            self.labels += [label] * len(found)
        if held_out:
            order = np.random.RandomState(0).permutation(len(self.files))
            first = round(len(order) * held_out)
            part = np.sort(order[first:] if train else order[:first])
            self.files, self.labels = [self.files[i] for i in part], [self.labels[i] for i in part]

    def __len__(self) -> int:
        return len(self.files)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch, which the random parts depend on."""
        self._epoch.fill_(epoch)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image_module = _pillow()
        try:
            with image_module.open(self.files[index]) as file:
                image = file.convert("RGB")
        except (OSError, ValueError, SyntaxError, EOFError, image_module.DecompressionBombError) as error:
            raise UsageError(f"{self.files[index]}: cannot be read as an image: {error}") from None
        mirror = False
        if self.train:
            random = np.random.default_rng((self._seed, int(self._epoch), index))
            box = random_part(random, *image.size)
            mirror = bool(random.integers(2))
        else:
            box = centre(*image.size)
        image = image.resize((self.size, self.size), image_module.Resampling.BILINEAR, box=box)
        pixels = np.asarray(image, np.float32) / 255
        pixels = (pixels - np.array(COLOUR_MEAN, np.float32)) / np.array(COLOUR_DEVIATION, np.float32)
        if mirror:
            pixels = pixels[:, ::-1]
        return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1))), self.labels[index]


Box = tuple[float, float, float, float]


def random_part(random: np.random.Generator, width: int, height: int) -> Box:
    """Left, top, right and bottom of a random part of an image, in pixels; the centre if ten tries do not fit in it."""
    for _ in range(10):
        area = width * height * random.uniform(0.08, 1.0)
        aspect = np.exp(random.uniform(np.log(3 / 4), np.log(4 / 3)))
        w, h = round(np.sqrt(area * aspect)), round(np.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(random.integers(width - w + 1)), int(random.integers(height - h + 1))
            return left, top, left + w, top + h
    return centre(width, height, 1.0)


def centre(width: int, height: int, share: float = 224 / 256) -> Box:
    """The square in an image's middle whose side is a share of the image's shorter one."""
    side = min(width, height) * share
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def _pillow() -> Any:
    return import_optional("PIL.Image", "folders of images need the package pillow (pip install 'mpidl[examples]')")


def image_folders(path: str | Path, size: int, seed: int = 0) -> tuple[ImageFolder, ImageFolder]:
    """The images to train on and to validate with: path/train and path/val, or nine and one tenths of path itself."""
    folder = Path(path)
    inner = folder / "train", folder / "val"
    if all(part.is_dir() for part in inner):
        train, validation = ImageFolder(inner[0], size, True, seed), ImageFolder(inner[1], size, False)
        if train.classes != validation.classes:
            odd = sorted({*train.classes} ^ {*validation.classes})
            raise UsageError(f"{folder}: train and val have different classes, such as {odd[0]}")
        return train, validation
    train = ImageFolder(folder, size, True, seed, held_out=0.1)
    validation = ImageFolder(folder, size, False, held_out=0.1)
    if not len(validation):
        raise UsageError(f"{folder}: {len(train)} images are too few to hold out a tenth of them for validation")
    return train, validation
