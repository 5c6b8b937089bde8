"""Optimizer states in a checkpoint that do not fit the model, or that training cannot have made."""

from __future__ import annotations

from shardviz.explain.cause import Cause


class OrphanState(Cause):
    """The checkpoint has optimizer state of a parameter that the model in it does not have.

    States are found by the parameter's name. After a rename, or with a model and an optimizer of different saves, the
    load finds no match and the parameter starts with an empty state.
    """

    kinds = ("foreign",)
    why = "The model and its optimizer were saved at different times, or the parameter was renamed"
    how = "save both from one state dict, with torch.distributed.checkpoint.state_dict.get_state_dict"


class MisshapenState(Cause):
    """An optimizer's state does not have the shape of its parameter.

    A moment has one element for each element of its parameter. A local shard that is saved as if it were the whole
    tensor has fewer.
    """

    kinds = ("wrong-shape",)
    why = "The state is of another parameter, or a shard of it was saved as the whole"
    how = "save both as DTensors"


class LostParamGroup(Cause):
    """Parameters have optimizer state, and no parameter group of the checkpoint names them.

    A save that takes the states and only some of the groups loses settings. After the load these parameters train with
    the settings that the optimizer was built with.
    """

    kinds = ("incomplete",)
    why = "A group was lost, with its learning rate and weight decay"
    how = "save all of optimizer.state_dict()['param_groups'], as get_state_dict does"


class PartialState(Cause):
    """A parameter lacks one of the states that similar parameters have.

    Adam needs both moments and the number of steps. A conversion that copies only tensors leaves out the step, and the
    optimizer then makes a new one that starts at 0.
    """

    kinds = ("incomplete",)
    why = "Its state was saved only in part, or was put together from another checkpoint"
    how = (
        "save the whole state of each parameter (torch.distributed.checkpoint.state_dict.get_state_dict); where it was "
        "saved whole, copy all files of the checkpoint again, or convert it again from them"
    )


class AbsentState(Cause):
    """A parameter group names a parameter of which the checkpoint has no optimizer state.

    Optimizers make the state of a parameter when it first has a gradient, so an unused parameter has none. If it was
    trained, a rank failed to save, and its moments restart from zero.
    """

    kinds = ("incomplete",)
    why = "A rank did not save its states, or the parameter never had a gradient"
    how = "load with care: the optimizer starts this parameter from nothing"


class NotFiniteState(Cause):
    """An optimizer's moment has nan or infinite values.

    One gradient that was not finite is enough: a running mean keeps it forever. The weights may still be finite when
    the checkpoint is written.
    """

    kinds = ("wrong-value",)
    why = "A gradient was nan or infinite, or memory was saved that nothing was written to"
    how = "resume from an earlier step; skip steps whose gradients are not finite"


class NegativeSquares(Cause):
    """A mean of squares has negative values.

    Squares cannot be negative, so these values are another tensor's: the first moment has the same shape and dtype, and
    nothing in a load notices the exchange.
    """

    kinds = ("wrong-value",)
    why = "First and second moments were exchanged, or another tensor was written here"
    how = "find out which tensor it is: `shardviz diff` with the step before; do not resume from this one"


class LostStepCounter(Cause):
    """The optimizer's step is 0 and its moments are not zero.

    Moments and step are separate entries of a state. Without the step, bias correction treats trained moments as if
    they were of the first step, and the updates after the load have a wrong size.
    """

    kinds = ("wrong-value",)
    why = "The counter was lost or set back, by a conversion or by a save that left it out"
    how = "write the counter of the step that the moments are of: Adam divides by 1 - beta**step"


class EmptyMoments(Cause):
    """All moments of the optimizer are zero, although it has taken steps.

    A save that does not gather the moments writes the zeros they were allocated with. The load succeeds, and training
    goes on as if the optimizer had never seen a gradient.
    """

    kinds = ("wrong-value",)
    why = "The moments were not gathered or not loaded before this save, or no parameter had a gradient"
    how = "save them as they are during training, with torch.distributed.checkpoint.state_dict.get_state_dict"


class MixedStepFiles(Cause):
    """The optimizer's steps in one file are different from those in all other files.

    All ranks take the same number of steps. A file that was left in the folder, or copied, from another save of the
    same job has the right shapes and the wrong step.
    """

    kinds = ("wrong-value",)
    why = "The file is of another save, or has a stage whose training began later"
    how = "lay the checkpoint beside another step's: `shardviz diff` shows whether all that is odd is in this file"
