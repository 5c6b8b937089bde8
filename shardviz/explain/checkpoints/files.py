"""Causes in a checkpoint's files: damaged, incomplete, of several saves, or another step's."""

from __future__ import annotations

from dataclasses import dataclass

from shardviz.explain.cause import Cause
from shardviz.text import counted, printable

SAVE_AGAIN = "save the checkpoint again, and don't load this one before you know what happened"
OF_DEEPSPEED = "copy the whole checkpoint again; or save it again with engine.save_checkpoint on every rank"


class UnreadableFile(Cause, kind="incomplete"):
    """A file of a checkpoint is missing, shorter than its metadata says, or damaged.

    An interrupted copy, a full disk or lost bytes leave such a file. The folder's listing looks right; only a load of
    these tensors raises.

    Attributes:
        is_whole: Whether the file is long enough.
    """

    is_whole: bool = False
    why = "{is_whole:?Bytes were changed or lost in the file|A copy or a save ended early}"
    how = "copy the checkpoint again, and compare the sizes of its files{is_whole:? and their checksums}"


class StaleFileIndex(Cause, kind="incomplete"):
    """The index of a sharded checkpoint names the wrong files for its tensors.

    The index (`model.safetensors.index.json`) is a file of its own, so the index of an earlier save fits in the folder.
    Loaders read only the index, and leave out a tensor that it doesn't name.
    """

    why = "The index was written for other files, or edited by hand"
    how = "write the index again"


class FileCopiedOver(Cause, kind="incomplete"):
    """A file of a sharded checkpoint has the tensors of another of its files, in as many bytes.

    A copy or a download wrote one file under two names. The index is right, and a loader does not find the tensors
    that the lost file had.

    Attributes:
        twin: The file that it is a copy of.
    """

    file: str
    twin: str
    why = "{file} is a copy of {twin}, and what the index says was in it is lost"
    how = "copy {file} again from where it was saved; the index is right"


class TwoSetsOfWeights(Cause, kind="duplicated"):
    """A folder has a file of all weights and an index of several files, and they differ.

    transformers and others read model.safetensors if it is there, and the index otherwise. Other tools read the index.
    A save of several files into the folder of an earlier save leaves both.

    Attributes:
        file: The file of all weights.
    """

    file: str
    why = "Two saves wrote into the folder. transformers reads {file}, and the index names other files"
    how = "delete the older of the two: {file}, or the index and its files"


class ChunkOutOfBounds(Cause, kind="wrong-shape"):
    """A part of a tensor was saved for indices that the tensor does not have.

    Each rank saves its own part with the offsets that it believes in. If ranks disagree on the global shape, one of
    them with padding for example, the parts reach beyond the shape that the metadata has.
    """

    why = "Ranks saved shards of a different global shape, such as a padded one"
    how = SAVE_AGAIN


class ShardsOfTwoSaves(Cause):
    """Elements of a tensor are in no file of the checkpoint, or in several.

    A rank did not save its part, two saved the same, or a second save on a different mesh wrote into the folder of
    the first. If a load fills a tensor that already has values, a gap keeps the old ones. If two values are saved,
    the one that is read last counts.

    Attributes:
        is_twice: Whether they are in several.
    """

    is_twice: bool = False
    kinds = ("missing", "duplicated")
    why = (
        "{is_twice:?Ranks saved overlapping shards|A rank did not save its shard}, or files of two saves are in one "
        "folder"
    )
    how = SAVE_AGAIN


class UnknownPickledType(Cause, kind="incomplete"):
    """A part of a tensor was pickled as a type that torch.distributed.checkpoint does not write.

    A pickle may run any code when it is loaded. shardviz reads a list of known types as data and runs nothing, so it
    does not know what this part holds.
    """

    why = "Code other than torch.distributed.checkpoint wrote it, or it was made to run code"
    how = "write the checkpoint again with torch.distributed.checkpoint or safetensors; shardviz ran nothing in it"


class UnlistedChunk(Cause, kind="incomplete"):
    """The metadata has a part of a tensor and does not say which file it is in.

    Metadata and files are written at different times. A save that is interrupted in between leaves entries without a
    file.
    """

    why = "The save ended early"
    how = SAVE_AGAIN


