"""Tests of the rules; the functions that they share have their assertions explained too."""

import pytest

pytest.register_assert_rewrite("tests.lightning_liger.patching.rules.comparing")
