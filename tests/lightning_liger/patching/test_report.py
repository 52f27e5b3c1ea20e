"""The report of what was replaced: its table, its plain data, its count."""

import json

from lightning_liger.patching import PatchEntry, PatchReport

REPLACED = PatchEntry("LlamaRMSNorm", "rms_norm", 5, "rms_norm (llama casting)", 2.5e-7)
EXACT = PatchEntry("LlamaMLP", "silu_mul", 2, "silu_mul", 0.0)
KEPT = PatchEntry("LayerNorm", "rms_norm", 3, None, reason="is not of one weight vector")


def test_report_is_a_table_with_counts_errors_and_reasons_and_plain_data() -> None:
    report = PatchReport([REPLACED, EXACT, KEPT])
    lines = str(report).splitlines()
    assert "Module" in lines[2]
    rows = {cells[1]: cells[2:] for cells in (line.replace("│", " │ ").split() for line in lines) if len(cells) > 3}
    assert "5" in rows["LlamaRMSNorm"]
    assert "2e-07" in rows["LlamaRMSNorm"]
    assert "exact" in rows["LlamaMLP"]
    assert "(is" in rows["LayerNorm"]
    assert "exact" not in rows["LayerNorm"]
    assert max(map(len, lines)) <= 120
    rows = report.as_dict()
    assert (rows[0]["structure"], rows[0]["error"], rows[2]["replacement"]) == ("LlamaRMSNorm", 2.5e-7, None)
    assert json.loads(json.dumps(rows)) == rows
    assert "no module matches a chosen kernel" in str(PatchReport())
