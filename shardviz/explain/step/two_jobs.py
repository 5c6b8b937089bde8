"""Causes of a difference between two jobs: in their weights, settings, earlier steps or dtypes."""

from __future__ import annotations

from typing import Literal

from shardviz.explain.cause import Cause

Gradients = Literal["", "equal", "other"]


class DifferentWeights(Cause):
    """Two runs do not start from the same weights.

    Everything that they compute differs from the first module on, so their steps cannot be compared.

    Attributes:
        of_jobs: Whether they are jobs of several ranks.
        steps: How many optimizer steps they made before the traced one.
    """

    of_jobs: bool = False
    steps: int = 0
    why = (
        (
            "The {of_jobs:?jobs|runs} drew their weights with different seeds or in a different order{of_jobs:?, for "
            "example after sharding}"
        ),
        "The {of_jobs:?jobs|runs} loaded different checkpoints",
        (
            "{steps:?{steps:1?The optimizer step|The {steps} optimizer steps} before the traced one moved the weights "
            "differently|}"
        ),
    )
    how = (
        "start both {of_jobs:?jobs, whose steps were not compared,|runs} from the same weights",
        "{steps:?trace the first step (--trace-step 1)|}",
    )


class EarlierStepsDiffer(Cause):
    """Weights of two jobs differ a little before the traced step: an earlier step differs.

    Matrices of jobs with other seeds or checkpoints have nothing in common. These are equal or close, so that a step
    before the traced one differs: by its rows, its gradients, or by what the optimizer does with them.

    Attributes:
        steps: How many optimizer steps the jobs made before the traced one.
        rate: The learning rate of both at the traced step; empty if it is not known, or differs by parameter.
        gradients: What the moments that both optimizers keep say of the gradients; empty if nothing certain.
    """

    steps: int
    rate: str = ""
    gradients: Gradients = ""
    why = (
        "{steps:1?The step|The {steps} steps} before the traced one changed the weights differently in the two jobs: "
        "by {gradients:other?other gradients, as the optimizers' moments show|{gradients:equal?another learning rate "
        "in those steps, or by code that changes weights between two steps: the moments that the optimizers keep are "
        "equal|other gradients, by another learning rate{rate:? in those steps (in the traced one it is {rate} in "
        "both)|, for example if each process steps the scheduler}, or by code that changes weights between two steps, "
        "such as pruning}}"
    )
    how = (
        "trace the first step (--trace-step 1){gradients:other?|; if the jobs agree there, compare the learning rates "
        "and the other settings of their optimizers}"
    )


class OtherLaterOutputs(Cause):
    """In a later step one of two jobs makes other outputs of the same rows.

    Both were equal until then. What the step that is traced does not show comes later: gradients that are not zeroed
    are added to those of the next step, and a buffer, an average or a weight that is written beside the optimizer is
    read in the next forward.

    Attributes:
        before: The last step whose outputs agree.
        step: The step whose outputs differ.
        is_traced: Whether `before` is the traced step, whose update agrees, too.
    """

    before: int
    step: int
    is_traced: bool = False
    why = (
        (
            "{is_traced:?|Step {before} moves weights differently: by its loss, by gradients that are not zeroed or "
            "reduced in every step, or by the optimizer}"
        ),
        "Something besides the optimizer changed a weight or a buffer before step {step}",
        "The model depends on a number that differs between the jobs, such as a count of steps",
    )
    how = (
        "{is_traced:?|trace that step in both jobs: --trace-step {before}}",
        "trace the step itself: --trace-step {step}",
        "give both jobs the same number",
    )


class OtherModuleSettings(Cause):
    """A module goes wrong that two jobs run with different settings.

    Sizes that differ by a number of ranks are left out, as those of a rank's part do. A module may have other settings
    on purpose because it is sharded.

    Attributes:
        settings: Each with its values in both jobs.
    """

    module: str
    settings: tuple[str, ...]
    why = (
        "The jobs run {module:?{module:called}|the model} with different settings: {settings:3}",
        "The settings are meant to differ, and the module goes wrong in its own code or in a collective",
    )
    how = (
        "give it the same settings in both jobs, and call .train() or .eval() alike",
        "look at {module:?{module:called}|the model} first",
    )


