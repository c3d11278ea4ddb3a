"""Write docs/metrics.md from unified_trainer/tools/report/metrics.toml."""

from pathlib import Path

from unified_trainer.tools.report.glossary import page

(Path(__file__).parents[1] / "docs" / "metrics.md").write_text(page(), encoding="utf-8")
