"""Join hook of a DistributedDataParallel: the collectives of a rank that has no batches left.

    the others      start of backward   buckets ...          end of backward
    this rank       zeros for all buckets at once            takes part in what the ranks agree on at the end

Between the two it takes part in further turns (`uneven_inputs`), as one wrapper's pass may lie inside another's.
"""

from __future__ import annotations

from collections.abc import Callable

from ..errors import ConfigurationError
from .reducer import Reducer
from .uneven_inputs import JoinHook, JoinTurns


class WrapperJoinHook(JoinHook):
    """Stands in for the others' backward passes. A shadow pass makes the collectives of one of them, with zeros.

    take_over(root): brings all ranks a rank's states.
    synchronised_norms: whether the module has any, which wait for all ranks in a forward pass.
    undoes_by_itself: whether the hook undoes steps without being told, as with `compress` and undo=True.
    divide_by_active: the mean is over the ranks that have batches.
    """

    def __init__(
        self,
        reducer: Reducer,
        take_over: Callable[[int], None],
        *,
        synchronised_norms: bool,
        undoes_by_itself: bool,
        divide_by_active: bool,
    ) -> None:
        self._reducer, self._take_over = reducer, take_over
        self._synchronised_norms, self._divide_by_active = synchronised_norms, divide_by_active
        self._undoes_by_itself = undoes_by_itself

    @property
    def mean_correction(self) -> float:
        """The factor of the mean over all ranks."""
        return self.turns.mean_correction if self._divide_by_active else 1.0

    def begin(self, turns: JoinTurns, number: int) -> None:
        """Begins a Join block."""
        super().begin(turns, number)
        if self._synchronised_norms and not self.turns.throw:
            raise ConfigurationError(
                "join: SyncBatchNorm needs all ranks in every forward pass; set throw_on_early_termination=True"
            )
        if self._undoes_by_itself and not self.turns.throw:
            raise ConfigurationError(
                "join: got compress with undo=True, and a rank without batches does not know which steps the others "
                "skip; leave undo= out, or set throw_on_early_termination=True"
            )
        self._reducer.join.joining = self

    def main_hook(self) -> None:
        """Begins a shadow pass, or ends the one that is under way."""
        if self._reducer.join.is_shadow:
            self._reducer.end_shadow_pass()
        else:
            self._reducer.begin_shadow_pass()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Broadcasts the states of a rank that ended last to all."""
        self._take_over(self.turns.root)

    def end(self) -> None:
        """Leaves the Join block."""
        self._reducer.leave_join()
