"""Waiting in tests: until something happens, and so long that a busy machine is not taken for one that hangs."""

import time

PATIENCE = 600.0
"""Seconds after which a test that waits fails. No test passes because of it."""


def wait_until(condition, process=None):
    """Return when the condition holds. Fail if the process, which makes it true, ends before."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)
