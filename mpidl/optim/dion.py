"""Dion: updates of matrices with orthonormal factors of low rank, of which ranks exchange the factors alone.

    momentum     M_i = M_i + G_i                    on rank i, of its own gradient
    left         P = orthonormal columns of mean(M_i Q)      one all-reduce of all matrices' [rows, r]
    right        R = mean(M_i^T P)                           one all-reduce of all matrices' [columns, r]
    feedback     M_i = M_i - (1 - mu) P R^T
    step         Q = R, its columns normalised;  X = X - lr sqrt(rows / columns) P Q^T

All of it is linear in M_i, so that the mean of M_i, P, R and the weights are those of one process with the mean
gradient, and the gradients of matrices need no reduction at all. Source: Ahn et al. 2025, "Dion: Distributed
Orthonormalized Updates", algorithm 1 and its distributed form.

Who runs what: `step` runs the all-reduces in the caller's thread, on the program's own Communicator: one of flags, one
for all left factors and one for all right factors of a dtype. Groups and shapes are compared at construction, and a
matrix that has a gradient on any rank is stepped on all, so every rank comes to the same operations.

    optimizer = mpidl.optim.Dion([{"params": matrices}, {"params": others, "rule": "adamw"}], process_group=comm)
    wrapped.register_comm_hook(mpidl.optim.DionState(optimizer), mpidl.optim.dion_hook)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from numbers import Real
from typing import Any

import numpy as np
import torch

from collectives import Communicator

from ..comm_hooks import GradBucket, Handle, allreduce, average_some, completed
from ..errors import ConfigurationError, TrainingError
from ..job.agreement import check_everywhere
from ..mesh import placement
from ..optimizer_trial import StepNeeds
from ..replicas.start_check import check_settings_agree
from ..setting_checks import require, require_betas, require_not_negative
from .elementwise_state import restore_wide

_SEED = 20250407
_SPARSE = "Dion: got a sparse gradient; needs dense ones"
_TINY = 1e-30
_TOLERANCE = 1e-5  # of sums of squares that should be equal; norms are in fp32


RANK_FRACTION = 0.25  # by default


class Dion(torch.optim.Optimizer):
    """Steps on matrices by Dion and, in groups with rule="adamw", on other parameters by AdamW.

    params: parameters or groups of them.
    rule: of a group, "dion" for matrices, or "adamw".
    lr: of Dion's groups and, unless they have their own, of AdamW's.
    mu: momentum that is kept of what a step has used, 0 to 1.
    rank_fraction: r by the smaller side of a matrix, above 0, at most 1.
    betas, eps: of AdamW.
    weight_decay: decoupled, in both.
    process_group: where gradients of matrices are each rank's own, as by `dion_hook`: the ranks. Construction and steps
        are collective then; settings or shapes that differ are ModelMismatch on every rank. None: gradients are
        reduced, or there is one process.

    The state of a matrix is `momentum`, of its shape, and `q`, [columns, r]; that of others is AdamW's. With a process
    group momenta are each rank's own, and their mean is what counts: `average_momenta` comes before `state_dict`.
    Gradients of matrices must not be clipped or compared between ranks then. Clip those of AdamW's groups alone; a step
    is a TrainingError on every rank where they differ between ranks.

    Under ZeRO each parameter has one rank that gets it and its reduced gradient whole (StepNeeds.wholes), so that none
    computes what another one does; gradients travel as for any optimizer there.
    """

    step_needs = StepNeeds(wholes=True, elementwise=("adamw",))
    wide_states = True  # in fp32 also of 16-bit parameters

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.01,
        mu: float = 0.95,
        rank_fraction: float = RANK_FRACTION,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        rule: str = "dion",
        process_group: Communicator | None = None,
    ) -> None:
        fits = process_group is None or isinstance(process_group, Communicator)
        require("process_group", process_group, fits, "None or a Communicator")
        self.process_group = process_group
        if process_group is not None:
            self.step_needs = replace(self.step_needs, averages="factors")
        self._has_own_momenta = self._is_compared = False
        settings = {"lr": lr, "mu": mu, "rank_fraction": rank_fraction, "betas": betas, "eps": eps}
        defaults = {**settings, "weight_decay": weight_decay, "rule": rule}
        if process_group is None:
            super().__init__(params, defaults)
        else:
            check_everywhere(process_group, partial(super().__init__, params, defaults))
            self._check_groups_agree(process_group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group after a check of its settings; settings that it lacks are the optimizer's."""
        settings = {**self.defaults, **param_group}
        require_not_negative(settings, "lr", "weight_decay", "eps")
        mu, fraction, betas = settings["mu"], settings["rank_fraction"], settings["betas"]
        require("mu", mu, isinstance(mu, Real) and 0 <= float(mu) <= 1, "a number from 0 to 1")
        fits = isinstance(fraction, Real) and 0 < float(fraction) <= 1
        require("rank_fraction", fraction, fits, "a number above 0, at most 1")
        require_betas(betas)
        require("rule", settings["rule"], settings["rule"] in ("dion", "adamw"), "'dion' or 'adamw'")
        super().add_param_group(param_group)
        self._is_compared = False
        for p in self.param_groups[-1]["params"]:
            shape = tuple(p.shape)
            require("params", p.dtype, p.dtype.is_floating_point, "floating-point tensors")
            if settings["rule"] == "dion" and p.dim() != 2:
                raise ConfigurationError(
                    f"Dion: got a parameter of shape {shape}; needs matrices, and others in a group with rule='adamw'"
                )
            if settings["rule"] == "dion" and "tp" in placement(p).axes:
                raise ConfigurationError(
                    f"Dion: got a part, of shape {shape}, of a matrix that is cut over tp; needs a ZeroOptimizer, "
                    "which joins the parts"
                )

    def matrices(self) -> set[torch.Tensor]:
        """The parameters of which Dion's rule makes the steps."""
        return {p for group in self.param_groups if group["rule"] == "dion" for p in group["params"]}

    # ---- a step ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Updates matrices with a gradient on any rank, others with one here; returns the result of `closure`.

        closure: called with gradients on.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.process_group is not None and not self._is_compared:
            self._check_groups_agree(self.process_group)
        matrix_steps, others, is_sparse = [], [], False
        for group in self.param_groups:
            for p in group["params"]:
                is_sparse |= p.grad is not None and p.grad.is_sparse
                if group["rule"] == "dion":
                    matrix_steps.append((p, group))
                elif p.grad is not None:
                    others.append((p, p.grad, group))
        has_gradient = [p.grad is not None for p, _ in matrix_steps]
        if self.process_group is not None and has_gradient:
            dense = [gradient for _, gradient, _ in others if not gradient.is_sparse]
            has_gradient = self._has_gradient_anywhere(self.process_group, has_gradient, is_sparse, dense)
        elif is_sparse:
            raise ConfigurationError(_SPARSE)
        for p, gradient, group in others:
            self._adamw(p, gradient, group)
        self._dion([pair for pair, any_rank in zip(matrix_steps, has_gradient, strict=True) if any_rank])
        return loss

    def _check_groups_agree(self, comm: Communicator) -> None:
        """Compares the ranks' settings, by which they send and step. Raises ModelMismatch on every rank."""
        settings: dict[str, Any] = {}
        for number, group in enumerate(self.param_groups):
            compared = {name: group[name] for name in ("rule", "rank_fraction", "mu", "betas", "eps")}
            compared["shapes"] = [(tuple(p.shape), p.dtype) for p in group["params"]]
            settings |= {f"{name} of group {number}": value for name, value in compared.items()}
        check_settings_agree(comm, "Dion", settings)
        self._is_compared = True

    def _has_gradient_anywhere(
        self, comm: Communicator, has_gradient: list[bool], is_sparse: bool, others: Sequence[torch.Tensor]
    ) -> list[bool]:
        """Tells which matrices have a gradient on some rank. others: gradients, compared between the ranks.

        Raises ConfigurationError on every rank if one has a sparse gradient.
        """
        total = _sum_of_squares(others)
        flags = np.array([*has_gradient, is_sparse, total, -total])
        comm.all_reduce(flags, "max")
        if flags[-3]:
            raise ConfigurationError(_SPARSE)
        largest, smallest = flags[-2], -flags[-1]
        if np.isfinite(flags[-2:]).all() and largest - smallest > _TOLERANCE * largest:
            raise TrainingError(
                f"Dion.step: gradients of groups with rule='adamw' differ between the {comm.size} ranks, as after "
                "clip_grad_norm_ of all parameters, whose norm counts each rank's own gradients of matrices; clip "
                "those of rule='adamw' alone, and register dion_hook"
            )
        self._has_own_momenta = comm.size > 1
        return flags[:-3].astype(bool).tolist()  # type: ignore[no-any-return]

    def _dion(self, matrix_steps: Sequence[tuple[torch.Tensor, dict[str, Any]]]) -> None:
        """Steps on matrices, of which all factors of one side are averaged at once."""
        entries = []
        for p, group in matrix_steps:
            entry = self.state[p]
            if not entry:
                entry.update(initial_state(p, group["rank_fraction"]))
            if p.grad is not None:
                entry["momentum"] += p.grad
            entries.append(entry)
        lefts = self._mean([entry["momentum"] @ entry["q"] for entry in entries])
        lefts = [torch.linalg.qr(left).Q for left in lefts]
        rights = self._mean([entry["momentum"].T @ left for entry, left in zip(entries, lefts, strict=True)])
        for (p, group), entry, left, right in zip(matrix_steps, entries, lefts, rights, strict=True):
            entry["momentum"].addmm_(left, right.T, alpha=-(1 - group["mu"]))
            entry["q"] = right / torch.linalg.vector_norm(right, dim=0, keepdim=True).clamp_min(_TINY)
            lr = float(group["lr"])
            p.mul_(1 - lr * group["weight_decay"])
            scale = (p.shape[0] / p.shape[1]) ** 0.5
            p.sub_((left @ entry["q"].T).to(p.dtype), alpha=lr * scale)

    def _mean(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The means over the ranks, of all tensors of a dtype in one operation."""
        if self.process_group is None or not tensors:
            return tensors
        kinds: dict[torch.dtype, list[int]] = {}
        for number, tensor in enumerate(tensors):
            kinds.setdefault(tensor.dtype, []).append(number)
        found = list(tensors)
        for numbers in kinds.values():
            flat = torch.cat([tensors[number].reshape(-1) for number in numbers])
            self.process_group.all_reduce(flat, "avg")
            parts = flat.split([tensors[number].numel() for number in numbers])
            for number, part in zip(numbers, parts, strict=True):
                found[number] = part.view(tensors[number].shape)
        return found

    def _adamw(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        entry = self.state[p]
        wide = torch.promote_types(p.dtype, torch.float32)
        if not entry:
            entry["step"] = torch.zeros(())
            entry["exp_avg"] = torch.zeros_like(p, dtype=wide)
            entry["exp_avg_sq"] = torch.zeros_like(p, dtype=wide)
        entry["step"] += 1
        step, (beta1, beta2), lr = entry["step"].item(), group["betas"], float(group["lr"])
        mean, square, g = entry["exp_avg"], entry["exp_avg_sq"], grad.to(wide)
        mean.lerp_(g, 1 - beta1)
        square.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        scale = square.div(1 - beta2**step).sqrt_().add_(group["eps"])
        p.mul_(1 - lr * group["weight_decay"])
        p.sub_((mean / (1 - beta1**step) / scale).to(p.dtype), alpha=lr)

    # ---- state -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def average_momenta(self) -> None:
        """Replaces each rank's momenta by their mean, which changes no later step except by rounding. Collective.

        mpidl.checkpoint.save has it done by the hook's DionState.
        """
        held = [self.state.get(p, {}) for group in self.param_groups for p in group["params"]]
        entries = [entry for entry in held if "momentum" in entry]
        for entry, mean in zip(entries, self._mean([entry["momentum"] for entry in entries]), strict=True):
            entry["momentum"].copy_(mean)
        self._has_own_momenta = False

    def note_equal_momenta(self) -> None:
        """Notes that the momenta are the same on all ranks, as after a load."""
        self._has_own_momenta = False

    def state_dict(self) -> dict[str, Any]:
        """The state, equal on all ranks; may be called on one alone.

        Raises TrainingError with a process group where a step has been made since the last `average_momenta`.
        """
        if self._has_own_momenta:
            raise TrainingError(
                "Dion: state_dict() while each rank has momenta of its own; needs average_momenta() on every rank "
                "after the last step, or mpidl.checkpoint.save"
            )
        return super().state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Loads what `state_dict` gave, on every rank the same."""
        super().load_state_dict(dict(state_dict))
        self._has_own_momenta = self._is_compared = False
        restore_wide(self, state_dict, ("momentum", "q", "exp_avg", "exp_avg_sq"))


class DionState:
    """State of `dion_hook`. optimizer: a Dion whose process group is the wrapper's."""

    needs_every_rank = leaves_gradients_local = True

    def __init__(self, optimizer: Dion) -> None:
        fits = isinstance(optimizer, Dion) and optimizer.process_group is not None
        require("optimizer", type(optimizer).__name__, fits, "a Dion with process_group=")
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, str]:
        """Averages the momenta, so that a checkpoint finds the same state on all ranks. Collective."""
        self.optimizer.average_momenta()
        return {"momenta": "mean"}

    def load_state_dict(self, state_dict: Mapping[str, str]) -> None:
        """Notes that the momenta are the same on all ranks; they are the optimizer's."""
        self.optimizer.note_equal_momenta()


