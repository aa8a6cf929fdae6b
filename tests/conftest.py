"""Eight simulated devices for every test, and the options of the suite."""

import os
from pathlib import Path

# The default model is converted once for all runs of the tests, and not into the user's own cache.
CACHE = Path(__file__).parent.parent / ".cache"
os.environ["XDG_CACHE_HOME"] = str(CACHE)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Optimised code would take twice as long to compile, and the models of the tests are tiny.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        "--xla_backend_optimization_level=0",
    ]
)

import jax  # noqa: E402  (reads the environment set above)
import pytest  # noqa: E402

# Programs queued on simulated devices can starve each other's collectives, and XLA then aborts the process.
jax.config.update("jax_cpu_enable_async_dispatch", False)
# Tests share compiled programs with each other and with the run before.
jax.config.update("jax_compilation_cache_dir", str(CACHE / "xla"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)

FIXTURES = Path(__file__).parent / "fixtures"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full",
        action="store_true",
        help="slow tests too, the full product of meshes, drafts, trees, placements, and XLA's emitters of users",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: runs with --full only")
    if not config.getoption("--full"):
        # XLA's older emitters compile the same HLO in half the time. `--full`, and the processes of their own that
        # test_cli.py starts, compile as users do. XLA reads this when it makes its devices, which is later.
        os.environ["XLA_FLAGS"] += " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves slow tests out."""
    for item in items:
        if item.get_closest_marker("slow") and not config.getoption("--full"):
            item.add_marker(pytest.mark.skip(reason="slow: run it with --full"))


@pytest.fixture(scope="session")
def fixtures() -> Path:
    return FIXTURES
