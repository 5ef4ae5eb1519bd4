"""How the comparisons in this folder end: one JSON object on the last line, and in a file."""

import json
from pathlib import Path
from typing import Any


def tell(result: dict[str, Any], file: Path | None) -> None:
    """Print the result as the last line; write it to the file too, if there is one."""
    print(json.dumps(result))
    if file is not None:
        file.write_text(json.dumps(result, indent=1) + "\n")
