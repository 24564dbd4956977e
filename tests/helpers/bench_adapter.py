"""An adapter of no framework: it plays the jobs on a clock of its own. DIRECTORY [SHORTER]."""

import json
import sys
from pathlib import Path


def main(directory: Path, shorter: int) -> None:
    """Write the events of one token a second; `shorter` tokens fewer than asked for."""
    header, *groups = map(json.loads, (directory / "jobs.jsonl").read_text().splitlines())
    events, now = [], 0.0
    for step in range(header["steps"]):
        begin = now
        for group in (group for group in groups if group["step"] == step):
            assert len(group["samples"]) == header["group_size"]
            for sample, job in enumerate(group["samples"]):
                tokens = sum(turn["generated_tokens"] for turn in job["turns"]) - shorter
                info = {"group": group["group"], "sample": sample}
                span = {"start": begin, "end": begin + tokens, "step": step, "tokens": tokens}
                events.append({"task": "sample", "actor": "engine", **span, "info": info})
                now = max(now, begin + tokens)
        events.append({"task": "step", "actor": "trainer", "start": begin, "end": now, "step": step})
    (directory / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


if __name__ == "__main__":
    main(Path(sys.argv[-1]), int(sys.argv[1]) if len(sys.argv) > 2 else 0)
