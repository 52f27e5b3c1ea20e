import sys

from lightning_liger.cli import main

if __name__ == "__main__":
    sys.exit(main())
