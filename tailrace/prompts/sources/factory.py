"""Opens the source that a configuration names."""

from collections.abc import Iterator

from tailrace.config.prompts import (
    DatasetSource,
    HubSource,
    JsonlSource,
    ParquetSource,
    PromptSource,
    ReasoningGymSource,
    TraceSource,
)
from tailrace.prompts.sources.base import Row
from tailrace.prompts.sources.dataset import dataset_rows, hub_rows
from tailrace.prompts.sources.jsonl import jsonl_rows


def source_rows(config: PromptSource, key: str) -> Iterator[Row]:
    """The rows of the source of `config.type`, in its order. Slow imports happen only for their own source.

    `key`: the key of the source in the recipe, for messages.

    Raises:
        PromptError: the source cannot be read.
    """
    match config:
        case JsonlSource():
            return jsonl_rows(config, key)
        case ParquetSource():
            from tailrace.prompts.sources.parquet import parquet_rows

            return parquet_rows(config, key)
        case DatasetSource():
            return dataset_rows(config, key)
        case HubSource():
            return hub_rows(config, key)
        case ReasoningGymSource():
            from tailrace.prompts.sources.reasoning_gym import reasoning_gym_rows

            return reasoning_gym_rows(config, key)
        case TraceSource():
            from tailrace.prompts.sources.trace import trace_rows

            return trace_rows(config)