class GradientsNotZeroed(Cause):
    """Backward adds to the gradients that the step before left; in the other job none are there.

    Each step then goes in the direction of the sum of all gradients so far. The first step is right.

    Attributes:
        count: How many parameters had a gradient as backward began.
        step: The later step; 0 if it is the traced one.
    """

    count: int
    step: int = 0
    why = (
        "As backward{step:? of step {step}|} begins, {count:,} {count:1?parameter still has|parameters "
        "still have} the gradient of the step before"
    )
    how = "call optimizer.zero_grad() in every step, after optimizer.step() and before backward"


class DifferentSettings(Cause):
    """The optimizers of two jobs step with different settings, such as a learning rate.

    A schedule whose length is counted in a rank's own batches is longer on more ranks, and a scheduler that every
    process steps runs ahead. A learning rate that is multiplied by the number of ranks differs from the first step on.
    Parameter groups that are chosen by a parameter's shape or name differ once it is sharded or wrapped.

    Attributes:
        settings: Each setting with its number in either job.
        step: The step at which they have it; 0 if that is the traced one.
        is_resumed: Whether one of them made fewer steps before, and so goes on from a checkpoint.
        on: Which ranks have others, if the rest of their job has those of the other job; else empty.
    """

    settings: tuple[str, ...]
    step: int = 0
    is_resumed: bool = False
    on: str = ""
    why = (
        "The optimizers of the two jobs step with different settings at {step:?step {step}|the traced step}{on:?, on "
        "{on} alone}: {settings:3}"
    )
    how = (
        "{on:?look for what sets these numbers on some ranks only, such as load_state_dict() of a scheduler or an "
        "optimizer under `if rank == 0`, and let every rank run it|{is_resumed:?one of the jobs goes on from a "
        "checkpoint: save the scheduler's state_dict() and the optimizer's, and load them after both were made|make "
        "them equal: count a schedule's length and its steps in batches of all ranks, and choose parameter groups "
        "before the model is sharded; if weights still differ then, trace the first step (--trace-step 1)}}"
    )


class NoStepOnRanks(Cause, kind="write-not-applied"):
    """Some ranks run the model, and never call an optimizer's step.

    The call stands under a condition that is meant for logging or saving, such as `if rank == 0`. These ranks keep the
    weights that they began with, and send gradients of them to the others.

    Attributes:
        ranks: The ranks.
    """

    ranks: tuple[int, ...]
    why = "A condition on the rank, or on the rank's own numbers, keeps {ranks:ranks} from optimizer.step()"
    how = "call optimizer.step() on every rank, and leave only logging and saving under such a condition"


class StepWithoutEffect(Cause, kind="write-not-applied"):
    """The optimizer has a weight among its parameters, and its step leaves the weight as it was.

    A GradScaler skips the step of an optimizer whose gradients overflowed, and a learning rate of 0 moves nothing. An
    optimizer that deals its weights to ranks in rounds leaves the last ones out if its loop ends with the last full
    round. Code behind the step may also write the old value back.

    Attributes:
        beside: A weight with the same settings that is stepped; empty if there is none.
    """

    beside: str = ""
    why = (
        "{beside:?The optimizer steps {beside}, which has the same settings, and passes over this weight, as a loop "
        "over full rounds of ranks does with the weights that are left"
        "|The step of this weight is skipped, as a GradScaler does after an overflow, or its learning rate is 0}",
        "Code behind optimizer.step() writes the old value back",
    )
    how = (
        "{beside:?make the loop in the optimizer's step go over all its weights, with an incomplete last round"
        "|compare the loss scale and the learning rates in param_groups of both jobs}",
        "look for what copies into this weight after the step",
    )


class OtherPace(Cause):
    """The learning rate goes through the other job's schedule faster, or slower.

    DeepSpeed's `engine.step()` steps the scheduler that the engine was given, and accelerate's prepared scheduler steps
    once for each process. A call of `scheduler.step()` in the loop is then too much. A scheduler that a library steps
    only with the optimizer moves less often than a call in each micro-batch. A schedule whose length is counted in
    batches of one rank, or of all, gives the same rates.

    Attributes:
        settings: Each setting with its number in either job, at the step.
        times: How many times as fast it is.
        is_slower: Whether it is as many times slower.
        step: The first step at which the settings differ.
    """

    settings: tuple[str, ...]
    times: int
    is_slower: bool
    step: int
    why = (
        "The learning rate goes through the other job's schedule {times} times as {is_slower:?slowly|fast}, from step "
        "{step} on: {settings:3}. {is_slower:?The scheduler is stepped once in {times} steps|The scheduler is stepped "
        "{times} times a step}, or its length is counted in other batches"
    )
    how = (
        "{is_slower:?call scheduler.step() once after each step of the optimizer|step the scheduler once a step: "
        "leave out scheduler.step() if DeepSpeed's engine.step() does it; accelerate's prepared scheduler steps once "
        "for each process}; or count the schedule's length in steps of the optimizer"
    )


