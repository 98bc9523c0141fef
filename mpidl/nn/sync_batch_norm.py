"""Batch normalization over the samples of all ranks.

    forward     each rank: (count, mean, M2) of its samples -> one all_gather -> the same whole statistics everywhere
    backward    each rank: (sum dy, sum dy x^)              -> one all_reduce -> the gradient of its own samples

M2 is the sum of squared distances from the mean; combining M2s keeps the variance right where it is small compared with
the mean. Sources: Chan, Golub and LeVeque 1979, "Updating Formulae and a Pairwise Algorithm for Computing Sample
Variances", generalised from two sets to one a rank; Ioffe and Szegedy 2015, "Batch Normalization: Accelerating Deep
Network Training by Reducing Internal Covariate Shift", algorithm 1.

Who runs what: the thread of the forward or backward pass, between the collectives of DDP and ZeRO, whose order may
differ between ranks that reach other parameters. So these have a Communicator of their own, one for all layers, on
which every rank runs the layers in the same order. So no rank waits in a layer for a rank that waits in a bucket.
"""

from __future__ import annotations

import copy
import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from collectives import Communicator

from ..errors import ConfigurationError
from ..mesh import Mesh
from ..mesh.groups import DATA, checked_mesh, data_group

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_HEADER = 4  # count, channels, dtype, needs_gradient

_duplicates: weakref.WeakKeyDictionary[Communicator, Communicator] = weakref.WeakKeyDictionary()


class SyncBatchNorm(_BatchNorm):
    """nn.BatchNorm1d, 2d or 3d over the samples of all ranks together, while training.

    input: (samples, num_features, ...), on every rank any number of samples, also none, and any extent of the rest.
    process_group: the Communicator; by default the world, joined at the first training forward pass.
    mesh: a `Mesh`, in place of process_group: samples of its dp x cp.

    The other arguments, the parameters, the running statistics and what they hold are as in torch. Output and the
    input's gradient are those of the whole batch for this rank's samples; the gradients of weight and bias are sums
    over this rank's samples, as in torch, which DDP or ZeRO bring together. Statistics of 16-bit inputs are
    computed in fp32. In eval mode nothing is sent.

    Collective in training mode, forward and, where the input needs a gradient, backward: every rank calls the same
    layers in the same order. Raises ConfigurationError on every rank if one's input does not fit, and torch's
    ValueError on every rank if the whole batch has one value per channel.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Communicator | None = None,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = True,
        mesh: Mesh | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        if not bias:
            self.register_parameter("bias", None)
        self.process_group = _group_of(process_group, mesh)

    @classmethod
    def convert_sync_batchnorm(
        cls, module: torch.nn.Module, process_group: Communicator | None = None, *, mesh: Mesh | None = None
    ) -> torch.nn.Module:
        """Replaces every batch normalization in `module`, in place; returns it, or what replaces it. Nothing is sent.

        A layer's parameters, buffers, settings and hooks are kept: the new layer shares them with the old one.
        """
        return cls._convert(module, _group_of(process_group, mesh), {})

    @classmethod
    def _convert(
        cls,
        module: torch.nn.Module,
        process_group: Communicator | None,
        done: dict[torch.nn.Module, torch.nn.Module],
    ) -> torch.nn.Module:
        if module in done:
            return done[module]
        result = module
        if isinstance(module, torch.nn.modules.lazy.LazyModuleMixin) and isinstance(module, _BatchNorm):
            raise ConfigurationError("convert_sync_batchnorm: got a lazy layer; it needs one forward pass before")
        if isinstance(module, _BatchNorm):
            result = cls.__new__(cls)
            result.__dict__.update(module.__dict__)
            result.process_group = process_group  # type: ignore[assignment]
        done[module] = result
        for name, child in module._modules.items():
            if child is not None:
                result._modules[name] = cls._convert(child, process_group, done)
        return result

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The normalized input, in its dtype and memory format. Collective in training mode."""
        mixed = self.affine and self.running_mean is not None and self.weight.dtype != self.running_mean.dtype
        if not self.training:
            return self._by_running_statistics(input) if mixed else super().forward(input)
        group = data_group("SyncBatchNorm", self.process_group)
        if group.size == 1 and not mixed:
            return super().forward(input)
        comm = _duplicate(group)
        needs_gradient = torch.is_grad_enabled() and input.requires_grad
        count, mean, m2 = _whole_statistics(input, self.num_features, needs_gradient, comm)
        if count == 1:
            whole = torch.Size([1, self.num_features, *[1] * (input.dim() - 2)])
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {whole}")
        mean, m2 = mean.to(input.device), m2.to(input.device)
        self._track(count, mean, m2)
        mean, variance = mean.to(_statistics_dtype(input)), (m2 / max(count, 1)).to(_statistics_dtype(input))
        output: torch.Tensor = _Normalize.apply(input, self.weight, self.bias, mean, variance, count, self.eps, comm)  # type: ignore[no-untyped-call]
        return output

    def _by_running_statistics(self, input: torch.Tensor) -> torch.Tensor:
        """Normalises in evaluation. torch's kernels want weights of the statistics' dtype, not of a smaller input's."""
        mean, variance = self.running_mean, self.running_var
        assert mean is not None
        weight, bias = (None if t is None else t.to(mean.dtype) for t in (self.weight, self.bias))
        return F.batch_norm(input, mean, variance, weight, bias, eps=self.eps)

    @torch.no_grad()
    def _track(self, count: int, mean: torch.Tensor, m2: torch.Tensor) -> None:
        """Moves the running statistics; the variance among them is the unbiased one."""
        if not self.track_running_stats:
            return
        share = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if share is None:
                share = 1.0 / float(self.num_batches_tracked)
        if count:
            for running, new in ((self.running_mean, mean), (self.running_var, m2 / (count - 1))):
                if running is not None:
                    running.copy_(running.double() * (1.0 - (share or 0.0)) + new * (share or 0.0))

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ConfigurationError(f"SyncBatchNorm: got an input of {input.dim()} dimensions; needs 2 or more")

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncBatchNorm:
        memo[id(self.process_group)] = self.process_group  # a copy of the layer is in the same group
        copied = memo[id(self)] = self.__class__.__new__(self.__class__)
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "process_group": None}  # no file can hold one: the world, when unpickled


