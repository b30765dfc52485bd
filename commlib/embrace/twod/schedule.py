"""The 2D schedule of a training loop: what travels when, and what waits for what.

    training  F0 B0 step │ rows1 F1 B1 step │ rows2 F2 ...    │ prior gradients, then late rows
    lane        P0 ────── L1 ── D0  P1 ────── L2 ── D1        P prior, L late rows, D delayed,
                  blocks0, E2        blocks1, E3              E early rows
    ids       I1            I2            I3                  of the batch ahead

There is no barrier between iterations: `optimizer.step()` only says that a step is due. Blocks are
updated when the next forward pass comes to them, prior rows before the next batch is looked up,
delayed rows before the batch after that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Generic, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from commlib.embrace.optim import attach
from commlib.embrace.twod.accepts import check_optimizer, check_wrapped, tables_of
from commlib.embrace.twod.blocks import BLOCK_BYTES, Blocks
from commlib.embrace.twod.finder import IdsOf
from commlib.embrace.twod.lookahead import Ahead, Lookahead
from commlib.embrace.twod.naming import Finding, Naming
from commlib.embrace.twod.patch import replaced
from commlib.embrace.twod.pending import PendingGrad
from commlib.embrace.twod.runner import Runner
from commlib.embrace.twod.stepper import Stepper
from commlib.embrace.twod.vertical import Vertical

B = TypeVar("B")


class Schedule(Generic[B]):
    """Iterates over a loader's batches, and moves bytes while they compute.

    for batch in commlib.embrace.schedule(loader, model, optimizer):
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    The loop is the usual one, and so are its results, to the bit. What differs: after `step()`
    weights are up to date only where `model` itself reads them, after `flush()`, and after the
    loop. `state_dict()` of the model and of the optimizer, evaluation, and whatever looks at a
    gradient before `step()` (clipping, a loss scaler) wait for what they need by themselves.
    All ranks stop after the same batch: the one after which the first rank's loader ends.

    Args:
        loader: Gives this rank's batches. One is taken ahead.
        model: The model with partitioned tables, or DDP around it. DDP then leaves gradients to
            the schedule, which averages them the same way, until the loop ends.
        optimizer: SGD, Adagrad, Adam, AdamW or SparseAdam.
        ids: `ids(batch)` gives, by table or its name, all ids that the forward pass will look up.
            Where None, tables whose ids are a tensor of the batch, or a slice of one, are found in
            the first iteration. Tables that are not named, or found, are looked up when asked.
        overlap: False waits for every exchange at once: the same arithmetic, for comparison.
        block_bytes: Dense modules are put together up to this size. Less lets the front start
            sooner, more costs fewer exchanges.

    Attributes:
        waited_s: Seconds that the training thread waited: for "ids", "rows" (lookups),
            "gradients" (of tables) and "dense".

    Raises:
        ValueError: No partitioned table, tables of two `shard` calls, an optimizer that cannot
            take a step in parts, buffers that DDP would broadcast, or DDP that was made before
            the tables were partitioned.
        TypeError: `ids` is no function.

    Source: EmbRace, two-dimensional communication scheduling.
    """

    def __init__(
        self,
        loader: Iterable[B],
        model: nn.Module,
        optimizer: Optimizer,
        *,
        ids: IdsOf | None = None,
        overlap: bool = True,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        self._loader = loader
        self._model = model
        self._root = model.module if isinstance(model, DistributedDataParallel) else model
        check_optimizer(optimizer)
        self._optimizer = attach(optimizer)
        self._tables = tables = tables_of(self._root)
        self._exchange = tables[0].exchange
        check_wrapped(model, tables)
        if ids is not None and not callable(ids):
            raise TypeError(
                f"ids is a {type(ids).__name__}: give a function of a batch that returns"
                " {table or its name: ids}"
            )
        self._runner = Runner(self._exchange)
        self._stepper = Stepper(optimizer)
        self._naming = Naming(tables, self._exchange, ids)
        self._ahead: Ahead | None = None
        self._lookahead: Lookahead | None = None
        self._sync = True
        self._active = False
        self._label = self._exchange.request_name("schedule")
        self._vertical = Vertical(
            tables,
            self._runner,
            self._stepper,
            self._upcoming,
            self.synchronize,
            self._label,
            overlap,
            Finding(self._naming, self._exchange.source),
        )
        self._vertical.flush = self.flush
        self._blocks = Blocks(
            self._root, self._runner, self._stepper, self.synchronize, overlap, block_bytes
        )
        self._overlap = overlap

    @property
    def waited_s(self) -> Mapping[str, float]:
        """Seconds that the training thread waited so far, by what for."""
        return self._runner.waited_s

    def __iter__(self) -> Iterator[B]:
        """The batches; one loop at a time.

        Raises:
            IndexError, TypeError: Ids of a batch that a table does not have; CommError elsewhere.
        """
        if self._active:
            raise ValueError("this schedule is in use already: make one for each loop")
        with ExitStack() as stack:
            self._enter(stack)
            batches = self._naming.agreed(iter(self._loader))
            self._lookahead = Lookahead(batches, self._runner, self._label)
            ahead = self._pull()
            while self._lookahead.settle(ahead):
                self._ahead = None
                self._naming.batch = ahead.batch
                self._blocks.batch = ahead.step
                self._vertical.begin(ahead)
                if self._naming.scheduled:
                    self._ahead = self._pull()
                try:
                    yield ahead.batch
                except GeneratorExit:  # the loop was left
                    self.flush()
                    raise
                self._blocks.hold_up()
                self._naming.note_places()
                ahead = self._ahead or self._pull()
            self._ahead = ahead
            self.flush()

    def flush(self) -> None:
        """Take all steps that are due to their end, so that all weights are up to date."""
        self._blocks.update_all()
        self._vertical.update_all()

    def synchronize(self) -> None:
        """Bring all gradients into `parameter.grad`; the next `step()` is then an ordinary one."""
        self.flush()
        self._blocks.bring_home()
        self._vertical.bring_home()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """As DDP's: dense gradients only add up, until a backward pass outside of it."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    # The batch ahead.

    def _pull(self) -> Ahead:
        assert self._lookahead is not None
        volatile = self._vertical.volatile()
        return self._lookahead.pull(
            self._naming.scheduled,
            self._naming.ids,
            lambda ahead: self._vertical.prefetch(ahead, volatile),
        )

    def _upcoming(self) -> Ahead | None:
        """The next batch with its ids known; None where it is not known yet, or there is none."""
        if self._ahead is None:
            return None
        self._runner.wait(self._ahead.known, f"{self._label}.ids", "ids")
        return self._ahead if self._ahead.alive else None

    # What the user's loop calls.

    def _step(self, closure: Callable[[], float] | None = None) -> None:
        """Stands for `optimizer.step()`."""
        if closure is not None:
            raise ValueError("optimizer.step(closure) cannot be scheduled: call it without one")
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        settings = self._stepper.settings()
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # asked by lr_scheduler
        self._vertical.due(settings)
        self._blocks.due(settings)
        here = [p for p in parameters if p.grad is not None and not isinstance(p.grad, PendingGrad)]
        if here:
            self._stepper.step(here, settings)
        if not self._overlap:
            self.flush()

    def _zero_grad(self, original: Callable[..., None], set_to_none: bool = True) -> None:
        self._vertical.drop()
        self._blocks.drop()
        original(set_to_none=set_to_none)

    # Entering and leaving.

    def _enter(self, stack: ExitStack) -> None:
        self._active = True
        stack.callback(self._leave)
        model, root, optimizer = self._model, self._root, self._optimizer
        stack.enter_context(replaced(self._exchange, "source", self._vertical))
        step = functools.wraps(optimizer.step)(lambda closure=None: self._step(closure))
        stack.enter_context(replaced(optimizer, "step", step))
        for owner in {model, root, optimizer}:
            zero = functools.partial(self._zero_grad, owner.zero_grad)
            stack.enter_context(replaced(owner, "zero_grad", zero))
        if isinstance(model, DistributedDataParallel):
            stack.enter_context(replaced(model, "no_sync", self.no_sync))
            stack.enter_context(replaced(model, "require_backward_grad_sync", False))
        modules = [model, root, *root.modules()]
        for module in dict.fromkeys(modules):
            saving = module.register_state_dict_pre_hook(lambda *_: self.flush())
            loading = module.register_load_state_dict_pre_hook(lambda *_: self._replace_weights())
            stack.callback(saving.remove)
            stack.callback(loading.remove)
        stack.callback(optimizer.register_state_dict_pre_hook(lambda _: self.flush()).remove)
        loading = optimizer.register_load_state_dict_pre_hook(lambda *_: self.flush())
        stack.callback(loading.remove)
        entering = root.register_forward_pre_hook(lambda *_: self._before_forward())
        stack.callback(entering.remove)
        self._blocks.watch(lambda: self._sync, self._vertical.block_entered)

    def _leave(self) -> None:
        self._blocks.unwatch()
        self._vertical.current = None
        self._active = False

    def _before_forward(self) -> None:
        """Evaluation may read any weight, by ways that no hook sees."""
        if not (self._root.training and torch.is_grad_enabled()):
            self.flush()

    def _replace_weights(self) -> None:
        self.flush()
        self._vertical.forget_early()


def schedule(
    loader: Iterable[B],
    model: nn.Module,
    optimizer: Optimizer,
    *,
    ids: IdsOf | None = None,
    overlap: bool = True,
    block_bytes: int = BLOCK_BYTES,
) -> Schedule[B]:
    """The 2D schedule of a training loop; `Schedule` says what it takes and what it changes."""
    return Schedule(loader, model, optimizer, ids=ids, overlap=overlap, block_bytes=block_bytes)
