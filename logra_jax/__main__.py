"""Lists the commands: each is a module of its own."""

import sys

COMMANDS = ("train", "evaluate", "data", "convert", "compare", "plan")

if __name__ == "__main__":
    listed = "".join(f"\n  python -m logra_jax.{name} --help" for name in COMMANDS)
    print(f"the commands are{listed}", file=sys.stderr)
    sys.exit(2)
