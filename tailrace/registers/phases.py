"""The phases of a worker's time, the parts of its longest phases, and the purposes of its memory.

After PolyTrace, section 4.2 (figures 19 and 21) and section 4.3 (figure 23).
"""

from dataclasses import dataclass
from typing import Literal

State = Literal["busy", "weights", "data", "idle"]

STATES: tuple[State, ...] = ("busy", "weights", "data", "idle")
"""The states by precedence: the first that holds counts."""

Work = Literal["weight_transfer", "generation", "update", "reference", "advantage", "reward", "other"]
"""The phases in which a worker is busy."""
Wait = Literal["weights", "tools", "data"]
"""The phases in which a worker waits, as far as it says so."""
Phase = Work | Wait | Literal["idle"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseEntry:
    """The display of a phase, or of a part of one."""

    title: str
    meaning: str
    """The meaning for `docs/metrics.md`, in Markdown."""
    colour: str
    state: State = "busy"


PHASES: dict[Phase, PhaseEntry] = {
    "weight_transfer": PhaseEntry(
        title="weight transfer", meaning="new weights are sent, or go into the engine", colour="#cf4f45"
    ),
    "generation": PhaseEntry(title="generation", meaning="the engine generates", colour="#4285c9"),
    "update": PhaseEntry(
        title="update", meaning="a model is trained, or scores the responses that it is trained on", colour="#22997a"
    ),
    "reference": PhaseEntry(title="reference", meaning="the reference scores responses", colour="#b59a2b"),
    "advantage": PhaseEntry(title="advantage", meaning="functions of whole groups are computed", colour="#c978a6"),
    "reward": PhaseEntry(title="reward", meaning="responses are graded", colour="#d97f26"),
    "other": PhaseEntry(title="other work", meaning="models load, checkpoints are written", colour="#5d6b78"),
    "weights": PhaseEntry(
        title="waiting for weights", meaning="it waits for weights", colour="#d0938b", state="weights"
    ),
    "tools": PhaseEntry(
        title="waiting for tools",
        meaning="conversations wait for the answers of tools, and no other generates",
        colour="#b7c48a",
        state="data",
    ),
    "data": PhaseEntry(
        title="waiting for data", meaning="it waits for rows of the queue", colour="#cfae7a", state="data"
    ),
    "idle": PhaseEntry(title="idle", meaning="none of these", colour="#a9b3bd", state="idle"),
}
"""The phases by precedence: where several hold at once, the first counts."""

PARTS: dict[Phase, dict[str, PhaseEntry]] = {
    "generation": {
        "prefill": PhaseEntry(title="prefill", meaning="the model computes prompts", colour="#2f5f9e"),
        "decode": PhaseEntry(title="decode", meaning="the model computes new tokens", colour="#7fb0de"),
        "sampling": PhaseEntry(title="sampling", meaning="tokens are drawn", colour="#9069c6"),
        "communication": PhaseEntry(
            title="communication", meaning="TP ranks exchange, and wait for each other", colour="#cf4f45"
        ),
        "scheduling": PhaseEntry(
            title="scheduling",
            meaning="the host chooses the tokens of a step, and takes in the new ones",
            colour="#d97f26",
        ),
    },
    "update": {
        "data": PhaseEntry(title="data", meaning="samples are packed, and copied to the device", colour="#c98f4e"),
        "forward": PhaseEntry(title="forward", meaning="forward passes, with the loss", colour="#22997a"),
        "backward": PhaseEntry(title="backward", meaning="backward passes", colour="#7cc7ae"),
        "optimizer": PhaseEntry(
            title="optimizer", meaning="the gradient's norm is taken, and the optimizer steps", colour="#4f7f2a"
        ),
        "communication": PhaseEntry(title="communication", meaning="the trainer's ranks exchange", colour="#cf4f45"),
    },
}
"""The parts of a phase, as an engine or a trainer tells them (`take_seconds`). What they leave is `other`."""

PURPOSES: dict[str, PhaseEntry] = {
    "weights": PhaseEntry(title="weights", meaning="of engine, trainer and scorers", colour="#4285c9"),
    "optimizer": PhaseEntry(title="optimizer", meaning="the optimizer's state", colour="#22997a"),
    "gradients": PhaseEntry(title="gradients", meaning="the most at once", colour="#7cc7ae"),
    "kv_cache_used": PhaseEntry(
        title="KV cache in use", meaning="blocks that sequences hold, the most at once", colour="#9069c6"
    ),
    "kv_cache_free": PhaseEntry(
        title="KV cache, reserved", meaning="the blocks beside them, which are reserved", colour="#c9b5e2"
    ),
    "activations": PhaseEntry(
        title="activations",
        meaning="on a GPU, the rest of what its allocator had given out at the peak",
        colour="#d97f26",
    ),
    "other": PhaseEntry(
        title="other", meaning="on a CPU, the rest: activations, libraries, freed memory that is kept", colour="#a9b3bd"
    ),
}
"""The purposes of a worker's memory, from the bottom of the chart to its top."""
