"""The types that a checkpoint's pickle may name: a closed list. Each is a name, and nothing of it is imported."""

from __future__ import annotations

_DCP = "torch.distributed.checkpoint."
_DEEPSPEED = (
    *("deepspeed.runtime.zero.config.ZeroStageEnum", "deepspeed.utils.tensor_fragment.fragment_address"),
    *(f"deepspeed.runtime.fp16.loss_scaler.{name}" for name in ("LossScaler", "DynamicLossScaler")),
    *("torch._tensor._rebuild_from_type_v2", "torch.Tensor", "torch.nn.parameter.Parameter"),
    *("argparse.Namespace", "_codecs.encode"),
)
"""Types of DeepSpeed's own files, and of what jobs put beside a model in them."""

_STORAGES = ("Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool", "ComplexFloat")

KNOWN = frozenset(
    {
        *(f"{_DCP}metadata.{name}" for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
        *(f"{_DCP}metadata.{name}StorageMetadata" for name in ("Tensor", "Bytes", "Chunk")),
        f"{_DCP}metadata._MEM_FORMAT_ENCODING",
        *(f"{_DCP}filesystem.{name}" for name in ("_StorageInfo", "_StoragePrefix")),
        *(f"{_DCP}planner.{name}" for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")),
        *("torch.Size", "torch.device", "torch.serialization._get_layout", "torch.storage.UntypedStorage"),
        *(f"torch.{name}Storage" for name in _STORAGES),
        *(f"torch._utils.{name}" for name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter")),
        *("collections.OrderedDict", "pathlib.PosixPath", "pathlib.WindowsPath"),
        *_DEEPSPEED,
        *("pathlib._local.PosixPath", "pathlib._local.WindowsPath"),
    }
)
"""The types that a checkpoint may name; element types besides. Each is a name here, and no more."""
