"""The optimizers that send one bit an element, in float64 numpy: all ranks in one process, by the papers' formulas.

A state is an array of a parameter's elements, or of a rank's. `exchange` has the chunks and their owners. Before each
step the learning rate, betas and eps may be set, and which parameters do not train.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from mpidl.gradients.buckets import layout_of

Arrays = list[np.ndarray]
Gradients = Callable[[int, int], Arrays]  # of a step and a rank: each parameter's


def signs(values: np.ndarray, counted: int) -> np.ndarray:
    """Returns what a message says of values."""
    scale = np.sqrt((values**2).sum() / counted) if counted else 0.0
    return np.where(values >= 0, scale, -scale)


class Exchange:
    """The exchange of one bucket with all parameters, in the reverse of their order.

    groups: of ranks that exchange as one, the mean of theirs; by default each alone.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], ranks: int, nodes: int | None = None) -> None:
        self.ranks, self.shapes, self.nodes = ranks, list(shapes), nodes or ranks
        self.layout = layout_of([torch.empty(shape) for shape in reversed(self.shapes)], ranks)
        self.errors = np.zeros((self.nodes, self.layout.padded))
        self.feeds_back = True

    def flat(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """One array of the parameters'."""
        found = np.zeros(self.layout.padded)
        for offset, each in zip(self.layout.offsets, reversed(list(arrays)), strict=True):
            found[offset : offset + each.size] = each.ravel()
        return found

    def parts(self, flat: np.ndarray) -> Arrays:
        """Each parameter's of one array."""
        places = zip(self.layout.offsets, reversed(self.shapes), strict=True)
        return [flat[offset : offset + int(np.prod(shape))].reshape(shape) for offset, shape in places][::-1]

    def chunks(self) -> list[list[tuple[slice, int]]]:
        """For each set of elements that is exchanged by itself, the chunks with their owners."""
        size = self.layout.shard_size
        local = self.ranks // self.nodes
        return [
            [(slice(rank * size, (rank + 1) * size), rank // local) for rank in range(each, self.ranks, local)]
            for each in range(local)
        ]

    def mean(self, of_nodes: Sequence[Arrays], used: Arrays) -> Arrays:
        """The mean that all ranks get. used: which elements are not masked."""
        kept = self.flat([each.astype(float) for each in used])
        values = np.stack([self.flat(each) for each in of_nodes]) * kept
        if self.nodes == 1:
            return self.parts(values[0])
        values += self.errors * kept
        result, left = np.zeros(self.layout.padded), np.zeros_like(values)
        for chunks in self.chunks():
            for chunk, owner in chunks:
                counted, total = int(kept[chunk].sum()), values[owner, chunk].copy()
                for node in range(self.nodes):
                    if node != owner:
                        sent = signs(values[node, chunk], counted) * kept[chunk]
                        total += sent
                        left[node, chunk] = values[node, chunk] - sent
                total /= self.nodes
                result[chunk] = signs(total, counted) * kept[chunk]
                left[owner, chunk] = (total - result[chunk]) * self.nodes
        self.errors = left if self.feeds_back else self.errors
        return self.parts(result)


class Adam:
    """1-bit Adam."""

    def __init__(self, weights: Arrays, exchange: Exchange, freeze_step: int, lr: float, wd: float) -> None:
        self.w, self.exchange, self.freeze, self.lr, self.wd = (
            [x.copy() for x in weights],
            exchange,
            freeze_step,
            lr,
            wd,
        )
        self.m, self.v = [np.zeros_like(x) for x in weights], [np.zeros_like(x) for x in weights]
        self.b1, self.b2, self.eps, self.t = 0.9, 0.999, 1e-8, 0
        self.b2_of_v = self.b2
        self.still: set[int] = set()  # the numbers of the parameters that do not train

    def step(self, of_nodes: Sequence[Arrays]) -> None:
        """A step by the gradients of each node."""
        self.t += 1
        self._advance(of_nodes)
        first, second = 1 - self.b1**self.t, 1 - self.b2_of_v ** min(self.t, self.freeze)
        for n, (w, m, v) in enumerate(zip(self.w, self.m, self.v, strict=True)):
            if n not in self.still:
                w -= self.lr * (m / first / (np.sqrt(v / second) + self.eps) + self.wd * w)

    def _advance(self, of_nodes: Sequence[Arrays]) -> None:
        b1, b2 = self.b1, self.b2
        if self.t <= self.freeze:
            mean = [np.mean(each, 0) for each in zip(*of_nodes, strict=True)]
            self.m = self._moved(self.m, [b1 * m + (1 - b1) * g for m, g in zip(self.m, mean, strict=True)])
            self.v = self._moved(self.v, [b2 * v + (1 - b2) * g * g for v, g in zip(self.v, mean, strict=True)])
            self.b2_of_v = b2
            return
        local = [[b1 * m + (1 - b1) * g for m, g in zip(self.m, each, strict=True)] for each in of_nodes]
        self.m = self._moved(self.m, self.exchange.mean(local, self._used()))

    def _used(self) -> Arrays:
        return [(v > 0) & (n not in self.still) for n, v in enumerate(self.v)]

    def _moved(self, before: Arrays, after: Arrays) -> Arrays:
        """The new values of the parameters that train, and the former ones of the others."""
        return [before[n] if n in self.still else after[n] for n in range(len(after))]


class ZeroOne(Adam):
    """0/1 Adam: each node's weights, of which `w` are the first one's."""

    def __init__(
        self,
        weights: Arrays,
        exchange: Exchange,
        lr: float,
        wd: float,
        renewals: int,
        local_after: int,
        interval_steps: int,
        largest: int,
    ) -> None:
        super().__init__(weights, exchange, 0, lr, wd)
        self.renewals, self.local_after, self.interval_steps, self.largest = (
            renewals,
            local_after,
            interval_steps,
            largest,
        )
        self.interval, self.renewed, self.at_interval = 1, 0, 0
        self.h, self.since, self.local_steps = 1, 0, 0
        self.of_nodes = [[x.copy() for x in weights] for _ in range(exchange.nodes)]
        self.m_of = [[np.zeros_like(x) for x in weights] for _ in range(exchange.nodes)]
        self.sums = [[np.zeros_like(x) for x in weights] for _ in range(exchange.nodes)]
        self.anchor, self.rates = [x.copy() for x in weights], [0.0] * len(weights)

    def step(self, of_nodes: Sequence[Arrays]) -> None:
        self.t += 1
        if self.t > self.local_after:
            self._alone(of_nodes)
        else:
            self._together(of_nodes)
        self.w = self.of_nodes[0]

    def _scale(self) -> Arrays:
        return [np.sqrt(v / (1 - self.b2_of_v**self.renewed)) + self.eps for v in self.v]

    def _together(self, of_nodes: Sequence[Arrays]) -> None:
        if self.t % self.interval == 0:
            mean = [np.mean(each, 0) for each in zip(*of_nodes, strict=True)]
            b2 = self.b2_of_v = self.b2
            self.v = self._moved(self.v, [b2 * v + (1 - b2) * g * g for v, g in zip(self.v, mean, strict=True)])
            self.renewed, self.at_interval = self.renewed + 1, self.at_interval + 1
            if self.at_interval == self.renewals:
                self.interval, self.at_interval = 2 * self.interval, 0
        else:
            mean = self.exchange.mean(of_nodes, self._used())
        b1, decay = self.b1, 1 - self.lr * self.wd
        self.m = self._moved(self.m, [b1 * m + (1 - b1) * g for m, g in zip(self.m, mean, strict=True)])
        rate = self.lr / (1 - b1**self.t)
        stepped = [decay * w - rate * m / d for w, m, d in zip(self.w, self.m, self._scale(), strict=True)]
        self.w = self._moved(self.w, stepped)
        self.of_nodes = [[w.copy() for w in self.w] for _ in self.of_nodes]
        self.m_of = [[m.copy() for m in self.m] for _ in self.m_of]
        self.anchor = [w.copy() for w in self.w]

    def _alone(self, of_nodes: Sequence[Arrays]) -> None:
        if self.t == self.local_after + 1:
            self.exchange.errors[:] = 0.0
        self.since += 1
        rate, decay = self.lr / (1 - self.b1**self.t), 1 - self.lr * self.wd
        self.rates = [rates + rate * (n not in self.still) for n, rates in enumerate(self.rates)]
        scales, used = self._scale(), [(v > 0) & (rates > 0) for v, rates in zip(self.v, self.rates, strict=True)]
        self.anchor = self._moved(self.anchor, [decay * w for w in self.anchor])
        for node, gradients in enumerate(of_nodes):
            for n, g in enumerate(gradients):
                if n in self.still:
                    continue
                self.m_of[node][n] = (self.b1 * self.m_of[node][n] + (1 - self.b1) * g) * used[n]
                self.sums[node][n] += rate * self.m_of[node][n]
                self.of_nodes[node][n] = decay * self.of_nodes[node][n] - rate * self.m_of[node][n] / scales[n]
        if self.since < self.h:
            return
        mean = self.exchange.mean(self.sums, used)
        self.anchor = [w - s / d for w, s, d in zip(self.anchor, mean, scales, strict=True)]
        self.of_nodes = [[w.copy() for w in self.anchor] for _ in self.of_nodes]
        self.m_of = [
            [s / rates if rates else m for s, m, rates in zip(mean, each, self.rates, strict=True)]
            for each in self.m_of
        ]
        self.sums = [[np.zeros_like(s) for s in mean] for _ in self.sums]
        self.rates, self.since = [0.0] * len(mean), 0
        self.local_steps += self.h
        if self.local_steps >= self.interval_steps:
            self.h, self.local_steps = min(2 * self.h, self.largest), 0


class Lamb(Adam):
    """1-bit LAMB."""

    def __init__(self, weights: Arrays, exchange: Exchange, freeze_step: int, lr: float, wd: float) -> None:
        super().__init__(weights, exchange, freeze_step, lr, wd)
        self.eps, count = 1e-6, len(weights)
        self.averages, self.factors, self.scalings = [0.0] * count, [1.0] * count, [1.0] * count
        self.measured = [0] * count
        self.fresh: Arrays = []

    def step(self, of_nodes: Sequence[Arrays]) -> None:
        self.t += 1
        before = self.m
        if self.t <= self.freeze:
            self._advance(of_nodes)
        else:
            b1 = self.b1
            local = [
                [s * (b1 * m + (1 - b1) * g) for s, m, g in zip(self.scalings, self.m, each, strict=True)]
                for each in of_nodes
            ]
            mean = self.exchange.mean(local, self._used())
            self.m = self._moved(self.m, [m / s for m, s in zip(mean, self.scalings, strict=True)])
        first, second = 1 - self.b1**self.t, 1 - self.b2_of_v ** min(self.t, self.freeze)
        steady = [np.sqrt(v / second) + self.eps for v in self.v]
        for n, w in enumerate(self.w):
            if n in self.still:
                continue
            self.measured[n] += self.t <= self.freeze
            update = self.m[n] / first / steady[n] + self.wd * w
            if self.t <= self.freeze:
                ratio = float(np.linalg.norm(w) / np.linalg.norm(update))
                self.averages[n] = 0.9 * self.averages[n] + 0.1 * ratio
            else:
                gradient = (self.m[n] - self.b1 * before[n]) / (1 - self.b1)
                self.fresh[n] = self.b2 * self.fresh[n] + (1 - self.b2) * gradient**2
                found = float((steady[n] / (np.sqrt(self.fresh[n] / (1 - self.b2**self.t)) + self.eps)).max())
                near = min(max(found, 0.9 * self.factors[n]), 1.1 * self.factors[n])
                self.factors[n] = min(max(near, 0.5), 4.0)
                ratio = self.averages[n] / (1 - 0.9 ** self.measured[n]) * self.factors[n]
            w -= self.lr * ratio * update
        if self.t == self.freeze:
            roots = [float(np.sqrt((m**2).mean())) for m in self.m]
            self.scalings = [float(np.mean(roots)) / root for root in roots]
            self.fresh = [v.copy() for v in self.v]
