"""python -m mlx_worker: the same as the mlx-worker command."""

from mlx_worker.cli import main

if __name__ == "__main__":
    main()
