"""The subcommands that need no Trainer: each is a function in a module that is imported when the command runs."""

COMMANDS = {
    name: f"lightning_liger.commands.{name}:run_{name}" for name in ("inspect", "doctor", "bench", "init", "schema")
}
"""By name, the function of each: its arguments and its docstring are the options, and it returns the exit status."""
