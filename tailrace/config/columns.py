"""The columns of a queue's rows, and what their cells hold."""

from collections.abc import Mapping
from enum import StrEnum


class ColumnKind(StrEnum):
    """What a cell of a column holds."""

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
    "seed": ColumnKind.INT,
}
"""The columns that a row is put with."""

COLUMNS: Mapping[str, ColumnKind] = {
    **PROMPT_COLUMNS,
    # rollout
    "response_ids": ColumnKind.INTS,
    "response_mask": ColumnKind.INTS,
    "rollout_log_probs": ColumnKind.FLOATS,
    "weight_versions": ColumnKind.INTS,
    "response": ColumnKind.TEXT,
    "finish_reason": ColumnKind.TEXT,
    # reward; NaN says that the grading failed and the sample counts for nothing
    "reward": ColumnKind.FLOAT,
    "reward_error": ColumnKind.TEXT,  # why the grading failed, "" where it did not
    "reward_parts": ColumnKind.JSON,  # figures by name that the grader gave beside the reward; see `Grade.parts`
    # reference and advantage
    "ref_log_probs": ColumnKind.FLOATS,
    "advantages": ColumnKind.FLOATS,
}
"""The columns of a row and what their cells hold. A row is one sample."""
