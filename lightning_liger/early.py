"""``lightning-liger doctor`` runs before the package's imports, which may be what is broken."""

import importlib
import sys
from pathlib import Path


def run_doctor_early() -> None:
    """Runs ``doctor`` and ends the process, if that is the command of this process; else does nothing."""
    is_module = sys.argv[0] == "-m" and "lightning_liger" in sys.orig_argv
    if sys.argv[1:2] != ["doctor"] or not (is_module or Path(sys.argv[0]).name == "lightning-liger"):
        return
    # By name, because these modules are above the package; they import nothing that it imports.
    try:
        main = importlib.import_module("lightning_liger.cli").main
    except ImportError:  # of what parses options; the table says of which package
        run_doctor = importlib.import_module("lightning_liger.commands.doctor").run_doctor
        sys.exit(run_doctor(json="--json" in sys.argv))
    sys.exit(main())
