"""The directory of files that Tailrace would otherwise have to make again."""

import os
import stat
from pathlib import Path

from tailrace.host.cache import make_private


def test_what_is_made_for_the_cache_is_of_this_user_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_private(tmp_path / "home" / "tailrace" / "kernels")
    finally:
        os.umask(before)
    made = [tmp_path / "home", tmp_path / "home" / "tailrace", tmp_path / "home" / "tailrace" / "kernels"]
    assert [stat.S_IMODE(path.stat().st_mode) for path in made] == [0o700] * 3


def test_a_directory_that_is_shared_on_purpose_stays_shared(tmp_path: Path) -> None:
    tmp_path.chmod(0o775)
    make_private(tmp_path)
    make_private(tmp_path / "models")
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o775
