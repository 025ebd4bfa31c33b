import subprocess
import sys
from pathlib import Path


def test_a_mesh_of_four_devices_gives_what_one_gives():
    root = Path(__file__).parent.parent
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.sharding_check"], cwd=root, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert "3 passed" in run.stdout
