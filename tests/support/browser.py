"""What headless Chromium makes of a page at a width: whether it overflows, lacks images, or hides text under other."""

import html
import re
import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")

SCRIPT = """<script>addEventListener("load", () => {
  const found = [], root = document.documentElement, wide = root.scrollWidth - root.clientWidth
  if (innerWidth !== WIDTH) found.push("a window of " + innerWidth)
  const all = [...document.querySelectorAll("body *")]
  const out = all.find(block => !block.closest(".scroll table") && block.getBoundingClientRect().right > innerWidth + 1)
  if (wide > 0) found.push("wider than the window by " + wide + ", such as " + out?.outerHTML.slice(0, 80))
  for (const image of document.images) if (!image.naturalWidth) found.push("missing image " + image.src)
  const blocks = [...document.querySelectorAll("h1, h2, p, li, figure, svg, table, tr, img")]
  const measured = blocks.map(block => [block, block.getBoundingClientRect()])
  const boxes = measured.filter(([_, box]) => box.width && box.height)
  for (const [one, a] of boxes) for (const [other, b] of boxes) {
    if (one.contains(other) || other.contains(one) || one.closest("svg") && other.closest("svg")) continue
    const across = Math.min(a.right, b.right) - Math.max(a.left, b.left)
    const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top)
    if (across > 1 && down > 1) found.push(one.tagName + " over " + other.tagName)
  }
  if (document.body.innerText.trim().length < 100) found.push("a white page")
  parent.postMessage("FOUND " + boxes.length + ": " + found.join("; "), "*")
})</script>"""
FRAME = """<title>nothing</title><script>onmessage = event => document.title = event.data</script>
<body style="margin: 0"><iframe src="PAGE" style="border: 0; width: WIDTHpx; height: 3000px"></iframe>"""
"""A window of headless Chromium is at least 500 pixels wide; a frame may be narrower."""


def faults(page: Path, *, width: int) -> str:
    """Return what is wrong with the page; "" if nothing is."""
    assert CHROMIUM is not None
    copy = page.with_name(f"probed-{width}.html")
    text = re.sub(r"<meta[^>]*Content-Security-Policy[^>]*>", "", page.read_text(), flags=re.IGNORECASE)
    copy.write_text(text + SCRIPT.replace("WIDTH", str(width)))
    frame = page.with_name(f"frame-{width}.html")
    frame.write_text(FRAME.replace("PAGE", copy.name).replace("WIDTH", str(width)))
    argv = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", "--virtual-time-budget=5000"]
    argv += [f"--user-data-dir={page.parent / '.browser'}", f"--window-size={max(width, 500)},3000", frame.as_uri()]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    title = re.search(r"<title>FOUND (\d+): (.*?)</title>", done.stdout)
    assert title, done.stdout[-2000:] + done.stderr[-2000:]
    assert int(title[1]) > 3
    return html.unescape(title[2])