class MixedChunkTypes(Cause, kind="wrong-shape"):
    """Parts of one tensor were saved in different dtypes or shapes.

    Each rank writes its own part as it has it. A rank on which a module was cast or reshaped writes a different type
    than the metadata of the whole tensor says.
    """

    dtype: str
    why = "Ranks saved the tensor in different dtypes or shapes"
    how = "cast to torch.{dtype} on every rank before saving"


class UntiedCheckpointHead(Cause, kind="untied"):
    """The settings tie the output embedding to the input embedding, but the two differ.

    Sharding or a conversion gave the head a parameter of its own, and training changed one of the two. A loader that
    follows the settings uses one of them for both and drops the other without a word.
    """

    why = "The tie was lost in training or conversion: one of the two was trained alone"
    how = "find out which of them the model used; save that one, or set tie_word_embeddings to false"


class ForeignFile(Cause, kind="incomplete"):
    """A file of the checkpoint differs from the file that the metadata describes.

    Two saves into one folder, or a copy that mixes two, leave a file under the right name with other shards in it. It
    is long enough, so a check of sizes passes.

    Attributes:
        file: The file's name, as it is printed.
    """

    file: str
    why = (
        "Two saves are in one folder, and the file belongs to the other save",
        "A copy mixed the files of two saves",
    )
    how = "take {file} from the save of this metadata; write each save to a folder of its own"


class DamagedHeader(Cause):
    """Tensors of a safetensors file share bytes, or bytes of it belong to no tensor.

    safetensors itself writes each tensor behind the one before it and refuses any other file. Tools that read the
    header on their own, without that check, load the shared bytes twice.
    """

    kinds = ("duplicated", "incomplete")
    why = "The header is damaged, or was written by hand"
    how = "write the file again with safetensors, which refuses to open this one"


class MixedZeroFiles(Cause):
    """DeepSpeed's files belong to several saves: buffers or numbers of ranks don't match.

    The files of a save have fixed names, so those of an earlier save with another model or more ranks stay next to
    the new ones.
    """

    kinds = ("wrong-shape", "incomplete")
    why = "Files of different saves are in one folder"
    how = "keep the files of one save only, all of them; or save it again with engine.save_checkpoint on every rank"


class MissingZeroFile(Cause, kind="incomplete"):
    """Files of some of DeepSpeed's ranks are not in the checkpoint.

    Every data-parallel rank writes a file with its part of the optimizer's buffers. engine.save_checkpoint has to run
    on all of them, and a copy from local disks has to fetch the files of all nodes.
    """

    why = "A rank did not save, or not all files were copied"
    how = OF_DEEPSPEED


class RoundRobinGradients(Cause, kind="misordered"):
    """DeepSpeed linked parameters to places in its buffers that hold other parameters.

    With round_robin_gradients DeepSpeed lays the buffers out in a different order than it computes the links for. All
    sizes add up, so the conversion to a universal checkpoint succeeds with exchanged weights.
    """

    why = (
        "The save used round_robin_gradients: DeepSpeed 0.19.8 links fragments in the model's order and lays buffers "
        "out in a different order. ds_to_universal.py follows the links to the wrong elements"
    )
    how = (
        "save without round_robin_gradients before you convert, or use zero_to_fp32.py, which reads this checkpoint "
        "correctly"
    )


class UnfinishedUniversalCheckpoint(Cause, kind="incomplete"):
    """Parameters of the model have no folder in DeepSpeed's universal checkpoint.

    ds_to_universal.py writes one folder a parameter. What it wrote before it ended looks like a whole checkpoint.
    """

    why = "The conversion ended early, or not all files were copied"
    how = "convert the checkpoint again"


