"""Writes docs/performance.md from benchmarks/results; `make bench` measures anew."""

from __future__ import annotations

from tools.performance.page import PAGE, page, results


def main() -> None:
    PAGE.write_text(page(results()))


if __name__ == "__main__":
    main()
