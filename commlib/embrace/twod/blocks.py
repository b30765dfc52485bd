"""Horizontal scheduling: dense parameters in blocks, each summed, updated and awaited by itself.

    backward   B3 ── B2 ── B1 ── B0        a block is submitted when its last gradient is there
    lane          3     2     1     0      and goes by its place in the forward pass, front first
    forward              F0 ── F1 ── F2    a block's forward waits for its own update only

The first forward pass shows which modules are called. A module that is not, since somebody uses its
parameters without calling it, is waited for where the nearest module around it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from commlib.collectives.requests import AllReduce, Protocol
from commlib.embrace.columns import columns_of
from commlib.embrace.priority import DENSE_BLOCKS, needed_by
from commlib.embrace.twod.pending import arrived, pending_grad
from commlib.embrace.twod.runner import Runner
from commlib.embrace.twod.stepper import Group, Stepper

BLOCK_BYTES = 4 << 20


@dataclass(slots=True, eq=False)
class Block:
    """Some modules' own parameters, all of one dtype.

    Args:
        name: Names its requests; the same on every rank.
        place: In the forward pass.
        owners: The modules whose parameters these are.
        parameters: What is summed and updated together.
    """

    name: str
    place: int
    owners: list[nn.Module] = field(default_factory=list)
    parameters: list[Parameter] = field(default_factory=list)
    missing: int = 0
    num_sums: int = 0
    flat: Tensor | None = None
    mean: Future[Tensor] | None = None
    settings: list[Group] | None = None

    def views(self, flat: Tensor) -> Iterator[tuple[Parameter, Tensor]]:
        """Each parameter with its stretch of `flat`."""
        sizes = [parameter.numel() for parameter in self.parameters]
        for parameter, stretch in zip(self.parameters, flat.split(sizes), strict=True):
            yield parameter, stretch.view(parameter.shape)


class Blocks:
    """The dense blocks of one model.

    Args:
        model: Its modules in order of definition count as the order of the forward pass.
        runner: Carries requests.
        stepper: Updates blocks.
        arrive: Called when somebody looks at a gradient that is under way.
        overlap: Let sums travel while other work goes on; else wait for them at once.
        block_bytes: Modules are put together up to this size. Less lets the front start sooner,
            more costs fewer exchanges.

    Attributes:
        batch: Number of the one that computes.

    Raises:
        ValueError: An embedding with row-sparse gradients that is not partitioned.

    Source: EmbRace, horizontal scheduling.
    """

    def __init__(
        self,
        model: nn.Module,
        runner: Runner,
        stepper: Stepper,
        arrive: Callable[[], None],
        overlap: bool,
        block_bytes: int,
    ) -> None:
        self._model = model
        self._runner = runner
        self._stepper = stepper
        self._arrive = arrive
        self._overlap = overlap
        self.blocks = _divide(model, block_bytes)
        self._of = {id(p): block for block in self.blocks for p in block.parameters}
        self._handles: list[RemovableHandle] = []
        self._calls: dict[nn.Module, int] | None = None
        self._entered: Callable[[], None] = _nothing
        self.batch = 0

    def watch(self, syncs: Callable[[], bool], entered: Callable[[], None]) -> None:
        """Begin to collect gradients, and to note which modules are called.

        Args:
            syncs: Whether the backward pass that runs is to send them.
            entered: Called when the forward pass comes to a block.
        """
        self._entered = entered
        calls: dict[nn.Module, int] = {}
        self._calls = calls

        def note(module: nn.Module, inputs: object) -> None:
            calls.setdefault(module, len(calls))

        self._handles += [m.register_forward_pre_hook(note) for m in self._model.modules()]
        hook = partial(self._collect, syncs)
        for block in self.blocks:
            block.missing = len(block.parameters)
            for parameter in block.parameters:
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def hold_up(self) -> None:
        """After the first forward pass: from now on, modules wait for their blocks."""
        if self._calls is None or self._model not in self._calls:
            return
        calls, self._calls = self._calls, None
        around = {child: m for m in self._model.modules() for child in m.children()}
        for block in self.blocks:
            doors = set()
            for module in block.owners:
                while module not in calls:
                    module = around[module]
                doors.add(module)
            block.place = min(calls[door] for door in doors)
            for door in doors:
                enter = partial(self._enter, block)
                self._handles.append(door.register_forward_pre_hook(enter))

    def unwatch(self) -> None:
        """Stop; what is under way must have been brought home."""
        for handle in self._handles:
            handle.remove()

    def due(self, settings: list[Group]) -> None:
        """The optimizer has stepped: each block with a gradient is updated once that is there.

        Raises:
            ValueError: Some parameters of a block got a gradient and some did not.
        """
        for block in self.blocks:
            if 0 < block.missing < len(block.parameters):
                absent = [tuple(p.shape) for p in block.parameters if p.grad is None]
                raise ValueError(
                    f"block '{block.name}' is to be updated, but {block.missing} of its parameters"
                    f" got no gradient in the last backward pass (shapes {absent}): freeze what the"
                    " loss does not use, with requires_grad_(False)"
                )
            if block.mean is not None:
                block.settings = settings
                for parameter in block.parameters:
                    parameter.grad = None

    def update_all(self) -> None:
        """Bring home and update all blocks that are due, front first."""
        for block in self.blocks:
            if block.settings is not None:
                self._settle(block)

    def bring_home(self) -> None:
        """Put all gradients under way into `parameter.grad`."""
        for block in self.blocks:
            if block.settings is None and block.mean is not None:
                self._settle(block)

    def drop(self) -> None:
        """Forget gradients that no step has asked for."""
        for block in self.blocks:
            if block.settings is None:
                block.mean = block.flat = None

    def _enter(self, block: Block, module: nn.Module, inputs: object) -> None:
        self._entered()
        if block.mean is not None:
            self._settle(block)

    def _collect(self, syncs: Callable[[], bool], parameter: Tensor) -> None:
        if not syncs():
            return
        block = self._of[id(parameter)]
        block.missing -= 1
        if block.missing == 0:
            block.missing = len(block.parameters)
            self._submit(block)

    def _submit(self, block: Block) -> None:
        flat = torch.cat([p.grad.reshape(-1) for p in block.parameters if p.grad is not None])
        name = f"{block.name}@{block.num_sums}"
        num_ranks = self._runner.exchange.num_ranks

        def mean() -> Protocol[Tensor]:
            if num_ranks == 1:
                return flat
            reduced: Tensor = yield AllReduce(name=name, tensor=flat, op="mean")
            return reduced

        block.num_sums += 1
        block.flat = flat
        priority = needed_by(self.batch + 1, DENSE_BLOCKS, block.place)
        block.mean = self._runner.submit(name, mean, priority)
        if not self._overlap:
            self._runner.wait(block.mean, name, "dense")
        for parameter, stretch in block.views(flat):
            parameter.grad = pending_grad(stretch, self._arrive)

    def _settle(self, block: Block) -> None:
        """Wait for a block's mean, and update it if that is due."""
        assert block.mean is not None and block.flat is not None
        mean = self._runner.wait(block.mean, block.name, "dense")
        if mean.data_ptr() != block.flat.data_ptr():
            block.flat.copy_(mean)
        settings, flat = block.settings, block.flat
        block.mean = block.flat = block.settings = None
        if settings is None:
            for parameter in block.parameters:
                arrived(parameter)
            return
        for parameter, stretch in block.views(flat):
            parameter.grad = stretch
        self._stepper.step(block.parameters, settings)
        for parameter in block.parameters:
            parameter.grad = None


