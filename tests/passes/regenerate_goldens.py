"""Writes the golden texts anew: ``python -m tests.passes.regenerate_goldens``, then read the difference."""

from __future__ import annotations

from tests.passes.golden_text import GOLDENS, texts


def main() -> None:
    GOLDENS.mkdir(parents=True, exist_ok=True)
    for old in GOLDENS.glob("*.txt"):
        old.unlink()
    for name, text in texts().items():
        (GOLDENS / name).write_text(text)
        print(f"wrote {GOLDENS / name}: {text.count(chr(10))} lines")


if __name__ == "__main__":
    main()
