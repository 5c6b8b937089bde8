"""What a load must bring besides tensors, and must not break: states, steps, settings, ties, parameters' identity."""

from __future__ import annotations

from shardviz.explain.cause import Cause

TO_LOAD = (
    "load the optimizer's state by parameter, with torch.distributed.checkpoint.state_dict.set_optimizer_state_dict, "
    "or in place with the optimizer's own load_state_dict"
)


class StateLostInLoad(Cause):
    """The optimizer lacks a state after a load that it had when it was saved.

    Optimizers make missing states at the next step, from zero. Training goes on, with a bump in the loss at most.
    """

    kinds = ("incomplete",)
    why = (
        "The optimizer's state was not loaded, or what was loaded has none of this parameter: saved by number, under "
        "another name, or of another stage"
    )
    how = TO_LOAD


class StepLostInLoad(Cause):
    """The optimizer's number of steps is not the saved one after a load.

    The step is a number beside the moments. A save of tensors alone leaves it out.
    """

    kinds = ("write-not-applied",)
    why = "The step is not among what was saved, or the load left the one that was there: bias correction starts again"
    how = "save the whole state of each parameter, with its numbers, and load all of it"


class SettingLostInLoad(Cause):
    """A hyperparameter of the optimizer is not the saved one after a load.

    The learning rate and the like are in param_groups, which a save of the states alone leaves out.
    """

    kinds = ("write-not-applied",)
    why = "The groups' hyperparameters were not saved, or the load kept those that the optimizer was built with"
    how = "save and load param_groups beside the state; if the new run is to set its own, leave 'setting' out of `of`"


class TieLostInLoad(Cause):
    """Two names shared storage before a load and do not afterwards.

    assign=True and setattr replace a parameter under one of its names. Both have the same values until the next step.
    """

    kinds = ("untied",)
    why = "The load put a new tensor in the place of one of them (assign=True, setattr): they drift apart from now on"
    how = "load in place, or tie them again after the load, before the optimizer is made"


class ReplacedParameters(Cause):
    """The optimizer steps tensors that are not the model's any more.

    It keeps the parameters that it was built with. After a load that replaces them it updates the old ones, and the
    model never changes.
    """

    kinds = ("wrong-value",)
    why = (
        "The load put new parameters into the model (assign=True, setattr), and the optimizer still steps the old ones"
    )
    how = "load the model before the optimizer is made, or load in place: copy_ into the parameters that are there"


class ThawedByLoad(Cause):
    """A parameter is trained after a load and was frozen before, or the other way around.

    A new nn.Parameter has requires_grad=True, whatever it replaces.
    """

    kinds = ("wrong-value",)
    why = "The load put a new parameter in its place, or set requires_grad: a new nn.Parameter is always trained"
    how = "load in place, or set requires_grad again after the load, before the optimizer is made"


class NameLostInLoad(Cause):
    """The model lacks a tensor after a load that it had before.

    The load made a new model, or replaced a module, and that one has other names.
    """

    kinds = ("incomplete",)
    why = "The load replaced the model by one that lacks it, or renamed it"
    how = "load into a model with the same modules"
