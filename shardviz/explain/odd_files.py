"""Two checkpoints that differ in one file alone, or in what another step's checkpoint has."""

from __future__ import annotations

from dataclasses import dataclass

from shardviz.explain.cause import Cause
from shardviz.text import counted, printable

NOT_TRAINED = "its rank did not load or train its parts"


@dataclass(frozen=True)
class OddFile:
    """One file that has all differences between two checkpoints, or none of them; a cause has it as a field.

    Attributes:
        at: Whose file it is: 0 or 1.
        name: The file.
        differs: Whether it has all differences; else it has none.
        parts: How many parts of tensors it has of those that were compared.
        odd: How many of them are different.
        others: How many other files there are.
    """

    at: int
    name: str
    differs: bool
    parts: int
    odd: int
    others: int

    @property
    def file(self) -> str:
        """The file's name, as it is printed."""
        return printable(self.name)

    @property
    def some_parts(self) -> str:
        """How many of its parts differ: `all 4`, `3 of 4`."""
        return f"all {self.parts:,}" if self.odd == self.parts else f"{self.odd:,} of {self.parts:,}"

    @property
    def other_files(self) -> str:
        """How many other files there are."""
        return counted(self.others, "other file")


AMONG_OTHERS = (
    "{odd.differs:?All that differs is in {odd.file} of the {side}, {odd.some_parts} parts of it, and nothing in its "
    "{odd.other_files}|Everything in {odd.file} of the {side} is as in the {other}, and most of its {odd.other_files} "
    "is not}"
)


class FileOfAnotherSave(Cause):
    """One file alone has all differences between two checkpoints, or none of them.

    Training changes every part of a tensor, so a difference that stops at the boundary of a file is the file's: it was
    left from another step under the same name, or its rank did not take part. The shapes are the same, and it loads.

    Attributes:
        odd: The file, with what was compared.
        side: What its side is called.
        other: What the other side is called; if they have the same in this file alone, it is the other side's.
        step: The checkpoint of another step that has the same in this file, as it is printed; else empty.
        ranks: The ranks of a job that may not have loaded it; empty between two checkpoints.
    """

    odd: OddFile
    side: str
    other: str
    step: str = ""
    ranks: str = ""
    kinds = ("wrong-value",)
    why = AMONG_OTHERS + (
        ": that file is of {odd.differs:?{step:?{step}|another save}, or "
        "{ranks:?{ranks} did not load it|its rank did not load or train its parts{step:? since}}|the {other}'s save}"
    )
    how = "write {odd.file} again, from the step of the others{ranks:?, or load it on {ranks}}"


class FileOnEitherSide(Cause):
    """All differences between two checkpoints are in one file, in both of them.

    One of the two files is of another save. The tensors' values do not show which, but the optimizer's step within the
    file often does.

    Attributes:
        odd: The file of the second, with what was compared.
        side: What its side is called.
        other: What the other side is called.
        twin: The file of the other side, as it is printed.
    """

    odd: OddFile
    side: str
    other: str
    twin: str
    kinds = ("wrong-value",)
    why = AMONG_OTHERS + "; so it is in {twin} of the first: one of the two is of another save, or " + NOT_TRAINED
    how = (
        "shardviz check each: where steps of the optimizer differ between files, it names the file; then write that "
        "one again, from the step of the others"
    )


class WholeFileDiffers(Cause):
    """The tensors that differ between two checkpoints are exactly those of one file.

    A file of whole tensors ends anywhere within a layer, and nothing else of a model ends just there. Most likely the
    file was taken from another save.

    Attributes:
        file: The file's name, as it is printed.
        side: What its side is called.
        small: Scales and biases in it that do not differ.
        rest: Why its tensors are as they are, if that is known besides.
    """

    file: str
    side: str
    small: int = 0
    rest: Cause = Cause()
    kinds = ("wrong-value",)
    why = (
        "What differs is all of {file} of the {side}{small:? but {small:,} of its scales and biases}, and nothing of "
        "its other files. {rest.cause:?{rest.cause}|That file is of another save, or its tensors alone were changed}"
    )
    how = "{rest.fix:?{rest.fix}|take {file} from the save of the others; compare it with theirs by `shardviz diff`}"


class ValuesOfAnotherStep(Cause):
    """A tensor has the values that a checkpoint of another step has.

    It was left out when weights were gathered, written or loaded, so it kept its old values; or the checkpoint was put
    together, or written again, after training had gone on. Names, shapes and dtypes are right.

    Attributes:
        step: The name of the checkpoint that has the same.
        is_later: Whether that is a later step.
        doubt: The side that may be the wrong one instead; empty if a third step shows that it is not.
        of_job: Whether a job has it, compared with a checkpoint.
    """

    step: str
    is_later: bool = False
    doubt: str = ""
    of_job: bool = False
    kinds = ("write-not-applied", "wrong-value")
    why = (
        "{is_later:?It was taken from {step}, a later step|It was not {of_job:?loaded, gathered or written|gathered, "
        "written or loaded} again after {step}}{doubt:?. Or training does not change it, and the {doubt} is wrong: "
        "only a third step would show that}"
    )
    how = "{doubt:?name a third step with --also; then }{of_job:?load or }write it again, from the weights of this step"


class OutlierCheckpoint(Cause):
    """A tensor is the same in an earlier and a later checkpoint, and different in this one.

    The tensor is frozen, or training had ended for it, so this one checkpoint has it wrong.

    Attributes:
        side: Which side has it otherwise.
    """

    side: str
    kinds = ("wrong-value",)
    why = "Only the {side} has it otherwise"


class NeverLoaded(Cause):
    """A rank's shard is one number throughout, and the checkpoint's is not.

    The initializer filled it, with ones for a norm, and no load overwrote it: its key was missing with strict=False, or
    it was filled again afterwards.
    """

    kinds = ("write-not-applied",)
    why = (
        "It was never loaded, or was filled afterwards; or the job's dump is of before training, and the checkpoint of "
        "after"
    )
    how = (
        "load it after it is made and filled; if the job did not load this checkpoint, compare with the one that it "
        "loaded"
    )
