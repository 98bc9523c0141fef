"""Tries out what plan="auto" cuts: whether a block computes the same cut and whole, gradients too.

    a block of the model    -> a copy without values, before the model is cut
    a call of the block     -> its arguments; the input is replaced by random numbers
                               copy, whole  |  copy, cut over tp as in the plan      the same random weights
                               outputs, gradients of the input, of each parameter: equal?

The plan is read from source, and a program may do what the reading has not seen: a function that looks at all features,
a number of heads from elsewhere, a weight that another module reads. It computes something else then, without an error.
So each kind of block is tried, in training and in evaluation. In `parallelize` with its input alone, where its forward
pass takes that; what differs stays whole. And when one of the blocks is first called with such arguments, such as a
mask, where a difference is an error.

The copies compute in double precision, in single where a block is large, or in the parameters' own where nothing else
runs; without dropout. A trial changes no parameter, gradient or random number of the program's; but forward hooks of
the block, which may change what it computes, run on the copies too.

Who runs what: a trial runs in the thread `mpidl-trial`, so that autocast, checkpoints and no_grad around the call do
not reach it; the caller waits for that thread, so one thread at a time communicates. Every rank of tp tries the same
kinds in the same order: in `parallelize`, or at the first call of a block, which all ranks make with the same
arguments. A cut copy first runs alone, with a Communicator that sends nothing (`trial_copies.SilentCommunicator`), and
the ranks tell each other whether it failed, before any rank starts the copy that communicates.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from ..compiling import uncompiled
from ..errors import ConfigurationError
from ..job.objects import all_gather_object
from ..mesh import Mesh
from ..module_tensors import tensors_in
from .block_kinds import BlockKind, Relative, block_kinds, is_region
from .communication import TensorGroup
from .input_check import sums_of
from .linear import kind_of, sizes_of
from .plans import StyledModules
from .regions import FeedForwardParallel, joined
from .styles import Argument, SequenceBegins, SequenceEnds
from .tensor_parallel import TensorParallel
from .trial_copies import BlockCopies, BlockRoot, SilentCommunicator, dtypes_of

_BATCH, _TOKENS = 2, 7  # of an input that is made up
_SIGNATURES = 16  # with so many kinds of arguments a block is tried

_CPU = torch.device("cpu")

Apply = Callable[[nn.Module, Relative, TensorParallel], None]


@dataclass
class Outcome:
    """Result of a trial; both are empty if the copies are equal.

    mismatch: how a cut copy differs.
    not_tried: why none could run.
    """

    mismatch: str = ""
    not_tried: str = ""


class Trials:
    """The kinds of blocks that a plan cuts, to be tried over the ranks of tp. Made before the model is cut.

    apply: carries out the plan of a block on a module that has it as `block`.
    before: those of the plan before this one; what was right in it is not tried again.
    """

    def __init__(
        self,
        model: nn.Module,
        found: StyledModules,
        mesh: Mesh,
        apply: Apply,
        before: Trials | None = None,
        *,
        sequence_parallel: bool,
    ) -> None:
        self._model = weakref.ref(model)
        self._mesh, self._apply, self._sequence_parallel = mesh, apply, sequence_parallel
        self._kinds = list(block_kinds(model, found))
        # Kinds that compute the same with their input alone, and whether they ran.
        self._has_run_by_identity: dict[str, bool] = {} if before is None else before._has_run_by_identity

    def find_differing_regions(self) -> dict[str, str]:
        """Tries each kind with its input alone. Returns the names of regions that differ, and how. Collective."""
        found: dict[str, str] = {}
        for kind in self._kinds:
            if kind.identity in self._has_run_by_identity:
                kind.has_run = self._has_run_by_identity[kind.identity]
                continue
            block = self._block(kind.names[0])
            made_up = _made_up_input(block, kind)
            if made_up is None:
                continue
            mismatch = self.run_trial(kind, block, kind.plan, (made_up,), {}).mismatch
            if not mismatch:
                self._has_run_by_identity[kind.identity] = kind.has_run
                continue
            regions = kind.regions if len(kind.regions) > 1 else []  # of several, which
            by_itself = {
                name: self.run_trial(kind, block, {name: kind.plan[name]}, (made_up,), {}).mismatch for name in regions
            }
            differing = {name: how for name, how in by_itself.items() if how}
            for region in differing or kind.regions:
                for name in kind.names:
                    found[joined(name, region)] = f"cut, {differing.get(region, mismatch)}"
        return found

    def _block(self, name: str) -> nn.Module:
        model = self._model()
        assert model is not None
        return model.get_submodule(name)

    def try_at_first_calls(self, tp: TensorParallel) -> None:
        """Installs hooks that try a kind at the first call of its blocks with new arguments. tp: of the model."""
        for kind in self._kinds:
            for name in kind.names:
                hook = _BeforeCall(self, kind, name, tp)
                tp.keep(self._block(name).register_forward_pre_hook(hook, with_kwargs=True, prepend=True))

    def run_trial(
        self, kind: BlockKind, block: nn.Module, plan: Relative, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Outcome:
        """Runs copies of a block, whole and cut, and compares them. The same on every rank of tp. Collective.

        block: one of the kind, for its buffers.
        """
        outcomes: list[Outcome] = []
        errors: list[BaseException] = []
        device = next((t.device for t in (*block.parameters(), *tensors_in((args, kwargs))) if not t.is_meta), _CPU)
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

        def run() -> None:
            try:
                with contextlib.ExitStack() as inside:
                    if stream is not None:  # a thread begins with another device and stream
                        inside.enter_context(torch.cuda.device(device))
                        inside.enter_context(torch.cuda.stream(stream))
                    inside.enter_context(torch.random.fork_rng([device] if stream is not None else []))
                    inside.enter_context(warnings.catch_warnings())
                    warnings.simplefilter("ignore")
                    outcomes.append(self._compare_modes(kind, block, plan, args, kwargs, device))
            except BaseException as error:  # raised in the caller's thread
                errors.append(error)

        thread = threading.Thread(target=run, name="mpidl-trial")
        thread.start()
        thread.join()
        if errors:  # in a way that is not the program's
            raise errors[0]
        everyone = all_gather_object(self._mesh["tp"], outcomes[0])
        outcome = next((each for each in everyone if each.mismatch or each.not_tried), outcomes[0])
        kind.has_run = kind.has_run or not outcome.not_tried
        return outcome

    def _compare_modes(
        self,
        kind: BlockKind,
        block: nn.Module,
        plan: Relative,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        device: torch.device,
    ) -> Outcome:
        """Compares in training, and the outputs in evaluation too, each in the best dtype in which the whole runs."""
        if kind.problem:
            return Outcome(not_tried=kind.problem)
        args, kwargs, elements = _two_sequences(block, kind, args, kwargs)
        if self._differ_by_rank(block, kind, args, kwargs):
            return Outcome(not_tried="an argument is not the same on all ranks")
        outcome = Outcome(not_tried="nothing ran")
        for training in (True, False):
            before = outcome
            for dtype in dtypes_of(block, elements):
                assert kind.template is not None
                first = bool(before.not_tried)
                copies = BlockCopies(
                    kind.template, kind.input, block, args, kwargs, dtype, device, training=training, gradients=first
                )
                try:
                    outcome = self._compare_copies(kind, plan, copies)
                finally:
                    copies.close()
                if not outcome.not_tried:
                    break
            if outcome.mismatch:
                return outcome
            if outcome.not_tried and not before.not_tried:
                outcome = before
        return outcome

    def _compare_copies(self, kind: BlockKind, plan: Relative, copies: BlockCopies) -> Outcome:
        failed = self._failure_on_any_rank(copies.run_whole)
        if failed:
            return Outcome(not_tried=failed)
        # By itself first: where it fails on one rank the others would wait for it.
        failed = self._failure_on_any_rank(partial(copies.run_alone, self._cutter(kind, plan, copies, True)))
        failed = failed or self._failure_on_any_rank(partial(copies.compare, self._cutter(kind, plan, copies, False)))
        if _is_lack_of_memory(failed):
            return Outcome(not_tried=failed)
        if failed:
            return Outcome(f"it fails with {failed}")
        mismatch = next(filter(None, all_gather_object(self._mesh["tp"], copies.mismatch)), "")
        return Outcome(f"it computes something else: {mismatch}" if mismatch else "")

    def _failure_on_any_rank(self, run: Callable[[], Any]) -> str:
        """Runs something on every rank. Returns what it failed with on any of them, "" if it did not. Collective."""
        failed = ""
        try:
            run()
        except Exception as error:  # of the program's
            failed = f"{type(error).__name__}: {error}".strip().split("\n")[0][:200]
        return next(filter(None, all_gather_object(self._mesh["tp"], failed)), "")

    def _differ_by_rank(
        self, block: nn.Module, kind: BlockKind, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> bool:
        """Returns whether a tensor besides the input is not the same on all ranks, as biases of their heads.

        It does not look into objects, such as a cache, which holds each rank's heads of other blocks.
        """
        x = Argument(block, kind.input).of(args, dict(kwargs))
        given = [t for t in tree_leaves((args, kwargs)) if torch.is_tensor(t)]
        mine = [(tuple(t.shape), () if t is x else sums_of(t)) for t in given]
        everyone = all_gather_object(self._mesh["tp"], repr(mine))
        return everyone.count(everyone[0]) < len(everyone)

    def _cutter(
        self, kind: BlockKind, plan: Relative, copies: BlockCopies, alone: bool
    ) -> Callable[[nn.Module], nn.Module]:
        """Returns what cuts a copy. alone: it computes without the other ranks, and something else."""

        def cut(block: nn.Module) -> nn.Module:
            root = BlockRoot(block)
            tp = TensorParallel(self._mesh, sequence_parallel=self._sequence_parallel and copies.training)
            if alone:
                tp.group = TensorGroup(SilentCommunicator(tp.comm))  # type: ignore[arg-type]
                tp.group_of = lambda heads: tp.group  # type: ignore[method-assign]
            tp.model = weakref.ref(root)
            named = {joined("block", name): list(styles) for name, styles in plan.items()}
            if tp.sequence_parallel:
                named.setdefault("block", []).extend([SequenceBegins(kind.input), SequenceEnds()])
            self._apply(root, named, tp)
            tp.end_passes_of(root)
            return root

        return cut


class _BeforeCall:
    """Hook before a block's forward pass, which tries its kind, and raises what was found at each call."""

    def __init__(self, trials: Trials, kind: BlockKind, name: str, tp: TensorParallel) -> None:
        self._trials, self._kind, self._name, self._tp = trials, kind, name, tp

    def __deepcopy__(self, memo: dict[int, Any]) -> _BeforeCall:
        return self  # a copy of the model is cut like the model

    def __call__(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling():
            self._check_call(block, args, kwargs)

    @uncompiled
    def _check_call(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kind = self._kind
        signature = _signature(Argument(block, kind.input).of(args, kwargs), args, kwargs)
        mismatch = kind.differences_by_signature.get(signature)
        if mismatch is None and len(kind.differences_by_signature) < _SIGNATURES:
            mismatch = kind.differences_by_signature[signature] = self._run_trial(block, args, kwargs)
        if mismatch:
            regions = ", ".join(joined(self._name, region) for region in kind.regions)
            raise ConfigurationError(
                f"parallelize: plan='auto': {self._name}, cut over {self._tp.ranks} ranks: {mismatch}; needs "
                f"leave_whole= with some of {regions}, or a plan by hand"
            )

    def _run_trial(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        kind, length = self._kind, self._tp.length
        argument = Argument(block, kind.input)
        x = argument.of(args, kwargs)
        if torch.is_tensor(x) and length is not None and x.dim() > 1 and x.shape[1] != length:
            whole = x.new_empty(x.shape[0], length, *x.shape[2:])  # its values do not matter
            args, kwargs = argument.replaced(args, kwargs, whole)
        outcome = self._trials.run_trial(kind, block, kind.plan, args, kwargs)
        if not kind.has_run and self._tp.rank == 0:
            what = f"{', '.join(kind.patterns)} could not be tried by itself ({outcome.not_tried})"
            warnings.warn(f"plan='auto': {what}; compare a step with one process", stacklevel=2)
        return outcome.mismatch


def _signature(x: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Returns what of arguments may choose another path of a program: which there are, flags, how many dimensions.

    x: the input, of which the gradient is always compared.
    """

    def of(value: Any) -> Any:
        if torch.is_tensor(value):
            return value.dim(), value.requires_grad and value is not x
        return value if value is None or isinstance(value, bool | str) else type(value)

    return tuple(map(of, args)), tuple((name, of(value)) for name, value in sorted(kwargs.items()))


def _two_sequences(
    block: nn.Module, kind: BlockKind, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], int]:
    """Returns the arguments for the first two sequences of a batch, and the elements of the input then."""
    x = Argument(block, kind.input).of(args, dict(kwargs))
    if not torch.is_tensor(x):
        return tuple(args), dict(kwargs), 0
    batch = x.shape[0] if x.dim() == 3 else 0
    others = [t for t in tree_leaves((args, kwargs)) if torch.is_tensor(t) and t is not x]
    if batch <= 2 or any(t.dim() and t.shape[0] not in (1, batch) for t in others):
        return tuple(args), dict(kwargs), x.numel()
    cut = tree_map(lambda t: t[:2] if torch.is_tensor(t) and t.dim() and t.shape[0] == batch else t, (args, kwargs))
    return (*cut[0],), cut[1], x[:2].numel()


def _is_lack_of_memory(failed: str) -> bool:
    return failed.startswith(("MemoryError", "OutOfMemoryError")) or "allocate memory" in failed


def _made_up_input(block: nn.Module, kind: BlockKind) -> torch.Tensor | None:
    """An input for a block; None where the width is not known."""
    for region in kind.regions:
        style: Any = next(s for s in kind.plan[region] if is_region(s))
        first = style.inputs[0] if isinstance(style, FeedForwardParallel) else style.fused or style.query
        layer = block.get_submodule(joined(region, first))
        if kind_of(layer) is not None:
            weight = next(layer.parameters())
            width = sizes_of(region, layer)[0]
            device = _CPU if weight.is_meta else weight.device
            return torch.empty(_BATCH, _TOKENS, width, device=device)
    return None
