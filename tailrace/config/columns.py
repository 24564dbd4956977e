"""The columns of a queue's rows and the contents of their cells."""

from collections.abc import Mapping
from enum import StrEnum


class ColumnKind(StrEnum):
    """The contents of a column's cells."""

    INTS = "int64 array"
    FLOATS = "float32 array"
    INT = "int"
    FLOAT = "float"
    TEXT = "str"
    JSON = "JSON value"


PROMPT_COLUMNS: Mapping[str, ColumnKind] = {
    "prompt_ids": ColumnKind.INTS,
    "prompt": ColumnKind.TEXT,
    "question": ColumnKind.JSON,
    "answer": ColumnKind.JSON,
    "metadata": ColumnKind.JSON,
    "task": ColumnKind.TEXT,  # the name of the prompt's task; "" where its source has none
    "seed": ColumnKind.INT,
    "kl_coefficient": ColumnKind.FLOAT,  # only with an adaptive KL penalty
}
"""The columns that a row already has when it is put."""

COLUMNS: Mapping[str, ColumnKind] = {
    **PROMPT_COLUMNS,
    # rollout
    "response_ids": ColumnKind.INTS,
    "response_mask": ColumnKind.INTS,
    "rollout_log_probs": ColumnKind.FLOATS,
    "weight_versions": ColumnKind.INTS,
    "response": ColumnKind.TEXT,
    "finish_reason": ColumnKind.TEXT,
    # reward; NaN means that the grading failed and the sample counts for nothing
    "reward": ColumnKind.FLOAT,
    "reward_error": ColumnKind.TEXT,  # the reason of a failed grading, otherwise ""
    "reward_parts": ColumnKind.JSON,  # figures by name that the grader gave beside the reward; see `Grade.parts`
    # reference and advantage
    "ref_log_probs": ColumnKind.FLOATS,
    "advantages": ColumnKind.FLOATS,
    "kept": ColumnKind.FLOATS,
    # critic
    "values": ColumnKind.FLOATS,
    "returns": ColumnKind.FLOATS,
}
"""The columns of a row and the contents of their cells. A row is one sample."""