class OtherStepLength(Cause):
    """The optimizer of one job steps after more or fewer rows than that of the other.

    A loop that accumulates gradients has to leave out the optimizer's step but after the last micro-batch. accelerate
    does so in optimizers that were given to `prepare`. A batch size that is meant for all ranks, and given to each,
    makes steps longer.

    Attributes:
        job: The job that steps otherwise than one process.
        rows: After how many rows it steps.
        wanted: After how many one process does.
        times: How many times more or fewer that is.
        is_apart: Whether the last backward ran under `no_sync()`, so that ranks' gradients differ.
    """

    job: str
    rows: int
    wanted: int
    times: int
    is_apart: bool = False
    why = (
        "The optimizer of {job} steps after {rows} rows, and that of the other job after {wanted}{is_apart:?. It steps "
        "while gradients are accumulated: the last backward ran under no_sync(), so that they are not yet averaged|}"
    )
    how = (
        "{is_apart:?step only after the last of {times} micro-batches. accelerate: give the optimizer to "
        "accelerator.prepare(), which leaves out its steps before|{is_longer:?divide the batch size by {times}, or "
        "accumulate as many fewer micro-batches|accumulate {times} times as many micro-batches before the "
        "optimizer's step, or give each rank {times} times as many rows}}"
    )

    @property
    def is_longer(self) -> bool:
        """Whether it steps after more rows."""
        return self.rows > self.wanted


class DifferentClips(Cause):
    """Two jobs clip equal gradients to different norms, or only one of them clips.

    A library that keeps gradients to itself, as DeepSpeed does, leaves `.grad` empty: `clip_grad_norm_` then finds a
    norm of 0 and clips nothing, without a warning. Its own configuration has the limit, often with a default.

    Attributes:
        limits: The limit of either job, in words.
        unmet: The limit of a call that found no gradients; empty if each found some.
        is_seen: Whether calls that clip were seen; else only the other job's norm, a round number, shows it.
    """

    limits: tuple[str, ...]
    unmet: str = ""
    is_seen: bool = True
    why = (
        "{is_seen:?The jobs clip equal gradients to different norms|The norm of all gradients is a round number in the "
        "other job, as clipping leaves it, and is different in this one}: {limits:2}{unmet:?. clip_grad_norm_ with a "
        "limit of {unmet} finds a norm of 0: the weights have no .grad there, and it clips nothing|}"
    )
    how = (
        "{unmet:?give the limit to the library that keeps the gradients (DeepSpeed: gradient_clipping in the "
        "config)|clip to the same norm in both jobs; a library may have a limit of its own in its configuration}"
    )


class LostStates(Cause):
    """One of two jobs begins the traced step without states of its optimizer.

    A job that goes on from a checkpoint of the weights alone has the same loss and gradients as the one that was never
    interrupted. Momenta begin at zero again, and Adam's first steps are as large as they can be.

    Attributes:
        without: The job that has none.
        other: The job that has some.
        states: What it has: `exp_avg, exp_avg_sq`.
        steps: After how many steps both have states, in words; empty if one of them has none.
        is_of_ranks: Whether some ranks of one job have none, and another rank has all.
    """

    without: str
    other: str
    states: str = ""
    steps: str = ""
    is_of_ranks: bool = False
    why = (
        "{steps:?The optimizers of the two jobs have made different numbers of steps: {steps}|The optimizer of "
        "{without} begins the step without {states}, which that of {other} has: {is_of_ranks:?it did not load the "
        "optimizer's state, nor its settings|the checkpoint that it goes on from has no states, or the job loads only "
        "the weights}}"
    )
    how = (
        "{is_of_ranks:?load the optimizer's state_dict() on every rank|{steps:?save and load the optimizer's "
        "state_dict() with the weights, at the same step|save the optimizer's state_dict() with the weights, and load "
        "it after the optimizer was made}; trace the same step of both}"
    )