def _group_of(process_group: Communicator | None, mesh: Mesh | None) -> Communicator | None:
    """The group that is given; the world is joined later."""
    mesh = checked_mesh("SyncBatchNorm", process_group, mesh)
    return process_group if mesh is None else mesh.along(*DATA)


def _duplicate(group: Communicator) -> Communicator:
    """The Communicator of these layers' own over the ranks of `group`. Collective on a group's first call.

    Forward passes make it, when no bucket is under way, so that it takes the same place in the order on all ranks.
    """
    found = _duplicates.get(group)
    if found is None:
        found = group.duplicate()
        _duplicates[group] = found
    return found


@torch.no_grad()
def _whole_statistics(
    x: torch.Tensor, channels: int, needs_gradient: bool, comm: Communicator
) -> tuple[int, torch.Tensor, torch.Tensor]:
    """Count, mean and M2 (float64, one a channel) of all ranks' samples; bitwise the same everywhere. Collective.

    They go through the host's memory wherever x is: the host has to see the count and what is wrong with an input.
    needs_gradient: of x. It is sent with the statistics, like all that must be the same on the ranks, so that they
    raise the same error where it differs.
    """
    own = torch.zeros(_HEADER + 2 * channels, dtype=torch.float64)
    given_channels = x.shape[1] if x.dim() >= 2 else -1
    dtype = _DTYPES.index(x.dtype) if x.dtype in _DTYPES else -1
    count = x.numel() // channels if given_channels == channels and dtype >= 0 else 0
    own[:_HEADER] = torch.tensor([count, given_channels, dtype, needs_gradient])
    if count:
        mean, variance = _statistics(x)
        own[_HEADER:] = torch.cat([mean.double(), variance.double() * count])
    rows = torch.empty(comm.size, own.numel(), dtype=torch.float64)
    comm.all_gather(rows, own)
    _check(rows[:, :_HEADER], channels)
    counts, means, m2s = rows[:, :1], rows[:, _HEADER : _HEADER + channels], rows[:, _HEADER + channels :]
    total = counts.sum()
    mean = (counts * means).sum(0) / total
    return int(total), mean, (m2s + counts * (means - mean) ** 2).sum(0)