@dataclass(frozen=True)
class OddFile:
    """The one file with all differences between two checkpoints, or with none: a cause's field.

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
    "{odd.differs:?All differences are in {odd.file} of the {side}, in {odd.some_parts} parts, and none in its "
    "{odd.other_files}|{odd.file} of the {side} matches the {other}, and most of its {odd.other_files} don't}"
)


class FileOfAnotherSave(Cause):
    """One file alone has all differences between two checkpoints, or none of them.

    Training changes every part of a tensor, so a difference that stops at the boundary of a file belongs to the
    file: it was left from another step under the same name, or its rank did not take part. The shapes are the same,
    and it loads.

    Attributes:
        odd: The file, with what was compared.
        other: What the other side is called; if they have the same in this file alone, it is the other side's.
        step: The checkpoint of another step that has the same in this file, as it is printed; else empty.
        ranks: The ranks of a job that may not have loaded it; empty between two checkpoints.
    """

    odd: OddFile
    side: str
    other: str
    step: str = ""
    ranks: str = ""
    why = AMONG_OTHERS + (
        ". The file comes from {odd.differs:?{step:?{step}|another save}, or {ranks:?{ranks} did not load it|its rank "
        "did not load or train its parts{step:? since}}|the {other}'s save}"
    )
    how = "write {odd.file} again, from the step of the others{ranks:?, or load it on {ranks}}"


class FileOnEitherSide(Cause):
    """All differences between two checkpoints are in one file, in both of them.

    One of the two files is of another save. The tensors' values do not show which, but the optimizer's step within the
    file often does.

    Attributes:
        odd: The file of the second, with what was compared.
        other: What the other side is called.
        twin: The file of the other side, as it is printed.
    """

    odd: OddFile
    side: str
    other: str
    twin: str
    why = AMONG_OTHERS + (
        ". In the first, they are in {twin}: one of the two files comes from another save, or its rank did not load or "
        "train its parts"
    )
    how = (
        "run shardviz check on each: it names the file whose optimizer steps differ from the others'; write that file "
        "again, from the step of the others"
    )


class WholeFileDiffers(Cause):
    """The tensors that differ between two checkpoints are exactly those of one file.

    A file of whole tensors ends anywhere within a layer, and nothing else of a model ends just there. Most likely the
    file was taken from another save.

    Attributes:
        file: The file's name, as it is printed.
        small: Scales and biases in it that do not differ.
        rest: Why its tensors are as they are, if that is known besides.
    """

    file: str
    side: str
    small: int = 0
    rest: Cause = Cause()
    why = (
        "All of {file} of the {side} differs{small:? except {small:,} of its scales and biases}, and none of its other "
        "files. {rest.cause:?{rest.cause}|The file comes from another save, or only its tensors were changed}"
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

    The tensor is frozen, or training had ended for it, and this one checkpoint has it wrong. Or the later checkpoint
    still has the values of the earlier one.

    Attributes:
        side: The one with different values.
        other: The side that it was compared with.
        step: A checkpoint that has the same as the other side.
    """

    side: str
    other: str
    step: str
    why = (
        "Only the {side} has different values: if the tensor is frozen, the {side} has it wrong",
        "The later of the {other} and {step} still has the values of the earlier",
    )
    how = (
        "take it from {step}",
        "write it again, from the weights of its own step",
    )


class NeverLoaded(Cause, kind="write-not-applied"):
    """A rank's shard is one number throughout, and the checkpoint's is not.

    The initializer filled it, with ones for a norm, and no load overwrote it: its key was missing with strict=False, or
    it was filled again afterwards.
    """

    why = (
        "The weight was never loaded, or was filled again after the load",
        "The job's dump dates from before training, and the checkpoint from after",
    )
    how = (
        "load it after it is made and filled",
        "compare with the checkpoint that the job loaded",
    )


class OverwrittenParts(Cause, kind="misordered"):
    """Parts of a dim were all written to the places of the first; the last of them stays.

    Each rank numbers its experts, its layers or its rows from 0. Whoever joins the ranks' files must add the rank's
    offset; without it each file is written over the one before, and the rest keeps the zeros that it was made with.
    """

    dim: int
    why = (
        "Each part was written along dim {dim} at its number within the part, over the part before",
        "The last part alone was kept, at the start, on purpose",
    )
    how = ("add the part's offset along dim {dim} to the number that it is written at", "leave it as it is")
