"""The check: a result against the committed baseline."""

from typing import Any

TOLERANCE = 0.25  # a ratio may be this much worse before the check fails


def regressions(
    result: dict[str, Any], baseline: dict[str, Any], *, tolerance: float = TOLERANCE
) -> list[str]:
    """Return one line for every ratio that is worse than in the baseline, or gone.

    Args:
        result: What was measured now.
        baseline: What was measured when all was well.
        tolerance: By how much a ratio may be worse.
    """
    now = {row["name"]: row for row in result["ratios"]}
    found = []
    for row in baseline["ratios"]:
        name, before = row["name"], row["median"]
        if name not in now:
            found.append(f"{name}: {before:.3f} in the baseline, not measured now")
            continue
        after = now[name]["median"]
        worse = before / after if row["better"] == "higher" else after / before
        if worse > 1 + tolerance:
            share = f"{100 * (worse - 1):.0f} % worse"
            found.append(f"{name}: {before:.3f} -> {after:.3f}, {share} ({row['title']})")
    return found


def other_machine(result: dict[str, Any], baseline: dict[str, Any]) -> str | None:
    """Return what differs between the machines of two results, or None."""
    keys = ("cpu", "cores")
    here, there = ({key: each["hardware"][key] for key in keys} for each in (result, baseline))
    return None if here == there else f"the baseline was measured on {there}, this is {here}"
