"""Makes one token and says when each phase of the start began: `python -m benchmarks.gpu.first_token FOLDER DEVICE T`.

T is when the command was given, on the clock of `time.monotonic`, which all processes of a machine share.
"""

from __future__ import annotations

import json
import sys
import time


def main(folder: str, device: str, begin: float) -> None:
    phases = {"Python runs": time.monotonic() - begin}

    def tell(phase: str, share: float) -> None:
        phases.setdefault(phase, time.monotonic() - begin)

    from quire import LLM, SamplingParams

    tell("Quire and torch are imported", 0.0)
    with LLM(folder, device=device, on_load=tell) as llm:
        llm.generate([[1, 2, 3, 4]], SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
        tell("first token", 1.0)
    print(json.dumps(phases))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