def dion_hook(state: DionState, bucket: GradBucket) -> Handle:
    """DDP's communication hook: averages gradients, except those of Dion's matrices, which stay each rank's own."""
    optimizer = state.optimizer
    bucket.refuse_other_ranks("Dion", optimizer.process_group)
    matrices = optimizer.matrices()
    others = [g for p, g in zip(bucket.parameters(), bucket.gradients(), strict=True) if p not in matrices]
    if len(others) == len(bucket.gradients()):
        return allreduce(optimizer.process_group, bucket)
    if not others:
        return completed()
    return average_some(others, bucket.communicator(optimizer.process_group))


def _sum_of_squares(tensors: Sequence[torch.Tensor]) -> float:
    norms = [torch.linalg.vector_norm(t, dtype=torch.promote_types(t.dtype, torch.float32)) for t in tensors]
    with np.errstate(over="ignore"):
        return float(sum(norm.double() ** 2 for norm in norms))


def factor_rank(shape: torch.Size, fraction: float) -> int:
    """The rank r of a matrix's factors."""
    return max(1, round(fraction * min(shape)))


def initial_state(p: torch.Tensor, fraction: float) -> dict[str, torch.Tensor]:
    """The state before the first step. q depends on the matrix's shape alone, on every rank and engine."""
    wide = torch.promote_types(p.dtype, torch.float32)
    rank = factor_rank(p.shape, fraction)
    random = torch.Generator().manual_seed(_SEED)
    q = torch.randn(p.shape[1], rank, generator=random, dtype=torch.float64).to(p.device, wide)
    return {"momentum": torch.zeros(p.shape, dtype=wide, device=p.device), "q": q}
