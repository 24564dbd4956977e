"""An adapter of no framework: it plays the jobs on a clock of its own. [KEY=VALUE]… DIRECTORY

shorter   tokens of each response that are missing
first     the step of its first samples, by default 0
further   step events after the last step of the jobs
"""

import json
import sys
from pathlib import Path


def main(directory: Path, *, shorter: int = 0, first: int = 0, further: int = 0) -> None:
    """Write the events of one token a second."""
    header, *groups = map(json.loads, (directory / "jobs.jsonl").read_text().splitlines())
    events, now = [], 0.0
    for step in range(header["steps"]):
        begin = now
        for group in (group for group in groups if group["step"] == step):
            assert len(group["samples"]) == header["group_size"]
            for sample, job in enumerate(group["samples"]):
                tokens = sum(turn["generated_tokens"] for turn in job["turns"]) - shorter
                info = {"group": group["group"], "sample": sample}
                span = {"start": begin, "end": begin + tokens, "step": first + step, "tokens": tokens}
                events.append({"task": "sample", "actor": "engine", **span, "info": info})
                now = max(now, begin + tokens)
        events.append({"task": "step", "actor": "trainer", "start": begin, "end": now, "step": step})
    for step in range(header["steps"], header["steps"] + further):
        events.append({"task": "step", "actor": "trainer", "start": now, "end": now + 1, "step": step})
    (directory / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


if __name__ == "__main__":
    *mistakes, folder = sys.argv[1:]
    main(Path(folder), **{key: int(value) for key, value in (mistake.split("=") for mistake in mistakes)})