class DifferentStates(Cause):
    """The optimizers of two jobs begin a step with equal weights and different states.

    States are no part of the model: whatever they are, its loss and its gradients are right, and only the next weights
    are not. A load of states of another step or another part has the right shapes.

    Attributes:
        are_loaded: Whether no optimizer made a step before the traced one, so that all states were loaded or made by
            hand.
    """

    are_loaded: bool
    why = (
        "{are_loaded:?The states that the two jobs load are not of the same step, or one job changes them after the "
        "load|}",
        "{are_loaded:?|The optimizers of the two jobs were given different gradients in an earlier step}",
        "{are_loaded:?|One job loads, changes or drops states between its steps}",
    )
    how = (
        "load weights and states from one checkpoint, with torch.distributed.checkpoint.state_dict.set_state_dict",
        "trace an earlier step of both (--trace-step)",
        "compare what both do with the optimizer between two steps",
    )


class OtherChangesBetweenSteps(Cause, kind="wrong-value"):
    """Code between two steps changes weights in another way than in the other job.

    Pruning, clamping, weight normalization by hand and copies of averages write to weights outside of any step. On a
    sharded weight such code sees the rank's own part: its threshold, norm or mean is that of the part. Shapes agree.

    Attributes:
        what: `shard` if each rank sets an equal share of its part to zero, `zeros` if the jobs set other elements to
            zero, else empty.
        alone: The only job whose code does so; empty if both jobs' does.
    """

    what: str
    alone: str = ""
    why = (
        "{alone:?Only code of {alone} changes these weights between the optimizer's step and the next forward|"
        "{what:shard?Code between the optimizer's step and the next forward sets elements to zero, by a threshold of "
        "each rank's own shard: an equal share of every shard becomes zero|{what:zeros?Code between the "
        "optimizer's step and the next forward sets other elements to zero than in the other job: it has another "
        "threshold, or one of each rank's shard|Code between the optimizer's step and the next forward makes other "
        "weights than in the other job: it has other numbers, or those of each rank's shard, such as a norm}}}"
    )
    how = (
        "{alone:?let both jobs change weights in the same way|make a threshold, norm or mean of the whole weight: of "
        "weight.full_tensor(), or all_reduce it}"
    )


class TrainedInOneJob(Cause):
    """One job has a gradient of a weight that the other job freezes.

    `requires_grad_(True)` on all parameters of an adapted model trains its base too, and `nn.Parameter(shard)` requires
    a gradient by default, even if the weight that was sharded did not.

    Attributes:
        is_absent: Whether it is the sharded job that has no gradient.
    """

    is_absent: bool = False
    why = (
        "The code of one job freezes the weight, or detaches what is made of it, and the code of the other does not",
        (
            "{is_absent:?The code cuts the graph behind the weight, by .detach(), .data, no_grad or a collective "
            "without a backward|Sharding replaces the frozen weight by a parameter that requires a gradient, as "
            "nn.Parameter(shard) does by default}"
        ),
    )
    how = (
        "freeze and detach the same in both jobs; freeze before you make the optimizer",
        (
            "{is_absent:?let the gradient flow back to it: torch.distributed.nn.functional has collectives with a "
            "backward|pass requires_grad=weight.requires_grad to nn.Parameter}"
        ),
    )


class StepsInNarrowDtype(Cause):
    """The optimizer of one job steps weights in a narrower dtype than that of the other.

    Each step rounds the weights. A step that is smaller than half the distance to the next number of the narrow dtype
    changes nothing. A model that is cast before its optimizer is made has this, and mixed precision that keeps float32
    weights has not.

    Attributes:
        wide: The dtype of the other job's weights.
        job: Which job has narrow weights.
        steps: How many optimizer steps the jobs made before the traced one.
        or_else: What else moved weights differently, if they differ by more than the steps' roundings.
    """

    narrow: str
    wide: str
    job: str
    steps: int
    or_else: Cause | None = None
    why = (
        "The optimizer of {job} steps {narrow} weights, the other job's steps {wide}: {steps:1?the step|each of the "
        "{steps} steps} before the traced one was rounded to {narrow}, which loses small updates"
    )
    how = (
        "keep the weights that the optimizer steps in {wide}, and compute in {narrow} by autocast or "
        "MixedPrecisionPolicy(param_dtype=...)"
    )
