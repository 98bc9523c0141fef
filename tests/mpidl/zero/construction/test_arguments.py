"""ZeroOptimizer's arguments: wrong ones raise the same error on every rank, and leave the model as it was."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn

import mpidl
from tests.mpidl.small_models import MODELS, fresh, largest_difference, sequences

pytestmark = pytest.mark.mpi
STAGES = (1, 2, 3)
SGD, AdamW = torch.optim.SGD, torch.optim.AdamW


class LimitedMemory(torch.optim.LBFGS):
    """One's own, of a class that cannot be sharded."""


def linear() -> nn.Module:
    return nn.Linear(3, 3)


class Counting(torch.optim.Optimizer):
    """Counts its steps in its groups, as schedule-free ones do."""

    def __init__(self, params: list, lr: float) -> None:
        super().__init__(params, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(self.change(p.grad), alpha=group["lr"] / group["k"])

    def change(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Clipping(Counting):
    """Looks at all gradients of a group."""

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            torch.nn.utils.clip_grad_norm_(group["params"], 0.1)
        super().step()


class Failing(Counting):
    """Tells nothing in a trial, so that it needs whole parameters."""

    def change(self, gradient: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("deliberate")


def sets(model: nn.Module) -> list[dict]:
    return [{"params": set(model.parameters())}]


def listed_twice(model: nn.Module) -> list[nn.Parameter]:
    return [*model.parameters(), model.bias]


def failing(_: object) -> bool:
    raise KeyError("deliberate")


# What is given besides stage=3 and lr=1.0, and the message. "params" may be a function of the model.
WRONG = {
    "no stage": ({"stage": None}, r"stage: got none; needs 1 to cut .*: ZeroOptimizer\(model, SGD, stage=3, ...\)"),
    "a stage of 4": ({"stage": 4}, "stage: got 4; needs 1, 2 or 3"),
    "a stage that is no int": ({"stage": 2.0}, "stage: got 2.0; needs 1, 2 or 3"),
    "a stage that is a list": ({"stage": [3]}, r"stage: got \[3\]; needs 1, 2 or 3"),
    "LBFGS": ({"optimizer_class": torch.optim.LBFGS}, "LBFGS cannot be sharded: it works on the whole"),
    "a kind of LBFGS": (
        {"optimizer_class": LimitedMemory},
        "LimitedMemory, a kind of LBFGS, cannot be sharded: it works on the whole",
    ),
    "a class of one's own that looks at several parameters": (
        {"optimizer_class": Clipping},
        "Clipping cannot be sharded: a step on a parameter depends on the other parameters",
    ),
    "one that fails in the trial, offloaded": (
        {"optimizer_class": Failing, "offload": "cpu"},
        "offload: a step of Failing needs whole parameters",
    ),
    "one that counts in its groups, offloaded": (
        {"optimizer_class": Counting, "offload": "cpu"},
        "offload: Counting changes k of its groups in a step",
    ),
    "no optimizer at all": (
        {"optimizer_class": None},
        r"optimizer_class: got none; .*\(model, torch.optim.AdamW, stage",
    ),
    "no optimizer": ({"optimizer_class": nn.Linear}, "optimizer_class: got .*; needs a torch.optim class"),
    "foreign parameters": ({"params": [{"params": [nn.Parameter(torch.ones(2))]}]}, "no parameter of the model"),
    "a foreign parameter": ({"params": [nn.Parameter(torch.ones(2))]}, "no parameter of the model"),
    "a parameter left out": ({"params": []}, "leaves out weight, bias"),
    "a parameter twice": ({"params": listed_twice}, "params: bias is given twice"),
    "a group without params": ({"params": [{"lr": 0.1}]}, "params: group 0: has no 'params', only 'lr'"),
    "a set in a group": ({"params": sets}, "params: group 0: got set; needs a list of parameters in order"),
    "a set": ({"params": lambda model: set(model.parameters())}, "params: got set; needs a list"),
    "a dictionary": ({"params": lambda model: dict(model.named_parameters())}, "params: got dict; needs a list"),
    "names alone": (
        {"params": lambda model: [name for name, _ in model.named_parameters()]},
        "params: holds something of type str; needs parameters",
    ),
    "a tensor and a group": (
        {"params": lambda model: [{"params": [model.weight]}, model.bias]},
        "params: group 1: got Parameter; needs a dictionary",
    ),
    "no params": ({"params": 3}, "params: got int; needs a list"),
    "no bucket": ({"bucket_cap_mb": -1}, "bucket_cap_mb: got -1"),
    "a bucket of no size": ({"bucket_cap_mb": "x"}, "bucket_cap_mb: got 'x'; needs a size"),
    "units that are no classes": ({"units": [3]}, "needs module classes"),
    "units that are a number": ({"units": 3}, "units: got 3; needs module classes"),
    "units that are a module": ({"units": nn.Linear(1, 1)}, "units: got a module, of class Linear; needs module"),
    "units that are a name": ({"units": "Linear"}, "units: got 'Linear'; needs module classes"),
    "weights that are a number": ({"weights": 3}, "weights: got 3; needs a path"),
    "weights that are not there": ({"weights": "/nowhere"}, "weights: "),
    "init_fn that is none": ({"init_fn": 3}, "init_fn: got 3; needs a function"),
    "a flag that is none": ({"share_in_node": "yes"}, "share_in_node: got 'yes'; needs True or False"),
    "a shard_group that is none": ({"shard_group": 3}, "shard_group: got 3; needs 'node'"),
    "an offload that is none": ({"offload": "tape"}, "offload: got 'tape'; needs None"),
    "a directory that is not there": ({"offload": mpidl.Offload("disk", path="/nowhere")}, "does not exist"),
    "a precision that is none": ({"precision": "bf16"}, "precision: got 'bf16'; needs an mpidl.Precision"),
    "differentiable": ({"optimizer_class": AdamW, "differentiable": True}, "differentiable: got True"),
    "differentiable in a group": (
        {"params": lambda model: [{"params": list(model.parameters()), "differentiable": True}]},
        "differentiable: got True",
    ),
    "a group that the class refuses": (
        {"optimizer_class": mpidl.optim.LARS, "params": lambda model: [{"params": model.parameters(), "lr": -1.0}]},
        "lr: got -1.0; needs a number of at least 0",
    ),
    # The class's own errors on the rank itself; what others are told begins with their names.
    "a wrong rate": ({"lr": -1.0}, "Invalid learning rate: -1.0"),
    "an unknown setting": ({"nonsense": 1}, "unexpected keyword argument 'nonsense'"),
    "an unknown setting of None": ({"nonsense": None}, "unexpected keyword argument 'nonsense'"),
    "a rule that fails": ({"units": failing}, "deliberate"),
}
OWN = {"a wrong rate": ValueError, "a rule that fails": KeyError}
OWN |= dict.fromkeys(["an unknown setting", "an unknown setting of None"], TypeError)


def build(model: nn.Module, comm, **given) -> mpidl.ZeroOptimizer:
    settings = {"optimizer_class": SGD, "stage": 3, "lr": 1.0, **given}
    if callable(settings.get("params")):
        settings["params"] = settings["params"](model)
    return mpidl.ZeroOptimizer(model, process_group=comm, **settings)


@pytest.mark.mpi
@pytest.mark.parametrize("given", [{}, {"stage": 3}, {"optimizer_class": SGD}])
def test_parameters_in_place_of_the_model_are_told_what_to_write(comm, given: dict) -> None:
    """Torch's optimizers take them; with and without the other arguments."""
    model = nn.Linear(2, 2)
    message = r"model: got generator; needs a torch.nn.Module: ZeroOptimizer\(model, torch.optim.\w+, stage=3, ...\)"
    with pytest.raises(mpidl.ConfigurationError, match=message):
        mpidl.ZeroOptimizer(model.parameters(), lr=1.0, process_group=comm, **given)  # type: ignore[arg-type]


def picture(model: nn.Module) -> dict:
    """Copies all that a refused call must leave unchanged in a model and its modules."""
    found: dict = {"parameters": [(id(p), type(p), p.data_ptr(), dict(p.__dict__)) for p in model.parameters()]}
    for name, module in model.named_modules():
        hooks = {k: dict(v) for k, v in module.__dict__.items() if k.endswith("_hooks")}
        found[name] = (sorted(module.__dict__), hooks, type(module))
    found["values"] = [p.detach().clone().tolist() for p in model.parameters()]
    return found


def check_trains(model: nn.Module, optimizer: mpidl.ZeroOptimizer, expected: nn.Module, root: bool) -> None:
    """A step of SGD at a rate of 1 on ones: as plain torch makes it of rank 0's values."""
    x = torch.ones(2, 3)
    for m, o in ((model, optimizer), (expected, SGD(expected.parameters(), lr=1.0))):
        m(x).square().sum().backward()
        o.step()
    weights = optimizer.model_state_dict()
    if root:
        assert largest_difference(dict(expected.state_dict()), weights) < 1e-4


@pytest.mark.parametrize("on", ["every rank", "the last rank"])
@pytest.mark.parametrize("what", WRONG)
def test_wrong_use_is_refused_on_every_rank_and_changes_nothing(comm, what: str, on: str) -> None:
    given, message = WRONG[what]
    torch.manual_seed(comm.rank)  # rank 0's values must not come to the others either
    model = linear()
    before = picture(model)
    wrong = on == "every rank" or comm.rank == comm.size - 1
    own = OWN.get(what, mpidl.ConfigurationError) if wrong else mpidl.ConfigurationError
    with pytest.raises((own, mpidl.ModelMismatch) if on == "the last rank" else own) as caught:
        build(model, comm, **(given if wrong else {}))
    agreed = isinstance(caught.value, mpidl.ModelMismatch)
    if not agreed:
        assert re.search(message, str(caught.value))
    everyone = torch.tensor([float(agreed)])
    comm.all_reduce(everyone)
    assert everyone.item() in (0, comm.size)
    assert picture(model) == before
    values = [p.detach().clone() for p in model.parameters()]
    for value in values:
        comm.broadcast(value)
    expected = linear()
    with torch.no_grad():
        for p, value in zip(expected.parameters(), values, strict=True):
            p.copy_(value)
    check_trains(model, build(model, comm), expected, comm.rank == 0)
    at_once = linear()
    optimizer = build(at_once, comm)
    assert len(model._forward_pre_hooks) == len(optimizer.model._forward_pre_hooks)


def test_a_lazy_module_is_refused_until_it_has_a_shape(comm) -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(mpidl.ConfigurationError, match=r"model: 0\.weight has no shape"):
        build(model, comm)
    model(torch.ones(2, 3))
    build(model, comm)


def test_what_is_no_model_or_no_class_is_named_shortly(comm) -> None:
    with pytest.raises(mpidl.ConfigurationError, match="no parameter that requires a gradient"):
        build(nn.ReLU(), comm)
    model = linear()
    with pytest.raises(mpidl.ConfigurationError, match=r"got generator; needs a torch\.nn\.Module"):
        build(model.parameters(), comm)
    with pytest.raises(mpidl.ConfigurationError, match=r"instance of SGD; needs .*class") as caught:
        build(model, comm, optimizer_class=SGD(model.parameters(), lr=1.0))
    assert len(str(caught.value)) < 120
    with pytest.raises(mpidl.ConfigurationError, match="process_group: got str; needs a"):
        mpidl.ZeroOptimizer(model, SGD, 3, process_group="x", lr=1.0)


@pytest.mark.parametrize(
    "form",
    [
        lambda model: [*model.parameters()],
        lambda model: tuple(model.parameters()),
        lambda model: model.parameters(),
        lambda model: model.named_parameters(),
        lambda model: [{"params": model.named_parameters()}],
    ],
    ids=["list", "tuple", "iterator", "names", "names in a group"],
)
def test_parameters_alone_are_one_group_as_torch_has_it(comm, form) -> None:
    model = linear()
    model.bias.requires_grad_(False)
    optimizer = build(model, comm, params=form(model))
    assert [group["params"] for group in optimizer.param_groups] == [[model.weight]]
    assert optimizer.param_groups[0]["lr"] == 1.0


UNLIKE = {
    "stage": ({"stage": 1}, {"stage": 3}, "rank 0 has stage=1, rank 1 has stage=3"),
    "units": ({}, {"units": lambda m: isinstance(m, nn.LayerNorm)}, "units: rank 0 has names="),
    "lr": ({}, {"lr": 0.5}, r"rank 0 has lr=1.0, rank 1 has lr=0.5"),
    "lr in a tensor": ({"lr": torch.tensor(1.0)}, {"lr": torch.tensor(0.5)}, r"rank 0 has lr=1.0, rank 1 has lr=0.5"),
    "betas in a list": (
        {"optimizer_class": AdamW, "betas": [0.9, 0.99]},
        {"optimizer_class": AdamW, "betas": [0.9, 0.9]},
        "betas",
    ),
    "a setting that one rank has": ({}, {"momentum": 0.5}, r"momentum=\(nothing\), rank 1"),
    "share_in_node": ({}, {"share_in_node": False}, "share_in_node"),
    "groups": ({}, "a group of biases", "params: rank 0 has groups=1, rank 1 has groups=2"),
    "order": ({}, {"params": lambda model: [*model.parameters()][::-1]}, "params: rank 0 has parameters of group 0="),
}


@pytest.mark.parametrize("what", UNLIKE)
def test_what_differs_over_the_ranks_is_refused_on_all_of_them(comm, what: str) -> None:
    if comm.size == 1:
        return
    first, others, message = UNLIKE[what]
    model = fresh(MODELS["gpt2"])
    settings = others if comm.rank == 1 else first
    if settings == "a group of biases":
        biases = [p for p in model.parameters() if p.dim() == 1]
        rest = [p for p in model.parameters() if p.dim() > 1]
        settings = {"params": [{"params": biases, "weight_decay": 0.0}, {"params": rest}]}
    with pytest.raises(mpidl.ModelMismatch, match=message):
        build(model, comm, **settings)


@pytest.mark.parametrize("rate", [float, torch.tensor], ids=["number", "tensor"])
@pytest.mark.parametrize("stage", STAGES)
def test_rates_that_come_to_differ_are_refused_at_the_step_and_change_nothing(comm, stage: int, rate) -> None:
    """A schedule makes them that goes by each rank's own loss; a shard of a weight would go faster than the rest."""
    model = linear()
    expected = copy.deepcopy(model)
    for value in expected.parameters():
        comm.broadcast(value.data)
    optimizer = build(model, comm, stage=stage, lr=rate(1.0), params=[{"params": [p]} for p in model.parameters()])
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for loss in (1.0, 2.0 if comm.rank == 1 else 1.0 - 0.5):
        schedule.step(loss)
    model(torch.ones(2, 3)).square().sum().backward()
    if comm.size > 1:
        with pytest.raises(mpidl.ModelMismatch, match=r"step: rank 0 .*lr=1\.0, rank 1 .*lr=0\.\d"):
            optimizer.step()
    for group in optimizer.param_groups:
        group["lr"] = rate(1.0)
        group["seconds"] = float(comm.rank)  # a note of another library's, which is no setting
    optimizer.zero_grad()
    check_trains(model, optimizer, expected, comm.rank == 0)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("clip", ["clip_grad_norm_", "clip_grad_value_"])
def test_clipping_that_differs_is_refused_at_the_step_and_changes_nothing(comm, clip: str, stage: int) -> None:
    model = linear()
    expected = copy.deepcopy(model)
    for value in expected.parameters():
        comm.broadcast(value.data)
    optimizer = build(model, comm, stage=stage)
    model(torch.ones(2, 3)).square().sum().backward()
    getattr(optimizer, clip)(2.0 if comm.rank == 1 else 1.0)
    if comm.size > 1:
        with pytest.raises(mpidl.ModelMismatch, match=r"step: rank 0 .*clipping .*1\.0.*, rank 1 .*2\.0"):
            optimizer.step()
    optimizer.zero_grad()
    check_trains(model, optimizer, expected, comm.rank == 0)


def test_a_model_is_wrapped_once(comm) -> None:
    model = linear()
    optimizer = build(model, comm, stage=1)
    with pytest.raises(mpidl.ConfigurationError, match="trains it already"):
        build(model, comm, stage=1)
    with pytest.raises(mpidl.ConfigurationError, match=r"trains it already, .*: 0\.weight"):
        build(nn.Sequential(model, nn.Linear(3, 3)), comm)
    with pytest.raises(mpidl.ConfigurationError, match="add_param_group"):
        optimizer.add_param_group({"params": []})


@pytest.mark.parametrize(
    ("added", "message"),
    [
        ({"lr": 1.0}, "has no 'params'"),
        ([1], "needs a dictionary"),
        ("a set", "got set"),
        ("differentiable", "differentiable: got True"),
    ],
)
def test_groups_added_later_are_refused_likewise(comm, added, message: str) -> None:
    model = linear()
    model.bias.requires_grad_(False)
    optimizer = build(model, comm)
    model.bias.requires_grad_(True)
    named = {"a set": {"params": {model.bias}}, "differentiable": {"params": model.bias, "differentiable": True}}
    with pytest.raises(mpidl.ConfigurationError, match=message):
        optimizer.add_param_group(named[added] if isinstance(added, str) else added)
    optimizer.add_param_group({"params": model.bias})
    assert len(optimizer.param_groups) == 2


def test_groups_of_ranks_that_differ_are_refused_before_anything_waits(comm) -> None:
    """One rank gives all ranks, the others ones of their own: an operation on them would never end."""
    if comm.size == 1:
        return
    alone = comm.split(comm.rank)
    with pytest.raises(mpidl.ConfigurationError, match="shard_group: got groups of unlike sizes"):
        build(linear(), comm, shard_group=comm if comm.rank == 1 else alone)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("function", ["clip_grad_norm_", "clip_grad_value_"])
def test_clipping_without_the_optimizer_is_the_same(comm, function: str, stage: int) -> None:
    clip = getattr(mpidl, function)
    for number in range(5):
        model = linear()
        optimizer = build(model, comm, stage=stage)
        model(torch.ones(2, 3)).sum().backward()
        clip([model, model.weight, list(model.parameters()), model.parameters(), nn.Sequential(model)][number], 0.1)
        clipped = {p: p.grad.full_tensor() for p in model.parameters()}
        largest = clipped[model.weight] if number == 1 else torch.cat([g.flatten() for g in clipped.values()])
        assert float(largest.norm() if function == "clip_grad_norm_" else largest.abs().max()) <= 0.1 + 1e-6
        optimizer.step()


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("stage", STAGES)
def test_what_an_exception_inside_gathered_leaves_changed_is_changed_in_masters_too(comm, stage: int, share) -> None:
    precision = mpidl.Precision(torch.bfloat16)
    model = linear()
    optimizer = build(model, comm, stage=stage, precision=precision, share_in_node=share, lr=0.0)
    with pytest.raises(KeyError, match="deliberate"), optimizer.gathered():
        failing(model.weight.fill_(3.0))
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()  # of masters, at a rate of 0
    with optimizer.gathered(writable=False):
        assert (model.weight == 3.0).all()
    masters, rounded = optimizer.model_state_dict(), copy.deepcopy(optimizer.model_state_dict(masters=False))
    if comm.rank == 0:
        assert (masters["weight"] == 3.0).all()
        assert (rounded["weight"] == 3.0).all()
        assert torch.equal(masters["bias"].bfloat16(), rounded["bias"])


def test_refused_units_leave_a_larger_model_as_it_was(comm) -> None:
    model = fresh(MODELS["gpt2"], comm.rank)
    before = picture(model)
    with pytest.raises(mpidl.ConfigurationError, match="units"):
        build(model, comm, offload="disk", precision=mpidl.Precision(torch.bfloat16), units=[3])
    assert picture(model) == before
    optimizer = build(model, comm, offload="disk", precision=mpidl.Precision(torch.bfloat16))
    model(*sequences(0, 0)).backward()
    optimizer.step()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_an_optimizer_notes_in_its_groups_stays(comm, stage: int) -> None:
    torch.manual_seed(0)
    plain, model = nn.Linear(3, 3), nn.Linear(3, 3)
    model.load_state_dict(plain.state_dict())
    judge = Counting(list(plain.parameters()), lr=0.5)
    optimizer = build(model, comm, optimizer_class=Counting, stage=stage, lr=0.5)
    for number in range(3):
        for m, o in ((plain, judge), (model, optimizer)):
            m(torch.full((1, 3), number + 1.0)).square().sum().backward()
            o.step()
            o.zero_grad()
    assert [group["k"] for group in optimizer.param_groups] == [3]
    weights = optimizer.model_state_dict()
    if comm.rank == 0:
        torch.testing.assert_close(weights["weight"], plain.weight.detach())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_gradient_that_a_program_has_set_is_refused_on_every_rank(comm, stage: int) -> None:
    model = nn.Linear(3, 3)
    optimizer = build(model, comm, stage=stage)
    if comm.rank == comm.size - 1:
        model.bias.grad = torch.ones(3)
    with pytest.raises(mpidl.TrainingError, match=r"bias: its \.grad was set"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.step()


@pytest.mark.parametrize("name", ["post-local", "dion", "1-bit"])
def test_hooks_for_ddp_alone_are_refused(comm, name: str) -> None:
    model = torch.nn.Linear(3, 2, bias=False)
    optimizer = mpidl.ZeroOptimizer(model, SGD, 1, process_group=comm, lr=0.1)
    state, hook = {
        "post-local": lambda: (mpidl.optim.PostLocalSGDState(comm, 0), mpidl.optim.post_local_sgd_hook),
        "dion": lambda: (
            mpidl.optim.DionState(mpidl.optim.Dion(torch.nn.Linear(3, 2, bias=False).parameters(), process_group=comm)),
            mpidl.optim.dion_hook,
        ),
        "1-bit": lambda: (
            mpidl.optim.OneBitAdam(torch.nn.Linear(3, 2).parameters(), freeze_step=1, process_group=comm),
            mpidl.optim.one_bit_hook,
        ),
    }[name]()
    with pytest.raises(mpidl.ConfigurationError, match=r"register_comm_hook: .* leaves gradients on ranks as they are"):
        optimizer.register_comm_hook(state, hook)
    assert optimizer.comm_hook is None