def _check(headers: torch.Tensor, channels: int) -> None:
    """Raises ConfigurationError for the first rank whose input does not fit."""
    for rank, (_, given_channels, dtype, needs_gradient) in enumerate(headers.tolist()):
        if given_channels != channels:
            got = f"{int(given_channels)} channels" if given_channels >= 0 else "fewer than 2 dimensions"
            raise ConfigurationError(f"SyncBatchNorm: got an input of {got} on rank {rank}; needs {channels} channels")
        if dtype < 0:
            names = ", ".join(str(d).removeprefix("torch.") for d in _DTYPES)
            raise ConfigurationError(f"SyncBatchNorm: got an input of another dtype on rank {rank}; needs {names}")
        if needs_gradient != headers[0, 3]:
            with_it, without = (0, rank) if headers[0, 3] else (rank, 0)
            raise ConfigurationError(
                f"SyncBatchNorm: got an input that needs a gradient on rank {with_it} and one that does not on rank "
                f"{without}; needs the same on all ranks, as backward is collective"
            )


def _statistics_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype in which it is computed."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _statistics(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and biased variance of each channel, in two passes.

    torch's kernel accumulates in double for the plain memory format, but in single for channels_last, where 10^5
    values near 10^4 leave nothing of a variance of 1; so those are brought into the plain format.
    """
    # 16-bit inputs get fp32 statistics by it.
    like = torch.zeros(x.shape[1], dtype=_statistics_dtype(x), device=x.device)
    mean, variance = torch.batch_norm_update_stats(x.contiguous(), like, like.clone(), 0.0)
    return mean, variance


class _Normalize(torch.autograd.Function):
    """x^ = (x - mean) / sqrt(variance + eps); weight x^ + bias. mean, variance: of `count` values over all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        variance: torch.Tensor,
        count: int,
        eps: float,
        comm: Communicator,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.count, ctx.eps, ctx.comm = count, eps, comm
        return _scale_and_shift(x, mean, variance, weight, bias, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, variance = ctx.saved_tensors
        needed = ctx.needs_input_grad
        sum_dy, sum_dy_x = _gradient_sums(dy, x, mean, variance, ctx.eps)
        dx = None
        if needed[0]:
            sums = torch.cat([sum_dy, sum_dy_x]).double()
            ctx.comm.all_reduce(sums)
            mean_dy, mean_dy_x = (sums / max(ctx.count, 1)).to(mean.dtype).chunk(2)
            # dx = slope (dy - mean dy - x^ mean(dy x^)); the part without dy is itself a normalization of x.
            slope = torch.rsqrt(variance + ctx.eps)
            if weight is not None:
                slope = slope * weight
            dx = _scale_and_shift(x.to(mean.dtype), mean, variance, -slope * mean_dy_x, -slope * mean_dy, ctx.eps)
            dx = dx.addcmul_(dy.to(mean.dtype), slope.view(-1, *[1] * (x.dim() - 2)))
        return dx, sum_dy_x if needed[1] else None, sum_dy if needed[2] else None, None, None, None, None, None


def _scale_and_shift(
    x: torch.Tensor,
    mean: torch.Tensor,
    variance: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """weight x^ + bias, in x's dtype and memory format."""
    if not x.numel():
        return torch.empty_like(x)
    weight, bias = (None if t is None else t.to(mean.dtype) for t in (weight, bias))
    return F.batch_norm(x, mean, variance, weight, bias, training=False, momentum=0.0, eps=eps)


def _gradient_sums(
    dy: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """sum dy and sum dy x^ over this rank's samples: the gradients of the bias and the weight in eval mode."""
    if not x.numel():
        return torch.zeros_like(mean), torch.zeros_like(mean)
    # CUDA needs a weight, and reads the mean and rsqrt(variance) of training where others read those of evaluation.
    weight, saved = torch.ones_like(mean), (mean, torch.rsqrt(variance + eps))
    _, sum_dy_x, sum_dy = torch.ops.aten.native_batch_norm_backward(
        dy.contiguous(), x.contiguous(), weight, mean, variance, *saved, False, eps, [False, True, True]
    )
    return sum_dy, sum_dy_x
