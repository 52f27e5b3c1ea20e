"""Commands that need no PyTorch run before the package's imports: those take seconds, and may be what is broken."""

import importlib
import sys
from pathlib import Path

_COMMANDS = ("doctor", "init", "-h", "--help", "--version")


def run_early() -> None:
    """Runs the command of this process and ends the process, if it is one that needs no PyTorch; else does nothing."""
    is_module = sys.argv[0] == "-m" and "lightning_liger" in sys.orig_argv
    # Processes that the command starts have its sys.argv too, if they are started by multiprocessing.
    is_script = Path(sys.argv[0]).name == "lightning-liger" and sys.argv[0] in sys.orig_argv
    is_command = is_module or is_script
    if not is_command or (sys.argv[1:] and sys.argv[1] not in _COMMANDS):
        return
    # By name, because these modules are above the package; they import nothing that it imports.
    try:
        main = importlib.import_module("lightning_liger.cli").main
    except ImportError:  # of what parses options; the table says of which package
        if sys.argv[1:2] != ["doctor"]:
            raise
        run_doctor = importlib.import_module("lightning_liger.commands.doctor").run_doctor
        sys.exit(run_doctor(json="--json" in sys.argv))
    sys.exit(main())
