"""What is known of transformers 5.23's families: bugs that the trip there and back finds, and what cannot be built.

Each bug is a pattern over what `outcome_of` says, with its cause; `demos/frameworks/tp_plans.md` tells them at length.
"""

from __future__ import annotations

import re

TIED = re.compile(r"\d ranks: tied ")
"""Under a plan tied weights are gathered one by one, so both are saved; a load ties them again: no element is wrong."""

PERMUTED: dict[str, tuple[str, ...]] = {
    "HrmTextConfig": (
        r"permuted model\.[HL]_module\.layers\.\[0-3\]\.attn\.gqkv_proj\.weight: dim 0 .*as \[512/4/ranks\]",
        r"permuted model\.[HL]_module\.layers\.\[0-3\]\.mlp\.gate_up_proj\.weight: dim 0 .*as \[192/2/ranks\]",
        r"(foreign|name-collision) model\.[HL]_module\.layers\.\d\.(self_attn|mlp)\.\w+_proj\.weight: ",
    ),
    "Step3p7Config": (
        r"permuted model\.layers\.3\.moe\.(gate|up)_proj\.weight: dim 1 is in the order of view\(1, 2, [24], \d+\)",
        r"misordered model\.language_model\.layers\.3\.mlp\.experts\.gate_up_proj: "
        r"\[4, 192/2/tp, 64\], held \[4, 192/4/tp, 64\]",
    ),
} | dict.fromkeys(
    ("InklingConfig", "Inkling2Config", "Inkling2TextConfig"),
    (
        r"permuted model\.llm\.layers\.\[0-3\]\.mlp\.experts\.w13_weight: dim 1's indices come .*"
        r"view\((2, 48, 2\)\.permute\(2, 1, 0|2, 2, 24, 2\)\.permute\(1, 3, 2, 0)\)",
        r"misordered model\.(language_model\.)?layers\.0\.mlp\.experts\.gate_up_proj: "
        r"\[4, 192/tp, 64\], held \[4, 192/2/tp, 64\]",
    ),
)
"""Silent: nothing raises. A file's fused or interleaved tensor is cut for ranks before it is taken apart, or is held
segment by segment under a label that does not say so."""

REFUSED = {
    "Qwen3OmniMoeTalkerCodePredictorConfig": r"ValueError: ModuleList has no `out_features`",
    "Qwen3VLMoeConfig": r"RuntimeError: You set `ignore_mismatched_sizes` to `False`",
}
"""transformers itself raises under the plan, on 2 ranks and on 4."""

NOT_BUILT = {
    "Dots3NoteConfig": "StrictDataclassClassValidationError",
    "Ernie4_5_VL_MoeConfig": "transformers has no model",
    "Ernie4_5_VL_MoeTextConfig": "transformers has no model",
    "Ernie4_5_VL_MoeVisionConfig": "transformers has no model",
    "Gemma3nConfig": "ImportError: TimmWrapperModel requires",
    "Granite4VisionConfig": "TypeError: object of type 'NoneType' has no len",
    "Qwen2_5OmniConfig": "StopIteration",
    "Qwen3OmniMoeConfig": "StopIteration",
    "Qwen3OmniMoeTalkerConfig": "AttributeError: .*spatial_merge_size",
    "T5GemmaModuleConfig": "transformers has no model",
}
"""Not built: names kept for old code, a base class, a library that is not here, defaults that make no model."""