def _divide(model: nn.Module, block_bytes: int) -> list[Block]:
    blocks: list[Block] = []
    seen: dict[int, Block] = {}
    for name, module in model.named_modules():
        own = [p for p in module.parameters(recurse=False) if p.requires_grad and not _shard(p)]
        if not own:
            continue
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ValueError(
                f"module '{name}' gives row-sparse gradients and is not partitioned: shard it, or"
                " make it sparse=False"
            )
        new = [p for p in own if id(p) not in seen]
        for kind in dict.fromkeys(p.dtype for p in new):
            group = [p for p in new if p.dtype == kind]
            last = blocks[-1] if blocks else None
            if last is None or last.parameters[0].dtype != kind or _bytes(last) >= block_bytes:
                last = Block(f"block.{name or 'model'}", len(blocks))
                blocks.append(last)
            last.parameters += group
            last.owners.append(module)
            seen.update({id(p): last for p in group})
        for block in {id(seen[id(p)]): seen[id(p)] for p in own}.values():
            if module not in block.owners:  # a parameter of several modules
                block.owners.append(module)
    return blocks


def _shard(parameter: Tensor) -> bool:
    return columns_of(parameter) is not None


def _bytes(block: Block) -> int:
    return sum(p.numel() * p.element_size() for p in block.parameters)


def _nothing() -> None:
    return None
